"""The devices of the `overlap` benchmark: a 7B model on 8, 64 and 128 H100s, the smaller with the same shares.

From sources: the sizes of Qwen2.5-7B (its config.json), the H100's data sheet, 40% of its FLOP/s in training (Llama 3,
see `bench.planner.hardware`), batches of 1,024 (PipelineRL's published configuration), 128 GPUs (its abstract, arXiv
2509.19128).

From the text of that paper, whose versions differ, and not looked up again: 48 of 128 GPUs generate, with H = 64 rows
each; completions have 1 to 2 thousand tokens in the mean and 8,192 at most.

Assumed: the other shares of `bench.planner.hardware`, prompts of 200 tokens, groups of 8, log-normal lengths. With
these a GPU makes about 80 times as many tokens a second with 128 rows as with one, and 120 times with 256: the paper's
grow nearly linearly to 128 rows, and hardly from 256 on.
"""

from bench.planner.hardware import Rates, data_sheet_rates
from bench.planner.lengths import Lengths, guessed
from bench.planner.placements import Placement, Split
from bench.planner.shape import ModelSize
from bench.planner.work import Job

QWEN_7B = ModelSize("Qwen2.5-7B", params=7.62e9, active=7.07e9, layers=28, width=3584, kv_width=512)
MEAN_MAX = "1357,8192"
GENERATING = 48 / 128
ROWS = 64
BATCH = 1024
GROUP = 8
MAX_LAG = 8
SIMULATED: tuple[Placement, ...] = ("synchronous", "one_step_off", "in_flight")


def job_for(gpus: int, lengths: Lengths | None = None) -> Job:
    return Job(QWEN_7B, lengths or guessed(MEAN_MAX), "grpo", 200.0, BATCH * gpus // 128, GROUP)


def split_for(gpus: int, placement: Placement) -> Split:
    engines = round(gpus * GENERATING)
    lag = {"synchronous": 0, "one_step_off": 1}.get(placement, MAX_LAG)
    return Split(engines, 1, ROWS, gpus - engines, lag)


def rates_for(job: Job) -> Rates:
    return data_sheet_rates("H100", job.model, job.context, job.train_token_flops, 1)
