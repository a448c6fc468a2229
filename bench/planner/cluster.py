"""The planned split on whole nodes, as the config of a run that `ngu slurm` carries, or `ngu train` with Ray."""

import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.planner.placements import Period, Split
from bench.planner.plan import Machine, best_of, least_devices, max_rows, rates_of, slots_up_to
from bench.planner.tables import seconds
from bench.planner.work import Job
from pipeline.cluster.config import RayConfig, SlurmConfig
from pipeline.config import Config, parse_config
from pipeline.errors import ConfigError
from pipeline.init_config import render_config


class ClusterPlan(NamedTuple):
    """The learner on the head's node and the engines on `engine_nodes` others; with none, all on the head's."""

    period: Period
    engine_nodes: int
    engines_per_node: int
    has_gpus: bool

    @property
    def says(self) -> str:
        p = self.period
        s = p.split
        where = f" on {self.engine_nodes} node{'s' * (self.engine_nodes > 1)}" if self.engine_nodes else ""
        return (
            f"{s.engines} engines of {s.slots} slots{where}, {s.learners} of the learner on the head, "
            f"{seconds(p.period_s)} a step, engines idle {p.engine_idle:.0%}, the learner {p.learner_idle:.0%}, "
            f"token lag {p.lag.token:.2f}"
        )


def plan_cluster(job: Job, machine: Machine, max_lag: int, node: int) -> ClusterPlan:
    """The best split in flight on nodes of `node` devices: a learner does not reach beyond the head's node, and a node
    has engines or the head. Raises ConfigError where an engine or the learner needs more than one.
    """
    tp, min_learners = least_devices(job, machine)
    if node < max(tp, min_learners):
        raise ConfigError(
            f"--gpus-per-node {node}: an engine needs {tp} devices of one node for its memory and the learner "
            f"{min_learners}; take larger nodes or devices"
        )
    slots = slots_up_to(max_rows(job, machine, tp))
    per_node, nodes = node // tp, machine.gpus.num // node
    if nodes > 1:
        places = [(n * per_node, node) for n in range(1, nodes)]
    else:
        own = min(machine.gpus.num, node)
        places = [(n, own - n * tp) for n in range(1, (own - min_learners) // tp + 1)]
        if not places:
            raise ConfigError(
                f"--gpus {machine.gpus.kind}x{machine.gpus.num}: take two nodes of {node}, or larger ones"
            )
    splits = [Split(engines, tp, rows, learners, max_lag) for engines, learners in places for rows in slots]
    best = best_of("in_flight", job, rates_of(job, machine, tp), splits, max_lag)
    engine_nodes = best.split.engines // per_node if nodes > 1 else 0
    return ClusterPlan(best, engine_nodes, per_node, machine.gpus.kind != "CPU")


def cluster_config(plan: ClusterPlan, job: Job, base: Config, model: str) -> Config:
    """`base` with what the plan says of engines, learner, staleness and cluster; `model` if it names one."""
    split, has_gpus = plan.period.split, plan.has_gpus
    changes = {
        "engines": msgspec.structs.replace(
            base.engines,
            kind="sglang" if has_gpus else base.engines.kind,
            count=split.engines,
            slots=split.slots,
            tp=split.tp,
        ),
        "learner": msgspec.structs.replace(base.learner, num_processes=split.learners, batch_size=job.batch),
        "staleness": msgspec.structs.replace(base.staleness, max_lag=split.max_lag),
        "cluster": _table(plan, base.cluster or SlurmConfig()),
    }
    if Path(model).exists() or model == "builtin":
        changes["model"] = msgspec.structs.replace(base.model, path=model)
    return parse_config(msgspec.to_builtins(msgspec.structs.replace(base, **changes)), "the plan")


def _table(plan: ClusterPlan, table: SlurmConfig | RayConfig) -> SlurmConfig | RayConfig:
    split = plan.period.split
    gpus = split.tp * plan.has_gpus
    if isinstance(table, RayConfig):
        return msgspec.structs.replace(table, engines=split.engines, gpus_per_engine=gpus)
    return msgspec.structs.replace(
        table,
        head_gpus=(split.learners if plan.engine_nodes else split.learners + split.engines * split.tp) * plan.has_gpus,
        engine_nodes=plan.engine_nodes,
        engines_per_node=plan.engines_per_node,
        gpus_per_engine=gpus,
    )


def write_cluster(path: Path, plan: ClusterPlan, job: Job, base: Config, model: str) -> None:
    """Raises ConfigError when there is such a file, or `base` does not go with the plan."""
    config = cluster_config(plan, job, base, model)
    text = render_config(config)
    try:
        with path.open("x") as out:
            out.write(f"# `ngu plan system`: {plan.says}.\n\n{text}")
    except FileExistsError:
        raise ConfigError(f"{path} exists already; give another --cluster or remove it") from None
    except OSError as e:
        raise ConfigError(f"{path}: cannot write it: {e.strerror}") from None
    verb = "train" if isinstance(config.cluster, RayConfig) else "slurm"
    print(f"wrote {path}: {plan.says}; then: ngu {verb} {path}", file=sys.stderr)
