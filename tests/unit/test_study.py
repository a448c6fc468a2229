"""`ngu study`: which runs it makes, how it goes on after an interruption, and every figure of its report."""

import json
import math
import sys
from pathlib import Path

import pytest

from bench.study import runs
from bench.study.commands import study
from bench.study.curves import Point, Trace, area, crossing, training_s
from bench.study.estimates import estimate
from bench.study.figures import draw
from bench.study.group_figure import draw_groups
from bench.study.plan import load_study
from bench.study.usage import Kinds, Usage, read_usage
from pipeline import rundir
from pipeline.coordinator.tally import Tally
from pipeline.errors import ConfigError, NguError
from pipeline.ledger import Ledger
from pipeline.messages import Rollout, SamplingParams, Verdict, Work
from samplers.base import Problem

# What `ngu train` is to a study: it gets a config and a run directory, and leaves files. Arm "broken" fails half way.
STAND_IN = """
import json, sys
from pathlib import Path
from pipeline import rundir
from pipeline.config import load_config
from pipeline.ledger import Ledger
from pipeline.messages import Rollout, SamplingParams, Verdict, Work
from samplers.base import Problem

config = load_config(sys.argv[1])
run = rundir.create(Path(sys.argv[sys.argv.index("--run-dir") + 1]), config)
n = getattr(config.sampler, "num_rollouts", 4)
if n == 99:
    print("ngu: error: this machine has no such thing")
    sys.exit(2)
steps, state = (2, "failed") if n == 5 else (4, "finished")
records = []
for step in range(steps + 1):
    hard = step * (0.2 if n == 4 else 0.1) + 0.01 * config.seed
    cost = {"learner": 3.0 * step, "engine": 10.0 + 4 * step}
    phase = "before" if step == 0 else "after" if step == 4 else "during"
    records += [{"kind": "eval", "step": step, "phase": phase, "rollouts": 100 * step, "tokens": 1000 * step,
                 "core_s": cost, "pass_at_1": {"*3": hard, "+1": 0.5}, "num_rollouts": {"*3": 10, "+1": 30},
                 "mean_tokens": 25.0, "hard_pass_at_1": hard, "mix_pass_at_1": 0.5, "time": step,
                 "pass_at_k": {"1": 0.5, "8": 0.7}, "best_at_k": {"1": 0.6}}]
    records += [{"kind": "step", "step": step + 1, "rollouts": 100 * step, "tokens": 1000 * step, "time": step,
                 "metrics": {"lag_mean": 0.5, "lag_max": 2.0, "ess": 0.9, "wall_s": 10.0 * (step + 1)}}]
(run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records))
(run / "status.json").write_text(json.dumps({"state": state, "reason": "the loss is nan" if n == 5 else ""}))
ledger, sampling = Ledger(run / "ledger.sqlite"), SamplingParams(1.0, 8)
fates = {1: ("trained", "01"), 2: ("filtered", "11"), 3: ("given_up", "0000"), 4: ("filtered", "11")}
for chain, (fate, right) in fates.items():
    for i, digit in enumerate(right):
        attempt = 10 * chain + i
        ledger.launch([Work(attempt, chain, 0, Problem(str(chain), "", "", ""), sampling)])
        rollout = Rollout(attempt, chain, 0, b"", b"", b"", (), "stop", "", "e", 0, 0)
        verdict = Verdict("correct" if digit == "1" else "incorrect", float(digit))
        ledger.end_judged([rollout], [verdict], fate, 1)
ledger.close()
sys.exit(1 if state == "failed" else 0)
"""

