"""The one schema of a run: a TOML file plus `key=value` overrides, checked strictly and stored with the run.

A rule that holds for one field or one section lives here; what needs the file system or a library (does the model
exist, is the data set empty) is checked by whoever owns that thing, with a ConfigError too.
"""

import contextlib
import datetime
import math
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from pipeline.cluster.config import ClusterConfig
from pipeline.config_errors import explain
from pipeline.errors import ConfigError
from pipeline.learner_config import LearnerConfig
from pipeline.sections import Frac, NonNegative, NonNegativeInt, Positive, PositiveInt, Section
from pipeline.staleness import Policy
from pipeline.tasks.registry import ShowYourWorkConfig, TaskConfig
from pipeline.urls import check_server_url
from samplers.never_give_up import NeverGiveUpConfig
from samplers.registry import SamplerConfig


class ModelConfig(Section, frozen=True):
    """`path` is a Hugging Face model directory, a .gguf file, or "builtin" for the one that ships for the task."""

    path: str = "builtin"
    chat_template: Literal["auto", "never"] = "auto"


class InterruptionConfig(Section, frozen=True):
    """Forced length interruption (ScaleRL): a completion whose thinking has not ended at a length drawn for each
    rollout from `min_tokens` to `max_tokens` (0 = never) is made to say `phrase` and has `answer_tokens` left after it.

    The phrase is part of the completion, and nothing is learnt of it. The thinking has ended where the text holds
    `thought_end`. Evaluation is interrupted likewise.
    """

    min_tokens: NonNegativeInt = 0
    max_tokens: NonNegativeInt = 0
    answer_tokens: PositiveInt = 2048
    phrase: str = "Okay, time is up. Let me stop thinking and formulate a final answer now. </think>"
    thought_end: str = "</think>"

    def __post_init__(self):
        if self.max_tokens and not 0 < self.min_tokens <= self.max_tokens:
            raise ValueError("min_tokens must be above 0 and at most max_tokens")
        if not (self.phrase and self.thought_end):
            raise ValueError("phrase and thought_end must not be empty")


class SamplingConfig(Section, frozen=True):
    """Sampling of training rollouts. The learner scores the full distribution at the same temperature."""

    temperature: float = 1.0
    max_new_tokens: PositiveInt = 70
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    interruption: InterruptionConfig = msgspec.field(default_factory=InterruptionConfig)

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ValueError("temperature must be above 0: a greedy policy has no logprobs to learn from")
        if self.top_p != 1.0 or self.top_k != 0 or self.min_p != 0.0:
            raise ValueError(
                "top_p, top_k and min_p must stay 1.0, 0 and 0.0: engine logprobs under a truncated distribution "
                "do not match the learner's"
            )
        cut = self.interruption
        if cut.max_tokens and cut.max_tokens + cut.answer_tokens > self.max_new_tokens:
            raise ValueError(
                f"interruption.max_tokens and answer_tokens come to {cut.max_tokens + cut.answer_tokens}, more than "
                f"max_new_tokens = {self.max_new_tokens}: raise it, or a late interruption would leave no answer"
            )


