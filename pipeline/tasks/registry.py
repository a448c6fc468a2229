"""Every task by its config: `[task] kind = "..."`. Implementations are imported when one is made, not before."""

from typing import Literal

import msgspec

from pipeline.tasks.base import TaskSource


class ShowYourWorkConfig(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="show_your_work"
):
    """The built-in job: integer arithmetic with an answer that must be worked out digit by digit."""

    num_problems: int = 2000
    eval_per_level: int = 24


class JsonlConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="jsonl"):
    """Problems from a JSON-lines file; a gold in the GSM8K form (`... #### 42`) is reduced to what follows `####`.

    `level_field` names an optional field used as the difficulty bucket. `eval_path` is a second file to evaluate on;
    without it `eval_size` problems are held out of `path`. `prompt_template` must contain `{question}`.
    """

    path: str
    eval_path: str = ""
    question_field: str = "question"
    answer_field: str = "answer"
    level_field: str = ""
    prompt_template: str = "{question}\nPlease reason step by step, and put your final answer within \\boxed{}."
    eval_size: int = 64


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

    `mixed` rewards the mean of the two. The pool `unsolved` keeps only training problems that the shipped model never
    solved. At most `eval_per_level` problems are evaluated of each level.
    """

    reward: Literal["per_test", "all_pass", "mixed"] = "per_test"
    families: Literal["accept", "transform", "all"] = "accept"
    pool: Literal["mixed", "unsolved"] = "mixed"
    eval_per_level: int = 25


TaskConfig = ShowYourWorkConfig | JsonlConfig | ReasoningGymConfig | ManufactoriaConfig


def make_task(config: TaskConfig, seed: int) -> TaskSource:
    """Raises ConfigError when the data is missing, empty or malformed, naming the file and the field."""
    match config:
        case ShowYourWorkConfig():
            from pipeline.tasks.show_your_work import ShowYourWork

            return ShowYourWork(config, seed)
        case JsonlConfig():
            from pipeline.tasks.jsonl import JsonlTask

            return JsonlTask(config, seed)
        case ReasoningGymConfig():
            from pipeline.tasks.reasoning_gym import ReasoningGymTask

            return ReasoningGymTask(config, seed)
        case ManufactoriaConfig():
            from pipeline.tasks.manufactoria.task import Manufactoria

            return Manufactoria(config, seed)
