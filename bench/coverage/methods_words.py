"""What a comparison of methods says: a table, and sentences on what follows and what does not."""

import math

import msgspec

from bench.coverage.methods import Method, Methods
from bench.coverage.training import Course
from bench.study.estimates import Estimate


class MethodsReport(msgspec.Struct, frozen=True):
    """`courses`: the spread of pass@1 over training, of the runs that recorded it."""

    base: str
    found: Methods
    courses: list[Course]
    says: list[str]


def sentences(found: Methods) -> list[str]:
    says = [_verdict(method, found) for method in found.methods]
    first = found.methods[0].name
    says += [_against(method, first, found) for method in found.methods[1:] if method.against_first]
    says += [_levels(method, found) for method in found.methods if len(method.gain_by_level) > 1]
    says += [_two_stages(method, found) for method in found.methods if method.reweighted is not None]
    says += [_spread(method, found) for method in found.methods]
    if found.num_left_out:
        says.append(f"{found.num_left_out} problems are left out: not judged often enough for every model.")
    says.append(
        "Intervals are over training seeds, on these problems and from this base model; the noise of the rollouts is "
        "in them, other problems are not. With one seed there is none."
    )
    return says


def _verdict(method: Method, found: Methods) -> str:
    first, last = method.gain[0], method.gain[-1]
    k_first, k_last = found.ks[0], found.ks[-1]
    match direction(first), direction(last):
        case _ if first.low is None:
            said = "shows nothing for sure"
        case _, 1:
            said = f"widens coverage: pass@{k_last} rises"
        case _, -1:
            said = f"narrows coverage: pass@{k_last} falls"
        case 1, _:
            said = f"sharpens: pass@{k_first} rises, and pass@{k_last} is not shown to change"
        case _:
            said = f"is not shown to change pass@{k_first} upwards, nor pass@{k_last}"
    seeds = f"{len(method.seeds)} seed{'s' if len(method.seeds) > 1 else ''}"
    return (
        f"{method.name} ({seeds}) {said}; pass@{k_first} {signed(first)}, pass@{k_last} {signed(last)} against the "
        f"base model's {found.base[0]:.3f} and {found.base[-1]:.3f}."
    )


def _against(method: Method, first: str, found: Methods) -> str:
    ends = [f"pass@{found.ks[i]} {signed(method.against_first[i])}" for i in (0, -1)]
    return f"{method.name} against {first}, paired by seed: {', '.join(ends)}."


def _levels(method: Method, found: Methods) -> str:
    moved = {
        sign: [f"{level} {e.value:+.2f}" for level, e in method.gain_by_level.items() if direction(e) == sign]
        for sign in (1, -1)
    }
    parts = [f"{word} at {', '.join(moved[sign])}" for sign, word in ((1, "up"), (-1, "down")) if moved[sign]]
    said = "; ".join(parts) or "at no level for sure"
    return f"{method.name} moves pass@{found.ks[-1]} {said} (intervals that exclude 0, each level taken alone)."


def _two_stages(method: Method, found: Methods) -> str:
    assert method.reweighted is not None and method.taught is not None
    shares = ", ".join(f"{name} {found.base_shares[name]:.1%} -> {e.value:.1%}" for name, e in method.shares.items())
    return (
        f"{method.name}: choosing strategies differently gives pass@1 {signed(method.reweighted)}, carrying them out "
        f"better {signed(method.taught)} ({shares} of rollouts)."
    )


def _spread(method: Method, found: Methods) -> str:
    base = found.base_pass_at_1
    slope = "not measurable" if math.isnan(method.matthew.value) else signed(method.matthew)
    return (
        f"{method.name}: slope of the gain against the initial pass rate {slope}; problems never solved "
        f"{base.zero_mass:.1%} -> {method.zero_mass.value:.1%}, distance of the pass@1 histogram to an even one "
        f"{base.distance_to_uniform:.3f} -> {method.distance_to_uniform.value:.3f}."
    )


def direction(e: Estimate) -> int:
    """The sign of an estimate whose interval over seeds excludes 0, else 0; of one seed nothing is sure."""
    if e.low is None or e.high is None:
        return 0
    return 1 if e.low > 0 else -1 if e.high < 0 else 0


def signed(e: Estimate) -> str:
    bounds = "" if e.low is None else f" [{e.low:+.3f}, {e.high:+.3f}]"
    return f"{e.value:+.3f}{bounds}"


def table(found: Methods) -> str:
    """pass@k of the base model and of every method, with intervals over seeds."""
    names = [method.name for method in found.methods]
    width = max(24, *(len(name) + 2 for name in names))
    lines = ["".join([f"{'k':<6}{'base':<8}", *(f"{name:<{width}}" for name in names)])]
    for i, k in enumerate(found.ks):
        cells = [_cell(method.pass_at_k[i]) for method in found.methods]
        lines.append("".join([f"{k:<6}{found.base[i]:<8.3f}", *(f"{cell:<{width}}" for cell in cells)]))
    return "\n".join(line.rstrip() for line in lines)


def _cell(e: Estimate) -> str:
    return f"{e.value:.3f}" if e.low is None else f"{e.value:.3f} [{e.low:.3f}, {e.high:.3f}]"