class EnginesConfig(Section, frozen=True):
    """`embedded` runs qwen2, qwen3 and llama architectures on a CPU, `transformers` all, on a GPU if there is one;
    `auto` takes the first where there is no GPU and it can. `sglang` has a server for each engine (docs/SGLANG.md),
    `fake` needs no model (tests). `count = 0` leaves all the work to those that join (daemon.listen).

    `own_cores` keeps each engine on a core of its own and all other roles off it: for a machine that runs nothing else.

    The rest is for `sglang`. `kv = "recompute"` computes the cache of running requests anew after every update; `keep`,
    the only way of the other kinds, leaves it. `tp` GPUs serve one engine, handed out from `gpus` in order (empty: from
    0 on). `flags` go to the server as they are. `urls` names one running server an engine, instead of starting any. On
    another machine it has to be https, and `push` be "disk": `private_network = true` says that nobody else is on the
    network there, and allows plain HTTP and the broadcasts of gloo and NCCL, which nothing encrypts either.
    `push` is how weights get there: `auto` is gloo to a CPU, NCCL where a GPU is left over, else a file both can read.
    `python` is the interpreter that has sglang (empty: that of `just sglang`, else this one). A server that generates
    nothing, or does not finish an update, for `hang_s` seconds is started again; keep it under daemon.hang_s.
    """

    kind: Literal["auto", "embedded", "transformers", "sglang", "fake"] = "auto"
    count: NonNegativeInt = 1
    slots: PositiveInt = 128
    own_cores: bool = False
    kv: Literal["keep", "recompute"] = "keep"
    tp: PositiveInt = 1
    gpus: tuple[NonNegativeInt, ...] = ()
    flags: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    private_network: bool = False
    push: Literal["auto", "gloo", "nccl", "disk"] = "auto"
    python: str = ""
    hang_s: Positive = 45.0

    def __post_init__(self):
        theirs = (self.kv != "keep", self.gpus, self.flags, self.urls, self.private_network, self.tp != 1)
        if self.kind != "sglang" and any(theirs):
            raise ValueError("kv, tp, gpus, flags, urls and private_network are for engines.kind = sglang")
        if self.own_cores and self.kind == "sglang":
            raise ValueError(
                "own_cores is for engines that compute on this machine's CPU, which those of sglang do not"
            )
        if self.gpus and len(self.gpus) != self.count * self.tp:
            raise ValueError(
                f"gpus names {len(self.gpus)}, and {self.count} engines of {self.tp} need as many together"
            )
        if self.urls and len(self.urls) != self.count:
            raise ValueError(f"urls names {len(self.urls)} servers and count is {self.count}: set them alike")
        for url in self.urls:
            check_server_url(url, self.push, self.private_network)

    def gpus_of(self, index: int) -> tuple[int, ...]:
        """The GPUs of engine number `index`, where there are any."""
        mine = slice(index * self.tp, (index + 1) * self.tp)
        return (self.gpus or tuple(range(self.count * self.tp)))[mine]


ExtractRule = Literal["auto", "boxed", "hash", "answer"]


class VerifierConfig(Section, frozen=True):
    r"""`extract` says where a completion's final answer stands: the last `\boxed{x}`, `#### x` or `Answer: x`; `auto`
    takes the first of these that the text holds. `reward` names a function of yours that judges instead of the task's
    own scorer (`package.module:name` or `file.py:name`, see docs/REWARDS.md).
    """

    num_workers: PositiveInt = 1
    deadline_s: Positive = 5.0
    max_unknown_frac: Frac = 0.5
    extract: ExtractRule = "auto"
    reward: str = ""


class StalenessConfig(Section, frozen=True):
    """`max_lag` bounds launches: at most (max_lag + 1) batches are waiting, in training or in flight together.

    0 is the synchronous mode: generate a batch, train on it, publish, generate the next. `correct` trains whatever
    arrives, with truncated weights; `pace` trains in the order of launches, so that the learner, and with it the
    launches, wait for what would become older than `max_lag`, and of a chain of many rounds leaves out those that are
    older all the same; `drop` leaves out groups that hold a token older than `max_lag` versions.

    After a step whose effective sample size is below `min_ess` nothing is launched until the groups launched before it
    are trained; 0 never holds.
    """

    max_lag: NonNegativeInt = 1
    policy: Policy = "correct"
    min_ess: Frac = 0.5


class EvalConfig(Section, frozen=True):
    """Evaluation on the task's held-out problems before, during (every `every_steps`, in flight) and after training.

    `num_rollouts` of each problem during training, `hard_num_rollouts` of those of hard levels (0: the same number), of
    which a curve needs more; `final_num_rollouts` of every problem before and after.

    `pinned` does the evaluations during training on one more engine process, which keeps its weights until an
    evaluation is over: all its tokens are of one version, and rollouts for training never wait for it. Without it they
    share engines, and the weights change under them.
    """

    every_steps: NonNegativeInt = 5
    num_rollouts: PositiveInt = 1
    hard_num_rollouts: NonNegativeInt = 0
    final_num_rollouts: PositiveInt = 4
    pinned: bool = False


class GuardsConfig(Section, frozen=True):
    """What a run does about trouble that it sees coming, besides warning in `ngu status`, the log and TensorBoard.

    `starvation` lists what goes one notch further with each warning that ever more rollouts are truncated, train
    nothing or are too old: "throttle_retries" halves sampler.max_retry_frac, "lower_lag" takes 1 from
    staleness.max_lag (down to 1), "continue_truncated" adds 1 to sampler.seq_multiplier (up to 4), so that cut-off
    rollouts are continued instead of sampled anew. `ngu ctl RUN set` sets them back; what the sampler lacks is skipped.
    `memory_gib` bounds the memory of all the run's processes together (0: not at all). Nine tenths of it are a warning;
    at the bound the run goes on ("warn"), or saves a checkpoint and pauses until there is room, or stops.
    """

    starvation: tuple[Literal["throttle_retries", "lower_lag", "continue_truncated"], ...] = ()
    memory_gib: NonNegative = 0.0
    memory: Literal["warn", "pause", "stop"] = "pause"