STUDY = """
seeds = [0, 1]
thresholds = [0.3, 0.7]
set.max_rollouts = 400
[arms.ngu]
[arms.slow]
sampler = {kind = "fixed", num_rollouts = 8}
[arms.broken]
"sampler.kind" = "fixed"
"sampler.num_rollouts" = 5
[lab]
population = {kind = "two_point", num_problems = 40}
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(runs, "TRAIN", [sys.executable, str(tmp_path / "stand_in.py")])
    monkeypatch.setattr("bench.study.ranking.default_jobs", lambda: 1)
    return tmp_path


def write_study(directory: Path, text: str = STUDY) -> Path:
    path = directory / "study.toml"
    path.write_text(text)
    return path


# --- the whole of it ---


def test_a_study_from_its_file_to_its_report(stand_in: Path, capsys: pytest.CaptureFixture[str]):
    file, out = write_study(stand_in), stand_in / "out"
    assert study(file, out=out, as_json=True) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    ngu, slow, broken = found["arms"]
    assert [a["name"] for a in found["arms"]] == ["ngu", "slow", "broken"]
    assert found["budget"] == 400
    assert ngu["final"]["hard"]["value"] == pytest.approx(0.805)
    assert ngu["area"]["hard"]["value"] == pytest.approx(0.405)
    assert slow["final_gain"]["hard"]["value"] == pytest.approx(-0.4)
    # Every seed differs by exactly as much: paired by seed the gain has no spread, though the arms themselves have.
    assert slow["final_gain"]["hard"]["low"] == pytest.approx(-0.4) == slow["final_gain"]["hard"]["high"]
    assert slow["final"]["hard"]["low"] < 0.405 < slow["final"]["hard"]["high"]
    assert ngu["final_gain"] == {}
    to_30, to_70 = ({c["threshold"]: c for c in a["crossings"] if c["axis"] == "rollouts"}[t] for a, t in
                    ((ngu, 0.3), (slow, 0.7)))  # fmt: skip
    assert (to_30["value"], to_30["reached"], to_30["of"]) == (pytest.approx(145), 2, 2)
    assert (to_70["value"], to_70["reached"], to_70["of"]) == (None, 0, 2)
    # A failed run is on record with its reason, and stays where it was.
    failed = {(t["arm"], t["seed"], t["reason"]) for t in found["traces"] if t["state"] == "failed"}
    assert failed == {("broken", 0, "the loss is nan"), ("broken", 1, "the loss is nan")}
    assert broken["final"]["hard"]["value"] == pytest.approx(0.205)
    assert broken["area"]["hard"]["value"] == pytest.approx((0.005 * 400 + 0.5 * 0.2 * 200 + 0.2 * 200) / 400)
    trace = found["traces"][0]
    # 10 s of the engine were spent before training; evaluation made as many tokens as training from step 1 on.
    assert [p["core_s"] for p in trace["points"]] == pytest.approx([0, 5, 10, 15, 20])
    usage = trace["usage"]
    assert usage["wasted_right_frac"] == pytest.approx(0.4) == usage["wasted_wrong_frac"]
    assert usage["trained_frac"] == pytest.approx(0.2)
    assert usage["ever_solved_frac"] == 0.75
    assert (trace["pass_at_k"], trace["reward_mean"]) == ({"1": 0.5, "8": 0.7}, 0.6)
    assert (trace["lag_mean"], trace["lag_max"], trace["ess_mean"]) == (0.5, 2.0, 0.9)
    assert trace["run_core_s"] > 0
    assert set(found["ranking"]["simulated"]) == {"ngu", "slow", "broken"}
    assert -1 <= found["ranking"]["spearman"]["low"] <= found["ranking"]["spearman"]["value"] <= 1
    assert "[6/6] broken seed 1: failed: the loss is nan" in printed.err

    text = (out / "study.md").read_text()
    for words in (
        "| ngu | 2 | 0.805 [",
        "never [never, never] (0/2)",
        "Failed runs",
        "Spearman",
        "| 40.0% |",
        "pass@8",
    ):
        assert words in text
    for picture in ("study.png", "study_groups.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    header, *rows = (out / "study.csv").read_text().splitlines()
    assert header == "arm,seed,step,rollouts,tokens,core_s,hard,overall,*3,+1"
    assert len(rows) == 2 * (5 + 5 + 3)


def test_a_study_goes_on_with_what_is_missing_and_repeats_what_changed(stand_in: Path, capsys):
    out = stand_in / "out"
    text = STUDY.partition("[lab]")[0].replace("[0, 1]", "[0]")
    study(write_study(stand_in, text), out=out)
    when = {run: (run / "config.json").stat().st_mtime_ns for run in out.glob("runs/*/seed_0")}
    capsys.readouterr()
    # One run was interrupted before its end was on record, one arm has other settings now, one seed is new.
    (out / "runs/slow/seed_0.json").unlink()
    changed = text.replace("[0]", "[0, 1]").replace("broken]", 'broken]\n"learner.lr" = 1e-3')
    study(write_study(stand_in, changed), out=out)
    repeated = {run.parent.name for run, then in when.items() if (run / "config.json").stat().st_mtime_ns != then}
    assert repeated == {"slow", "broken"}
    assert "1 of 6 runs are there already" in capsys.readouterr().err
    assert len(list(out.glob("runs/*/seed_*.json"))) == 6


def test_one_study_at_a_time_and_no_run_taken_from_under_another(stand_in: Path):
    out = stand_in / "out"
    text = STUDY.partition("[lab]")[0].replace("[0, 1]", "[0]")
    out.mkdir()
    with rundir.lock(out), pytest.raises(ConfigError, match="in use by another `ngu study`"):
        study(write_study(stand_in, text), out=out)
    running = out / "runs/ngu/seed_0"
    running.mkdir(parents=True)
    with rundir.lock(running), pytest.raises(ConfigError, match="still running"):
        study(write_study(stand_in, text), out=out)


def test_a_config_that_train_refuses_ends_the_study(stand_in: Path):
    text = '[arms.a]\nsampler = {kind = "fixed", num_rollouts = 99}'
    with pytest.raises(ConfigError, match="this machine has no such thing"):
        study(write_study(stand_in, text), out=stand_in / "out")


def test_a_run_that_was_never_evaluated_is_listed_and_counts_for_nothing(stand_in: Path, capsys):
    file = write_study(stand_in, 'seeds = [0]\n[arms.hopeless]\n[arms.slow]\nsampler = {kind = "fixed"}')
    script = (stand_in / "stand_in.py").read_text()
    (stand_in / "stand_in.py").write_text("import sys\nif 'hopeless' in sys.argv[1]: sys.exit('no luck')\n" + script)
    assert study(file, out=stand_in / "out") == 0
    printed = capsys.readouterr().out
    assert "- hopeless, seed 0, at step 0: no luck" in printed
    assert "| slow | 1 |" in printed and "| hopeless |" not in printed
    (stand_in / "stand_in.py").write_text("import sys\nsys.exit('no luck')")
    with pytest.raises(NguError, match="no run got as far as training: no luck"):
        study(file, out=stand_in / "other")


# --- the plan ---


def test_every_arm_of_a_grid_has_a_name_and_its_settings(tmp_path: Path):
    grid = '[grid]\nlearner.loss.kind = ["cispo", "ppo"]\n"staleness.max_lag" = [1, 4]\n'
    text = grid + '[arms.n8.sampler]\nkind = "fixed"'
    plan = load_study(write_study(tmp_path, text))
    assert [arm.name for arm in plan.arms] == [f"n8,loss={k},max_lag={m}" for k in ("cispo", "ppo") for m in (1, 4)]
    assert len(plan.jobs) == 4 * 5
    last = plan.jobs[-1]
    assert (last.seed, last.config.seed, last.config.staleness.max_lag) == (4, 4, 4)
    assert type(last.config.learner.loss).__name__ == "PpoConfig"
    assert type(last.config.sampler).__name__ == "FixedConfig"


def test_settings_for_all_arms_and_a_base_file(tmp_path: Path):
    (tmp_path / "run.toml").write_text("max_rollouts = 500\n[sampler]\nround_size = 2\n")
    text = 'base = "run.toml"\nset.learner.lr = 1e-3\n[arms.a]\n[arms.b]\nsampler.round_size = 8'
    a, b = load_study(write_study(tmp_path, text)).jobs[:2]
    assert (a.config.max_rollouts, a.config.learner.lr, a.config.sampler.round_size) == (500, 1e-3, 2)
    assert b.config.sampler.round_size == 8


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no arms"),
        ("bogus = 1\n[arms.a]", "unknown field `bogus`"),
        ("seeds = [1, 1]\n[arms.a]", "one seed twice"),
        ("[arms.a]\nsampler.bogus = 1", "arm a: .*unknown key 'bogus'"),
        ("[arms.a]\n[arms.b]", "a and b have the same settings"),
        ("[arms.'../a']", "no name for an arm"),
        ("[arms.a]\ntask = {kind = 'jsonl', path = 'none.jsonl'}", "arm a: .*none.jsonl"),
        ("[arms.a]\nmodel.path = 'nowhere'", "arm a: .*nowhere"),
        ("[arms.a]\neval.every_steps = 0", "there is no curve"),
        ("[grid]\nlearner.lr = 1.0", "must be a list"),
        ("[arms.a]\n[lab]\nbogus = 1", "unknown key 'bogus'"),
        ("base = 'gone.toml'\n[arms.a]", "gone.toml: no such file"),
        ("[arms", "not a study"),
    ],
)
def test_a_study_is_checked_before_its_first_run(tmp_path: Path, text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        study(write_study(tmp_path, text), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_shipped_studies_can_be_run():
    here = Path(__file__).parents[2] / "bench/study"
    jobs = {file.stem: len(load_study(file).jobs) for file in here.glob("*.toml")}
    assert jobs == {"coverage": 6, "manufactoria": 100, "samplers": 40}


def test_a_task_without_hard_levels_needs_the_other_outcome(stand_in: Path, monkeypatch: pytest.MonkeyPatch):
    script = (stand_in / "stand_in.py").read_text().replace('"hard_pass_at_1": hard', '"hard_pass_at_1": None')
    (stand_in / "stand_in.py").write_text(script)
    file, out = write_study(stand_in, "seeds = [0]\n[arms.a]"), stand_in / "out"
    with pytest.raises(ConfigError, match='set outcome = "overall"'):
        study(file, out=out)
    assert study(write_study(stand_in, 'outcome = "overall"\n' + file.read_text()), out=out) == 0


# --- figures ---


def test_the_area_is_the_mean_of_the_curve_over_the_budget():
    assert area([0, 100], [0.0, 1.0], 100) == pytest.approx(0.5)
    assert area([0, 100], [0.0, 1.0], 50) == pytest.approx(0.25)  # cut between two points
    assert area([0, 100], [0.0, 1.0], 200) == pytest.approx(0.75)  # carried on from the last point


def traces(*arms: str, usage: Usage | None = None) -> list[Trace]:
    points = [Point(s, 100 * s, 900 * s, 2.0 * s, 0.1 * s, 0.2 * s, {}, {}) for s in (0, 1, 2)]
    of_all = {"seed": 0, "state": "finished", "reason": "", "points": points, "steps": 2, "rollouts": 240}
    of_all |= {"tokens": 1800, "run_core_s": 5.0, "wall_s": 5.0, "train_s": 4.0, "lag_mean": 0.0, "lag_max": 0.0}
    of_all |= {"ess_mean": 1.0, "pass_at_k": {}, "reward_mean": None, "usage": usage, "rollouts_at": {1: 110, 2: 240}}
    return [Trace(arm=arm, **of_all) for arm in arms]


def test_what_an_arm_trained_on_is_drawn_as_shares_over_its_rollouts():
    kinds = [Kinds(1, 0, 3, 1), Kinds(2, 2, 0, 2)]
    usage = Usage(0.5, 0.1, 0.4, 0.5, 8, 0.25, 0.375, 0.0, kinds)
    figure = draw_groups([*traces("a,pool=x", "b", usage=usage), *traces("b", usage=usage), *traces("none")])
    assert figure is not None
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["a\npool=x", "b"]
    for axes in figure.axes:
        full, improving, other = (area.get_paths()[0] for area in axes.collections)
        # Windows of 20 rollouts: the steps end in the sixth and in the twelfth.
        assert {x for x, _ in full.vertices} == {110, 230}
        assert max(y for x, y in full.vertices if x == 110) == 0
        assert max(y for x, y in full.vertices if x == 230) == pytest.approx(0.5)
        assert max(y for x, y in improving.vertices if x == 110) == pytest.approx(0.75)
        assert {max(y for x, y in other.vertices if x == at) for at in (110, 230)} == {1}
    assert draw_groups(traces("none")) is None


def test_each_cell_of_a_grid_has_rows_of_its_own_and_the_legend_fits():
    names = [f"quite_a_long_name_{i}" for i in range(6)]
    figure = draw(traces(*(f"{name},pool={pool}" for name in names for pool in "ab")), "hard", [0.1])
    titles = [axes.get_title(loc="left") for axes in figure.axes[::3]]
    assert titles == ["Hard problems, pool=a", "Hard problems, pool=b", "All problems, pool=a", "All problems, pool=b"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == names
    figure.draw_without_rendering()
    assert 0 <= legend.get_window_extent().x0 < legend.get_window_extent().x1 <= figure.bbox.width
    many = draw(traces(*(f"arm,pool={i}" for i in range(5))), "hard", [])
    assert len(many.axes) == 6


def test_a_threshold_is_crossed_between_two_points_or_never():
    costs, values = [0.0, 100.0, 200.0, 300.0], [0.0, 0.2, 0.1, 0.5]
    assert crossing(costs, values, 0.1) == pytest.approx(50)
    assert crossing(costs, values, 0.3) == pytest.approx(250)
    assert crossing(costs, values, 0.6) == math.inf
    assert crossing(costs, [0.4, *values[1:]], 0.3) == 0.0


def test_an_interval_needs_more_than_one_seed_and_grows_with_their_spread():
    assert (estimate({0: 0.5}).low, estimate({0: 0.5}).high) == (None, None)
    narrow, wide = estimate({0: 0.49, 1: 0.5, 2: 0.51}), estimate({0: 0.3, 1: 0.5, 2: 0.7})
    assert narrow.value == pytest.approx(0.5) == wide.value
    assert narrow.low is not None and wide.low is not None and wide.low < narrow.low < 0.5


def test_cpu_time_is_summed_over_the_processes_of_a_role():
    tally = Tally(lambda: 0.0)
    for boot_id, cpu_s in (("a", 1.0), ("b", 2.0), ("a", 1.5), ("successor of a", 0.25)):
        tally.spent("engine", boot_id, cpu_s)
    core_s = tally.cost_so_far()["core_s"]
    assert isinstance(core_s, dict)
    assert core_s["engine"] == pytest.approx(3.75)
    assert core_s["coordinator"] > 0


def test_a_pinned_evaluation_costs_training_nothing():
    def record(cost: float, phase: str) -> dict:
        core_s = {"learner": cost, "engine": 2 * cost, "evaluator": 50 * cost}
        counts = {"num_rollouts": {"": 10}, "mean_tokens": 30.0, "tokens": 100 * cost}
        return {"phase": phase, "core_s": core_s} | counts

    assert training_s(record(1, "before"), record(2, "during")) == pytest.approx(1 + 2)
    assert training_s(record(1, "during"), record(2, "after")) == pytest.approx(1 + 2 * 100 / 400), (
        "the engines made it"
    )


def test_what_a_ledger_says_about_groups(tmp_path: Path):
    ledger, sampling = Ledger(tmp_path / "ledger.sqlite"), SamplingParams(1.0, 8)
    problem, other = Problem("p", "", "", ""), Problem("q", "", "", "")
    # Chain, round, problem, rewards, step: no solution but progress, no progress, progress after a retry, a solution.
    chains = [
        (1, 0, problem, (0.2, 0.5), 1),
        (2, 0, problem, (0.5, 0.1), 2),
        (3, 1, problem, (0.6, 0.5), 3),
        (4, 0, problem, (1.0, 0.5), 4),
        (6, 0, problem, (0.9, 0.5), 4),
        (5, 0, other, (0.4, 0.4), None),
    ]
    for chain, round, of, rewards, step in reversed(chains):
        for i, reward in enumerate(rewards):
            attempt = 10 * chain + i
            ledger.launch([Work(attempt, chain, round, of, sampling)])
            rollout = Rollout(attempt, chain, 0, b"", b"", b"", (), "stop", "", "e", 0, 0)
            verdict = Verdict("correct" if reward == 1 else "incorrect", reward)
            ledger.end_judged([rollout], [verdict], "trained" if step else "filtered", step)
    ledger.close()
    found = read_usage(tmp_path / "ledger.sqlite")
    assert found == Usage(
        trained_frac=pytest.approx(10 / 12),
        wasted_right_frac=0.0,
        wasted_wrong_frac=pytest.approx(2 / 12),
        ever_solved_frac=0.5,
        num_groups=5,
        full_frac=0.2,
        improving_frac=0.4,
        retried_frac=0.2,
        kinds=[Kinds(1, 0, 1, 0), Kinds(2, 0, 0, 1), Kinds(3, 0, 1, 0), Kinds(4, 1, 0, 1)],
    )
    assert read_usage(tmp_path / "none.sqlite") is None
