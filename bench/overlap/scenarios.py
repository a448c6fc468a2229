"""The devices of the `overlap` benchmark: published sizes and rates for 8, 64 and 128 GPUs.

A 7B model (Qwen2.5-7B) on H100s, 48 of 128 of them generating, batches of 1,024, completions of at most 8,192
tokens: the setting of PipelineRL (arXiv 2509.19128, whose versions differ in hardware; H = 64 rows an engine, lengths
of 1 to 2 thousand in the mean). A decode step reads the weights at 60% of 3.35 TB/s and a row adds the reading of its
cache: tokens a second grow nearly linearly to 128 rows and little from 256 on, as published there. Training is at 40%
of 989 TFLOP/s (Llama 3, arXiv 2407.21783, table 4). Weights take the time of one broadcast at 400 Gbit/s. The smaller
machines have the same shares, and a batch in proportion.
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
    return data_sheet_rates("H100", job.model, job.context, job.inputs_per_token, 1)