class TelemetryConfig(Section, frozen=True):
    """`prometheus_port` serves the run's figures at http://`prometheus_address`:PORT/metrics, to anyone who can reach
    that address (0: not at all). deploy/grafana.json is a dashboard of them.

    `profile` (`ngu train --profile`) records what each process does when, up to 64 MiB a process, and makes
    RUN/trace.json of it for https://ui.perfetto.dev when the run ends.
    """

    prometheus_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    prometheus_address: str = "127.0.0.1"
    profile: bool = False


class DaemonConfig(Section, frozen=True):
    """`checkpoint_every_steps = 0` keeps only the final checkpoint, and one whenever the journal has grown to 1 GiB.

    A process that dies is started again after `restart_wait_s` seconds, which double each time, and at most
    `max_restarts` times in any hour: each engine, and all others together. One that says nothing for `hang_s` seconds
    is killed; raise it where one micro-batch, one checkpoint or loading the model takes longer. Attempts that ended
    more than `ledger_keep_steps` steps ago are kept as sums by problem only. The batches of the newest steps are kept
    for `ngu replay`, as many as fit into `replay_gib` GiB (about 20 bytes a token); 0 keeps none.

    `listen`, as "tcp://0.0.0.0:5555", lets engines on other machines join by `ngu worker`, with the key that the run
    makes in RUN/keys; empty: none. The attempts of one that is not heard for `hang_s` seconds are launched again.
    """

    checkpoint_every_steps: NonNegativeInt = 10
    max_restarts: NonNegativeInt = 3
    restart_wait_s: NonNegative = 1.0
    hang_s: Positive = 60.0
    ledger_keep_steps: PositiveInt = 200
    replay_gib: NonNegative = 1.0
    listen: str = ""

    def __post_init__(self):
        port = re.fullmatch(r"tcp://[^/\s]+:(\d{1,5})", self.listen)
        if self.listen and not (port and int(port[1]) < 1 << 16):
            raise ValueError('listen is written "tcp://ADDRESS:PORT", as in "tcp://0.0.0.0:5555"')


class Config(Section, frozen=True):
    """A run. It ends after `max_steps` optimizer steps or `max_rollouts` training rollouts, whichever is first; 0 is no
    limit. A round is launched whole, so the last may go over.
    """

    seed: int = 0
    max_steps: NonNegativeInt = 0
    max_rollouts: NonNegativeInt = 11_904
    task: TaskConfig = msgspec.field(default_factory=ShowYourWorkConfig)
    model: ModelConfig = msgspec.field(default_factory=ModelConfig)
    sampling: SamplingConfig = msgspec.field(default_factory=SamplingConfig)
    sampler: SamplerConfig = msgspec.field(default_factory=NeverGiveUpConfig)
    engines: EnginesConfig = msgspec.field(default_factory=EnginesConfig)
    verifier: VerifierConfig = msgspec.field(default_factory=VerifierConfig)
    learner: LearnerConfig = msgspec.field(default_factory=LearnerConfig)
    staleness: StalenessConfig = msgspec.field(default_factory=StalenessConfig)
    eval: EvalConfig = msgspec.field(default_factory=EvalConfig)
    daemon: DaemonConfig = msgspec.field(default_factory=DaemonConfig)
    guards: GuardsConfig = msgspec.field(default_factory=GuardsConfig)
    telemetry: TelemetryConfig = msgspec.field(default_factory=TelemetryConfig)
    cluster: ClusterConfig | None = None

    def __post_init__(self):
        if not (self.max_steps or self.max_rollouts):
            raise ValueError("set max_steps or max_rollouts, or the run would never end")
        resumes = isinstance(self.sampler, NeverGiveUpConfig) and self.sampler.seq_multiplier > 1
        resumes |= "continue_truncated" in self.guards.starvation
        if resumes and self.sampling.interruption.max_tokens:
            raise ValueError(
                "sampler.seq_multiplier (which the guard continue_truncated raises) goes on with completions that "
                "sampling.interruption ends: set only one of them"
            )
        if self.engines.kind == "sglang" and self.engines.hang_s >= self.daemon.hang_s:
            raise ValueError("engines.hang_s must be below daemon.hang_s, or the engine is killed with its server")
        if not (self.engines.count or self.daemon.listen):
            raise ValueError("engines.count is 0: set daemon.listen, so that engines can join, or none would generate")


