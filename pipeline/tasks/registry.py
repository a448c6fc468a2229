"""Every task by its config: `[task] kind = "..."`. Implementations are imported when one is made, not before."""

from typing import Annotated, Literal

import msgspec

from pipeline.tasks.base import TaskSource


class ShowYourWorkConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="show_your_work"
):
    """The built-in job: integer arithmetic with an answer that must be worked out digit by digit."""

    num_problems: int = 2000
    eval_per_level: int = 24


class FileConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every task from a data file has; see `JsonlConfig`."""

    path: str
    eval_path: str = ""
    question_field: str = "question"
    level_field: str = ""
    prompt_template: str = "{question}"
    eval_size: int = 64


class JsonlConfig(FileConfig, frozen=True, tag_field="kind", tag="jsonl"):
    r"""Questions and answers from JSON lines, a `.parquet` file, a directory of them or one saved by `datasets`.

    Of an answer that is a worked solution only what follows `####`, or stands in its last `\boxed{}`, counts.

    `level_field` names an optional field used as the difficulty bucket. `eval_path` is a second file to evaluate on;
    without it `eval_size` problems are held out of `path`. `prompt_template` must contain `{question}`.
    """

    prompt_template: str = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
    answer_field: str = "answer"


class CodeConfig(FileConfig, frozen=True, tag_field="kind", tag="code"):
    """Programming problems in Python from a data file, run in a sandbox and rewarded test by test.

    `tests_field` holds a list: `{"input": text, "output": text}` feeds a program's stdin and compares its stdout; a
    string is Python that runs after the program and fails by raising. The last fenced block of a completion is the
    program. A test may use `time_limit_s` of a core, `memory_mb` and `processes`. The rest is as for `jsonl`.
    """

    prompt_template: str = "{question}\nAnswer with one Python program in a ```python block."
    tests_field: str = "tests"
    time_limit_s: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0
    memory_mb: Annotated[int, msgspec.Meta(ge=64)] = 512
    processes: Annotated[int, msgspec.Meta(ge=1)] = 8


class ReasoningGymConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="reasoning_gym"
):
    """A reasoning-gym generator by name, scored by its own scorer; `params` go to its config."""

    name: str
    params: dict[str, int | float | str | bool | list[str]] = msgspec.field(default_factory=dict)
    num_problems: int = 2000
    eval_size: int = 64
    prompt_template: str = "{question}"


class ManufactoriaConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="manufactoria"):
    """Programs that judge (`accept`) or rewrite (`transform`) a tape of colours, rewarded test by test or as a whole.

    `mixed` rewards the mean of the two; evaluation is always graded test by test, so that runs compare. The pool
    `unsolved` keeps only training problems that the shipped model never solved. At most `eval_per_level` problems are
    evaluated of each level.
    """

    reward: Literal["per_test", "all_pass", "mixed"] = "per_test"
    families: Literal["accept", "transform", "all"] = "accept"
    pool: Literal["mixed", "unsolved"] = "mixed"
    eval_per_level: int = 25


TaskConfig = ShowYourWorkConfig | JsonlConfig | CodeConfig | ReasoningGymConfig | ManufactoriaConfig


def make_task(config: TaskConfig, seed: int) -> TaskSource:
    """Raises ConfigError when the data is missing, empty or malformed, naming the file and the field."""
    match config:
        case ShowYourWorkConfig():
            from pipeline.tasks.show_your_work import ShowYourWork

            return ShowYourWork(config, seed)
        case JsonlConfig():
            from pipeline.tasks.jsonl import JsonlTask

            return JsonlTask(config, seed)
        case CodeConfig():
            from pipeline.tasks.code import CodeTask

            return CodeTask(config, seed)
        case ReasoningGymConfig():
            from pipeline.tasks.reasoning_gym import ReasoningGymTask

            return ReasoningGymTask(config, seed)
        case ManufactoriaConfig():
            from pipeline.tasks.manufactoria.task import Manufactoria

            return Manufactoria(config, seed)
