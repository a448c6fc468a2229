"""What a comparison says: a table, and sentences on what follows and what does not."""

import math
from collections.abc import Sequence

import msgspec

from bench.coverage.compare import Comparison
from bench.scaling.coverage import Coverage
from bench.scaling.reshaping import Strategies
from learner.evaluation.report import shown
from pipeline.estimates import Estimate

# Above this both models solve nearly everything with k tries, and a gap between their coverages has no room to show.
SATURATED = 0.98


class CoverageReport(msgspec.Struct, frozen=True):
    base: str
    tuned: str
    seed: int
    found: Comparison
    says: list[str]


def sentences(found: Comparison) -> list[str]:
    says = [_verdict(found.coverage), *_crossing(found.coverage), _problems(found)]
    says += _levels(found)
    if found.strategies is not None:
        says.append(_two_stages(found.strategies))
    says += [_matthew(found), _interference(found)]
    if found.num_left_out:
        says.append(f"{found.num_left_out} problems are left out: not on both sides, or with too few judged rollouts.")
    says.append(
        "Intervals are over problems of this kind, for these two models: they do not hold the spread between training "
        "seeds, so a claim about a method needs several runs of it."
    )
    return says


def signed(e: Estimate) -> str:
    return f"{e.value:+.3f} [{e.low:+.3f}, {e.high:+.3f}]"


def direction(e: Estimate) -> int:
    """The sign of an estimate whose interval excludes 0, else 0."""
    return 1 if e.low > 0 else -1 if e.high < 0 else 0


def _verdict(coverage: Coverage) -> str:
    k, gap = coverage.crossing.k_max, coverage.crossing.gap_at_k_max
    base, tuned = coverage.base[-1].value, coverage.tuned[-1].value
    first = coverage.ks[0]
    pass_first = f"pass@{first} went from {shown(coverage.base[0])} to {shown(coverage.tuned[0])}"
    pass_last = f"pass@{k} changed by {signed(gap)}, from {base:.3f} to {tuned:.3f}"
    match direction(gap):
        case 1:
            said = "Coverage widened"
        case -1:
            said = "Coverage narrowed"
        case _ if min(base, tuned) >= SATURATED:
            said = f"Both models solve almost everything within {k} tries, so these problems cannot tell their coverage"
        case _:
            said = "Coverage is not shown to change"
    return f"{said}: {pass_last}; {pass_first}."


def _crossing(coverage: Coverage) -> list[str]:
    c = coverage.crossing
    if c.n_star is None and c.crossed_frac == 0:
        return [f"The curves do not cross up to k = {c.k_max}, in any bootstrap draw."]
    where = f"[{c.low:.1f}, {c.high:.1f}]" if c.low is not None and c.high is not None else ""
    if c.n_star is None:
        return [
            f"The curves do not cross up to k = {c.k_max}; in {c.crossed_frac:.0%} of bootstrap draws they do, "
            f"at {where}."
        ]
    return [
        f"From N* = {c.n_star:.1f} {where} tries on, the base model solves more: in {c.crossed_frac:.0%} of bootstrap "
        "draws the curves cross."
    ]


def _problems(found: Comparison) -> str:
    c = found.changed
    return (
        f"Of {found.num_problems} problems {len(c.gained)} are solved by the tuned model only and {len(c.lost)} by "
        f"the base model only; beyond chance (false discovery rate 5%) {len(c.surely_better)} are solved more often "
        f"and {len(c.surely_worse)} less often."
    )


def _levels(found: Comparison) -> list[str]:
    gaps = {level: c.crossing.gap_at_k_max for level, c in found.by_level.items()}
    named = {sign: [level for level, gap in gaps.items() if direction(gap) == sign] for sign in (1, -1)}
    k = found.coverage.crossing.k_max
    words = {1: "rose", -1: "fell"}
    return [
        f"At pass@{k} level{'s' if len(levels) > 1 else ''} {', '.join(levels)} {words[sign]} (intervals that exclude "
        "0, each level taken alone)."
        for sign, levels in named.items()
        if levels
    ]


def _two_stages(s: Strategies) -> str:
    parts = [
        f"{name} {before:.1%} -> {after:.1%} of rollouts, right {_rate(ok_before)} -> {_rate(ok_after)}"
        for name, before, after, ok_before, ok_after in zip(
            s.names, s.share_before, s.share_after, s.success_before, s.success_after, strict=True
        )
    ]
    return (
        f"Of the change of pass@1, {signed(s.change)}, choosing strategies differently gives {signed(s.reweighted)} "
        f"and carrying them out better {signed(s.taught)}, problem by problem; {signed(s.first_used)} of the former is "
        f"on problems on which the base model never used the strategy ({'; '.join(parts)})."
    )


def _matthew(found: Comparison) -> str:
    slope = found.matthew.slope
    if math.isnan(slope.value):
        return "The Matthew effect cannot be measured: initial pass rates vary no more than chance would have them."
    said = {1: "what was solved often gained most", -1: "what was solved seldom gained most", 0: "no sure trend"}
    return (
        f"Gain against initial pass rate, noise of the latter taken out: slope {signed(slope)}, "
        f"{said[direction(slope)]} (rates end at 1, which alone pulls the slope down)."
    )


def _interference(found: Comparison) -> str:
    before, after = found.base_pass_at_1, found.tuned_pass_at_1
    return (
        f"Problems never solved: {before.zero_mass:.1%} -> {after.zero_mass:.1%}; distance of the pass@1 histogram to "
        f"an even one: {before.distance_to_uniform:.3f} -> {after.distance_to_uniform:.3f}."
    )


def _rate(success: float | None) -> str:
    return "never used" if success is None else f"{success:.1%}"


# --- table ---


def table(found: Comparison) -> str:
    """pass@k of both models at each k, then by level at the ends of the range."""
    c = found.coverage
    lines = [f"{'k':<6}{'base':<24}{'tuned':<24}"]
    lines += [f"{k:<6}{shown(b):<24}{shown(t):<24}" for k, b, t in zip(c.ks, c.base, c.tuned, strict=True)]
    if found.by_level:
        width = max(5, *map(len, found.by_level))
        lines += ["", f"{'level':<{width}}  " + "".join(f"{name:<24}" for name in _level_header(c.ks))]
        lines += [_level_line(level, of_level, width) for level, of_level in found.by_level.items()]
    return "\n".join(line.rstrip() for line in lines)


def _level_header(ks: Sequence[int]) -> list[str]:
    return [f"{who} pass@{k}" for k in (ks[0], ks[-1]) for who in ("base", "tuned")]


def _level_line(level: str, c: Coverage, width: int) -> str:
    return f"{level:<{width}}  " + "".join(f"{shown(e):<24}" for i in (0, -1) for e in (c.base[i], c.tuned[i]))