# A table that only changes fields of the default alternative need not repeat its name.
_DEFAULT_KINDS = {("task",): "show_your_work", ("sampler",): "never_give_up", ("learner", "loss"): "cispo"}


def load_config(path: str | Path | None, overrides: Sequence[str] = (), schema: type[Config] = Config) -> Config:
    """Read a TOML file (or the defaults) and apply `section.key=value` overrides; raises ConfigError.

    The result is a `schema`, which may add tables to those of a run.
    """
    if path is None:
        raw: dict[str, Any] = {}
    else:
        try:
            raw = tomllib.loads(Path(path).read_text())
        except FileNotFoundError:
            raise ConfigError(f"{path}: no such file; `ngu init` writes one; a setting is written key=value") from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise ConfigError(f"{path}: not a readable TOML file: {e}") from None
    for override in overrides:
        apply_override(raw, override)
    return parse_config(raw, str(path) if path else "config", schema)


def parse_config(raw: dict[str, Any], where: str, schema: type[Config] = Config) -> Config:
    """Check a config given as plain tables; `where` names it in errors. Raises ConfigError."""
    for path, default in _DEFAULT_KINDS.items():
        raw = _with_kind(raw, path, default)
    try:
        config = msgspec.convert(raw, schema, strict=True)
    except msgspec.ValidationError as e:
        raise ConfigError(f"{where}: {explain(raw, str(e), schema)}") from None
    if odd := _unstorable(raw):
        # `config.json` would hold null, or could not be written at all, and the journal neither.
        raise ConfigError(f"{where}: [{odd}] expected a finite number of at most 64 bits")
    return config


def _unstorable(value: Any, path: str = "") -> str:
    """The path of the first number in plain tables that JSON or msgpack cannot hold; empty when there is none."""
    if isinstance(value, int | float):
        return "" if -(1 << 63) <= value < 1 << 63 or (isinstance(value, float) and math.isfinite(value)) else path
    if isinstance(value, dict):
        inner = ((f"{path}.{name}".lstrip("."), v) for name, v in value.items())
    elif isinstance(value, list | tuple):
        inner = ((f"{path}[{i}]", v) for i, v in enumerate(value))
    else:
        return ""
    return next((odd for name, v in inner if (odd := _unstorable(v, name))), "")


def _with_kind(table: dict[str, Any], path: tuple[str, ...], kind: str) -> dict[str, Any]:
    """`table`, where the table at `path`, if it is there, names its kind."""
    if not path:
        return {"kind": kind} | table
    inner = table.get(path[0])
    return table | {path[0]: _with_kind(inner, path[1:], kind)} if isinstance(inner, dict) else table


def override_config(config: Config, override: str) -> Config:
    """`config` with one `section.key=value` override; raises ConfigError."""
    raw = dump_config(config)
    apply_override(raw, override)
    return parse_config(raw, "config", type(config))


def dump_config(config: Config) -> dict[str, Any]:
    """The resolved config as builtins; `parse_config` gives the same config back."""
    return msgspec.to_builtins(config)


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Set one `section.key=value` in plain tables; raises ConfigError for what is not written so."""
    key, sep, literal = override.partition("=")
    if not sep or not key.strip():
        raise ConfigError(f"{override!r}: an override is written section.key=value")
    value = literal.strip()  # a bare word is a string, so shells need no double quoting
    with contextlib.suppress(tomllib.TOMLDecodeError):
        read = tomllib.loads(f"x = {literal}")["x"]
        value = value if isinstance(read, datetime.date | datetime.time) else read  # as cluster.time=12:00:00
    *tables, leaf = key.strip().split(".")
    table = raw
    for name in tables:
        if table.get(name) is None:  # not there, or off in a config that was read back
            table[name] = {}
        table = table[name]
        if not isinstance(table, dict):
            raise ConfigError(f"{override!r}: {name} is a value, not a table")
    if leaf == "kind" and table.get("kind") not in (value, None):
        table.clear()  # the other alternative's fields would be unknown to this one
    table[leaf] = value
