"""A plan, and a comparison with a run, as tables."""

import math
from io import StringIO

from rich.console import Console
from rich.table import Table

from bench.planner.plan import SystemPlan


def render(*parts: Table | str) -> str:
    out = StringIO()
    console = Console(file=out, width=120, highlight=False, markup=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return out.getvalue().rstrip()


def plan_table(plan: SystemPlan) -> str:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("placement", "engines", "slots", "learner", "max_lag", "period", "engine idle", "learner idle", "lag"):
        table.add_column(name, justify="left" if name == "placement" else "right")
    table.add_column("largest", justify="right")
    for p in plan.periods:
        s = p.split
        mark = "* " if p is plan.best else "  "
        engines = f"{s.engines}x{s.tp}" if s.tp > 1 else str(s.engines)
        cells = (mark + p.placement.replace("_", " "), engines, s.slots, s.learners, s.max_lag, seconds(p.period_s))
        idle = (f"{p.engine_idle:.0%}", f"{p.learner_idle:.0%}", f"{p.lag.token:.2f}", p.lag.largest)
        table.add_row(*map(str, cells + idle))
    w, m = plan.work, plan.memory
    facts = [
        f"work a step   {w.total:.3g} FLOPs: generation {w.generation / w.total:.0%}, "
        f"scoring {w.scoring / w.total:.0%}, training {w.training / w.total:.0%}",
        f"depth         {seconds(plan.depth_s)}, which no number of devices shortens",
    ]
    if math.isfinite(m.available):
        facts.append(
            f"memory        {m.engine / 1e9:.0f} GB an engine's device, {m.learner / 1e9:.0f} GB a learner's, "
            f"of {m.available / 1e9:.0f} GB"
        )
    facts.append(f"in flight     {plan.concurrency} rollouts")
    settings = f"\nngu train {' '.join(plan.settings)}"
    return render(table, "", *facts, "", *(f"- {line}" for line in plan.says), settings)


def seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.3g} min"
