"""The table [cluster]: what a run asks of a cluster's scheduler, Slurm or Ray."""

import re
from typing import Annotated, Literal

import msgspec

from pipeline.sections import NonNegativeInt, PositiveInt, Section

# minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d{1,2}(:\d\d){0,2}")
_NAME = re.compile(r"[\w.,@+-]*")
_ADDRESS = re.compile(r"[\w.-]+:\d{1,5}")
_OPTION = re.compile(r"--[a-z][a-z-]*(=[^\n]+)?")


class SlurmConfig(Section, frozen=True, tag_field="kind", tag="slurm"):
    """`ngu slurm` writes a job from this table (docs/CLUSTER.md); to `ngu train` it is of no concern.

    The head, one node of `head_cpus` and `head_gpus`, has everything but the engines. The ranks of a learner share a
    node, so `learner_nodes` must be 1. `engine_nodes` others have `engines_per_node` engines each, which get
    `cpus_per_engine` and `gpus_per_engine`; with `engine_nodes = 0` the head has engines.count of its own.

    `time` is a limit as Slurm writes it. `grace_s` seconds before it is over, or when the job is preempted, the run
    saves a checkpoint and ends; if `requeue`, the job is queued again until the run has finished.

    `setup` is shell, run first on the head, whose environment the engines get, as "source /apps/ngu/bin/activate".
    `head_options` and `engine_options` are more options of sbatch, as "--mem=0", and win over those written from here.
    """

    partition: str = ""
    account: str = ""
    time: str = "1-00:00:00"
    grace_s: Annotated[int, msgspec.Meta(ge=60, le=65535)] = 120
    requeue: bool = True
    learner_nodes: PositiveInt = 1
    head_cpus: PositiveInt = 16
    head_gpus: NonNegativeInt = 1
    engine_nodes: NonNegativeInt = 1
    engines_per_node: PositiveInt = 8
    cpus_per_engine: PositiveInt = 8
    gpus_per_engine: NonNegativeInt = 1
    setup: str = ""
    head_options: tuple[str, ...] = ()
    engine_options: tuple[str, ...] = ()

    def __post_init__(self):
        if self.learner_nodes != 1:
            raise ValueError(
                "learner_nodes must be 1: the ranks of a learner meet within one node; give that node the GPUs "
                "(head_gpus) and set learner.num_processes"
            )
        if not _TIME.fullmatch(self.time):
            raise ValueError(f'time = {self.time!r} is not written as Slurm does, "D-HH:MM:SS" or "HH:MM:SS"')
        for name in ("partition", "account"):
            if not _NAME.fullmatch(getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)!r} is no name that Slurm knows")
        for option in (*self.head_options, *self.engine_options):
            if not _OPTION.fullmatch(option):
                raise ValueError(f'{option!r} is no option of sbatch; write it as "--mem=0"')


class RayConfig(Section, frozen=True, tag_field="kind", tag="ray"):
    """`ngu train` places the engines with Ray (docs/CLUSTER.md): `engines` of them, each with `cpus_per_engine` and
    `gpus_per_engine`, in place of engines.count; all else is on the machine where the command was given.

    `address`, "auto" or "HOST:PORT", is that of a cluster of which this machine is a node; empty starts one of this
    machine alone, which ends with the run. `spread` puts engines on as many nodes as there are, `pack` on as few. Those
    of a node that is lost go to others. `verifiers` are placed beside them and judge together with the run's own, each
    with verifier.num_workers processes and CPUs.

    The learner.num_processes ranks are shared out evenly over `learner_nodes`: this machine is the first, on the others
    Ray gives each rank `cpus_per_rank` and `gpus_per_rank`. What ranks tell each other, gradients, weights and
    rollouts, nothing encrypts: `private_network = true` says that nobody else is on the network between these nodes.
    """

    address: str = ""
    engines: PositiveInt = 1
    cpus_per_engine: PositiveInt = 1
    gpus_per_engine: NonNegativeInt = 0
    strategy: Literal["spread", "pack"] = "spread"
    verifiers: NonNegativeInt = 0
    learner_nodes: PositiveInt = 1
    cpus_per_rank: PositiveInt = 1
    gpus_per_rank: Annotated[int, msgspec.Meta(ge=0, le=1)] = 0
    private_network: bool = False

    def __post_init__(self):
        if self.address not in ("", "auto") and not _ADDRESS.fullmatch(self.address):
            raise ValueError(f'address = {self.address!r} is not written "auto" or "HOST:PORT", as in "10.0.0.1:6379"')
        if self.learner_nodes > 1 and not self.address:
            raise ValueError("learner_nodes is above 1: name a cluster of several machines (address)")
        if self.learner_nodes > 1 and not self.private_network:
            raise ValueError(
                "learner_nodes is above 1, and nothing encrypts what the ranks of a learner tell each other (gloo, "
                "NCCL): set private_network if nobody else is on that network, or keep the learner on one machine"
            )


ClusterConfig = SlurmConfig | RayConfig
