"""What a study leaves: its report as Markdown and JSON, every curve as CSV, and the picture."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.scaling.figures import save, save_figure
from bench.study.curves import AXES, Trace
from bench.study.estimates import Estimate
from bench.study.figures import AXIS_WORDS, draw
from bench.study.group_figure import draw_groups
from bench.study.report import Crossing, StudyReport, mean
from bench.study.usage import Usage
from pipeline.progress import number

HEADER = ("arm", "seed", "step", "rollouts", "tokens", "core_s", "hard", "overall")

# A figure of the runs, averaged over the seeds of an arm: words, the figure, digits after the point.
FACTS: tuple[tuple[str, Callable[[Trace], float | None], str], ...] = (
    ("optimizer steps", lambda t: t.steps, ",.1f"),
    ("rollouts", lambda t: t.rollouts, ",.0f"),
    ("tokens", lambda t: t.tokens, ",.0f"),
    ("core-s", lambda t: t.points[-1].core_s, ",.0f"),
    ("core-s, whole run", lambda t: t.run_core_s, ",.0f"),
    ("rollouts/s", lambda t: t.rollouts / t.train_s if t.train_s else None, ",.0f"),
    ("lag", lambda t: t.lag_mean, ".2f"),
    ("largest lag", lambda t: t.lag_max, ".1f"),
    ("ESS", lambda t: t.ess_mean, ".3f"),
    ("reward at the end", lambda t: t.reward_mean, ".3f"),
)

USES: tuple[tuple[str, Callable[[Usage], float], str], ...] = (
    ("trained", lambda u: u.trained_frac, ".1%"),
    ("wasted, all right", lambda u: u.wasted_right_frac, ".1%"),
    ("wasted, all wrong", lambda u: u.wasted_wrong_frac, ".1%"),
    ("problems ever solved", lambda u: u.ever_solved_frac, ".1%"),
    ("groups trained", lambda u: u.num_groups, ",.0f"),
    ("with a solution", lambda u: u.full_frac, ".1%"),
    ("improving", lambda u: u.improving_frac, ".1%"),
    ("from a retry", lambda u: u.retried_frac, ".1%"),
)


def markdown(report: StudyReport) -> str:
    by_arm = {arm.name: [t for t in report.traces if t.arm == arm.name and t.points] for arm in report.arms}
    parts = [
        f"Pass@1 at the end, and its mean over the first {report.budget:,.0f} rollouts: mean over seeds [95% bootstrap "
        f"interval]; gains are over {report.arms[0].name}, paired by seed.",
        _results(report),
        f"First reached, {report.outcome} pass@1: median over seeds [95% bootstrap interval] (seeds that reached it); "
        "a seed that never did counts as infinitely late. Core-seconds are of training, evaluation left out.",
        _costs(report),
        "The runs: means over seeds. Pass@k is that of the last evaluation, over all held-out problems.",
        _facts(by_arm),
        "Where the judged rollouts went: means over seeds. Improving are trained groups without a solution, whose best "
        "reward is above that of every earlier group of the problem.",
        _table(
            ["arm", *(words for words, _, _ in USES)],
            [[n, *(_fact(_mean_use(found, f), form) for _, f, form in USES)] for n, found in by_arm.items()],
        ),
        *_failures(report.traces),
        *_ranking(report),
    ]
    return "\n\n".join(parts)


def write(report: StudyReport, out: Path) -> list[Path]:
    """`study.md`, `study.{json,csv,png,svg}` and `study_groups.{png,svg}`: the report, every curve, their picture, and
    that of what the arms trained on.
    """
    levels = sorted({level for t in report.traces for p in t.points for level in p.levels})
    rows = [
        [t.arm, t.seed, p.step, p.rollouts, p.tokens, round(p.core_s, 2), p.hard, p.overall]
        + [p.levels.get(level) for level in levels]
        for t in report.traces
        for p in t.points
    ]
    paths = save(out, "study", draw(report.traces, report.outcome, report.thresholds), (*HEADER, *levels), rows, report)
    if groups := draw_groups(report.traces):
        paths += save_figure(out, "study_groups", groups)
    text = out / "study.md"
    text.write_text(markdown(report) + "\n")
    return [text, *paths]


# --- parts ---


def _results(report: StudyReport) -> str:
    outcomes = list(report.arms[0].final)
    head = ["arm", "seeds"]
    head += [f"{o} {what}" for o in outcomes for what in ("at the end", "gain", "over the run", "gain over the run")]
    head.append(f"{report.outcome} below best")
    rows = []
    for arm in report.arms:
        row = [arm.name, str(len(arm.seeds))]
        for o in outcomes:
            row += [_estimate(arm.final[o]), _estimate(arm.final_gain.get(o), "+")]
            row += [_estimate(arm.area[o]), _estimate(arm.area_gain.get(o), "+")]
        rows.append([*row, f"{arm.below_best:.3f}"])
    return _table(head, rows)


def _costs(report: StudyReport) -> str:
    head = ["arm", *(f"{AXIS_WORDS[axis]} to {t:g}" for t in report.thresholds for axis in AXES)]
    return _table(head, [[arm.name, *map(_crossing, arm.crossings)] for arm in report.arms])


def _facts(by_arm: dict[str, list[Trace]]) -> str:
    of_all = [set(t.pass_at_k) for found in by_arm.values() for t in found]
    k = max(set.intersection(*of_all), key=int, default="1") if of_all else "1"
    facts = [*FACTS, (f"pass@{k} at the end", lambda t: t.pass_at_k.get(k), ".3f")]
    return _table(
        ["arm", *(words for words, _, _ in facts)],
        [[n, *(_fact(mean(found, f), form) for _, f, form in facts)] for n, found in by_arm.items()],
    )


def _mean_use(traces: Sequence[Trace], figure: Callable[[Usage], float]) -> float:
    return mean(traces, lambda t: figure(t.usage) if t.usage is not None else None)


def _failures(traces: Sequence[Trace]) -> list[str]:
    """A failed run keeps its last evaluation in the tables above."""
    lines = [f"- {t.arm}, seed {t.seed}, at step {t.steps}: {t.reason}" for t in traces if t.state == "failed"]
    said = "Failed runs (each counts above with its last evaluation; not at all if it has none):"
    return [said, "\n".join(lines)] if lines else []


def _ranking(report: StudyReport) -> list[str]:
    r = report.ranking
    if r is None:
        return []
    sides = [{name: sum(v) / len(v) for name, v in side.items()} for side in (r.measured, r.simulated)]
    places = [sorted(side, key=lambda name, side=side: -side[name]) for side in sides]
    rows = [
        [name, f"{sides[0][name]:.3f}", str(places[0].index(name) + 1), f"{sides[1][name]:.3f}",
         str(places[1].index(name) + 1)]
        for name in places[0]
    ]  # fmt: skip
    return [
        f"The same arms in the lab: mean {report.outcome} pass@1 over the run, and the place it gives.",
        _table(["arm", "measured", "place", "lab", "place in the lab"], rows),
        f"Rank correlation [95%, over seeds]: Spearman {_estimate(r.spearman)}, Kendall {_estimate(r.kendall)}.",
    ]


# --- cells ---


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _estimate(estimate: Estimate | None, sign: str = "") -> str:
    if estimate is None:
        return ""
    value = f"{estimate.value:{sign}.3f}"
    return value if estimate.low is None else f"{value} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


def _crossing(found: Crossing) -> str:
    return f"{_cost(found.value)} [{_cost(found.low)}, {_cost(found.high)}] ({found.reached}/{found.of})"


def _cost(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:,.0f}" if value < 1e4 else number(value)


def _fact(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)
