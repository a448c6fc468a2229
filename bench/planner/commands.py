"""`ngu plan system`, `measure` and `check`, beside `ngu plan n`. What computes is imported when a verb runs."""

import math
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter

from bench.scaling.commands import n
from pipeline.errors import ConfigError

MAX_BATCH = 100_000  # a plan draws whole batches of rollouts for every split

plan = App(name="plan", help="Prescribe the settings of a run: from a fit, or from models of its devices.")
plan.command(n)

Settings = Annotated[
    str, Parameter(show_default=False, help="A TOML file, and settings such as engines.slots=128 that override it.")
]
Json = Annotated[bool, Parameter(name="--json", negative="", show_default=False, help="Print one JSON object.")]


@plan.command
def system(
    *,
    model: str,
    gpus: str,
    lengths: str,
    algorithm: Literal["ppo", "grpo", "ngu"] = "ngu",
    batch: int = 1024,
    group: int = 8,
    prompt: float = 256,
    epochs: int = 1,
    pass_rate: float = 0.3,
    p_ngu: float = 0.875,
    max_lag: int = 4,
    measured: Path | None = None,
    cluster: Path | None = None,
    gpus_per_node: int = 8,
    config: Path | None = None,
    as_json: Json = False,
) -> int:
    """Say what a job takes on some devices, how to divide them between engines and learner, and how sure that is.

    Work, depth, memory, period, idle shares and lag of synchronous, colocated, fused, one-step-off and in-flight
    training, each at its best split.

    Parameters
    ----------
    model:
        A Hugging Face model directory, `builtin`, or parameters,layers,width as in 7.6e9,28,3584.
    gpus:
        KINDxN, as in H100x16; CPUxN with --measured.
    lengths:
        Of completions: MEAN,MAX in tokens, a run directory, its ledger, or a file with a number a line.
    batch:
        Rollouts a step.
    group:
        Rollouts of a problem in a round.
    prompt:
        Tokens of a prompt, in the mean.
    epochs:
        Passes of training over a batch.
    pass_rate:
        The share of rollouts that are right, taken as that of every problem: decides what share of groups has a
        gradient and, for Never Give Up, how many rounds a problem gets.
    p_ngu:
        Never Give Up: the probability of another round after one that was all wrong.
    max_lag:
        The most that staleness.max_lag may be in flight.
    measured:
        Rates from `ngu plan measure`, instead of data sheets.
    cluster:
        A file to write: the config of a run on whole nodes of these devices, for `ngu slurm`, or for `ngu train` where
        --config has a [cluster] with kind = "ray".
    gpus_per_node:
        Devices of a node, with --cluster.
    config:
        Settings of that run that the plan has no say in, with --cluster. Default: those of `ngu init`.
    """
    from bench.planner.cluster import plan_cluster, write_cluster
    from bench.planner.hardware import parse_gpus, read_rates
    from bench.planner.lengths import read_lengths
    from bench.planner.plan import Machine, make_plan
    from bench.planner.shape import read_model
    from bench.planner.tables import plan_table
    from bench.planner.work import Job, rounds_of, trained_share
    from pipeline.config import load_config

    if not (min(batch, group, epochs, max_lag) >= 1 and group <= batch <= MAX_BATCH and 0 <= prompt < math.inf):
        raise ConfigError(
            f"--group, --epochs and --max-lag are at least 1, --batch at least --group and at most {MAX_BATCH:,}, "
            "--prompt at least 0"
        )
    if not (0 < pass_rate < 1 and 0 <= p_ngu < 1):
        raise ConfigError("--pass-rate is between 0 and 1, --p-ngu at least 0 and below 1")
    rounds = rounds_of(pass_rate, group, p_ngu) if algorithm == "ngu" else 1.0
    share = trained_share(pass_rate, group, algorithm, p_ngu)
    job = Job(read_model(model), read_lengths(lengths), algorithm, prompt, batch, group, epochs, share, rounds)
    machine = Machine(parse_gpus(gpus), read_rates(measured) if measured else None)
    found = make_plan(job, machine, max_lag)
    print(msgspec.json.encode(found).decode() if as_json else plan_table(found))
    if cluster is not None:
        write_cluster(cluster, plan_cluster(job, machine, max_lag, gpus_per_node), job, load_config(config), model)
    return 0


@plan.command
def measure(*settings: Settings, seconds: float = 10.0, out: Path = Path("rates.json")) -> int:
    """Measure what `ngu plan` needs to know of this machine: engine, learner and update, side by side as in a run.

    Parameters
    ----------
    seconds:
        How long each of two processes is measured, in processor time on a CPU.
    out:
        The file to write.
    """
    from bench.planner.measure import measure_rates
    from pipeline.config import load_config

    files = [s for s in settings if "=" not in s]
    if len(files) > 1:
        raise ConfigError(f"one config file at most, but {', '.join(files)} were given")
    if not out.absolute().parent.is_dir():
        raise ConfigError(f"{out}: its directory does not exist; choose another --out")
    config = load_config(files[0] if files else None, [s for s in settings if "=" in s])
    rates = measure_rates(config, seconds)
    out.write_bytes(msgspec.json.format(msgspec.json.encode(rates)) + b"\n")
    for name, value in msgspec.to_builtins(rates).items():
        print(f"{name:16} {value:.4g}" if isinstance(value, float) else f"{name:16} {value}")
    print(f"wrote {out}")
    return 0


@plan.command
def check(*runs: Path, measured: Path, skip: int = 3, as_json: Json = False) -> int:
    """Compare finished runs with what a plan says of them: period and lag, measured / planned.

    Exits with 1 when period or mean lag of the runs is off by more than 15%.

    Parameters
    ----------
    runs:
        Run directories.
    measured:
        Rates from `ngu plan measure` on the machine of the runs.
    skip:
        Steps at the start that do not count (engines fill up).
    """
    from bench.planner.check import check_run, check_table, judge
    from bench.planner.hardware import read_rates
    from pipeline import rundir

    if not runs:
        raise ConfigError("name a run directory")
    rates = read_rates(measured)
    found = [check_run(rundir.find(run), rates, skip) for run in runs]
    verdicts = judge(found)
    report = {"runs": found, "verdicts": verdicts}
    print(msgspec.json.encode(report).decode() if as_json else check_table(found, verdicts))
    return 1 if any(verdict.outcome == "missed" for verdict in verdicts) else 0
