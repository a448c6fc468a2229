"""A short measurement of this machine: a decode step by rows and prompts, a training step by tokens, an update.

Engine and learner are measured in two processes at the same time, because that is how a run has them: cores share
caches and memory. Processor time counts on a CPU, so that others on the machine take none of it; the clock on a GPU.
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
from msgspec.structs import replace
from scipy.optimize import nnls

from bench.planner.hardware import Rates
from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.messages import Rollout, SamplingParams, VerifyJob, Work
from pipeline.tasks.registry import make_task
from samplers.base import Problem

ROWS_SHARES = (1.0, 0.25) * 4  # of the slots: two points for a line, in turn, since a core is faster now and then
GROUPS_SHARES = (1.0, 0.25)  # of a batch
WARM_UP = 0.3
ROUND = 8  # rollouts that a coordinator hands out together, so that an engine reads their prompts in one go


def measure_rates(config: Config, seconds: float) -> Rates:
    """Raises ConfigError for engines that are not in this process, which have to be measured where they serve."""
    if config.engines.kind not in ("auto", "embedded", "transformers"):
        raise ConfigError(f"engines.kind = {config.engines.kind}: only engines of this process can be measured")
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn) as pool:
        engine, learner = pool.submit(_engine_rates, config, seconds), pool.submit(_learner_rates, config, seconds)
        (step_s, row_s, prefill_s, host_s), learner_rates = engine.result(), learner.result()
    import torch

    on_gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if on_gpu else "CPU, processor time"
    source = f"measured on this machine: {where}"
    return Rates(step_s, row_s, *learner_rates, source, host_s, shares_cores=not on_gpu, prefill_s=prefill_s)


def _clock() -> Callable[[], float]:
    import torch

    return time.perf_counter if torch.cuda.is_available() else time.process_time


def line(x: list[float], y: list[float]) -> tuple[float, float]:
    """Intercept and slope through two points, neither below 0; flat where the points have one `x` (a single slot)."""
    if x[0] == x[1]:
        return min(y), 0.0
    slope = max((y[0] - y[1]) / (x[0] - x[1]), 0.0)
    return max(y[0] - slope * x[0], 0.0), slope


def step_rates(rows: list[int], read: list[int], seconds: list[float]) -> tuple[float, float, float]:
    """Least squares over decode steps: seconds of a step, of a row in it, of a prompt read in it; none is below 0."""
    inputs = np.stack([np.ones(len(rows)), rows, read], axis=1)
    step_s, row_s, prefill_s = nnls(inputs, np.array(seconds))[0]
    return float(step_s), float(row_s), float(prefill_s)


def _engine_rates(config: Config, seconds: float) -> tuple[float, float, float, float]:
    """Seconds of a decode step with no rows, of a row, of a prompt that is read, and of judging a rollout."""
    from learner.evaluation.generate import ready_engine

    engine, task, clock = ready_engine(config, config.model.path, "plan"), make_task(config.task, config.seed), _clock()
    sampling = SamplingParams(config.sampling.temperature, config.sampling.max_new_tokens)
    next_id = 0
    rows: list[int] = []
    read: list[int] = []
    taken: list[float] = []
    answers: list[tuple[Problem, Rollout]] = []
    problems: dict[int, Problem] = {}
    for share in ROWS_SHARES:
        slots = max(1, round(share * config.engines.slots))
        warm_s = clock() + WARM_UP * seconds / len(ROWS_SHARES)  # rows that start together say little of a full engine
        ends_s = clock() + seconds / len(ROWS_SHARES)
        while clock() < ends_s:
            first_id, is_refilled = next_id, engine.num_in_flight <= max(0, slots - ROUND)
            while is_refilled and engine.num_in_flight < slots:
                problems[next_id] = task.next_problem()
                engine.submit([Work(next_id, next_id, 0, problems[next_id], sampling)])
                next_id += 1
            num_rows, begun = engine.num_in_flight, clock()
            ended = [r for r in engine.step() if isinstance(r, Rollout)]
            if begun > warm_s:
                rows.append(num_rows)
                read.append(next_id - first_id)
                taken.append(clock() - begun)
            answers += [(problems.pop(r.attempt_id), r) for r in ended]
        engine.cancel(list(problems))
        problems.clear()
    engine.close()
    return *step_rates(rows, read, taken), _judging_s(config, answers)


def _judging_s(config: Config, answers: list[tuple[Problem, Rollout]]) -> float:
    """Processor seconds of the verifier's fast path for an answer."""
    from pipeline.verifiers.triage import triage

    begun = time.process_time()
    for problem, rollout in answers:
        job = VerifyJob(rollout.attempt_id, problem, rollout.text, rollout.finish_reason == "length")
        triage(job.problem, job.text, job.truncated, config.verifier.extract)
    return (time.process_time() - begun) / max(len(answers), 1)


def _learner_rates(config: Config, seconds: float) -> tuple[float, float, float, float]:
    """Seconds of an optimizer step without tokens, of a token of a completion, of publishing and of loading."""
    import torch

    from bench.suite.learner import GROUP_SIZE, sampled_groups
    from learner.learner import Learner
    from learner.model import export_model_dir, load_model
    from pipeline.engines.registry import make_engine
    from pipeline.model_path import model_for_task
    from pipeline.weights import WeightPublisher

    torch.set_num_threads(1)
    clock = _clock()
    model, tokenizer = load_model(model_for_task(config.model.path, str(config.task.__struct_config__.tag)))
    # The same batches again and again: a policy that learnt from them would soon refuse them as not its own.
    learner = Learner(model, replace(config.learner, lr=0.0), config.sampling.temperature)
    groups = sampled_groups(config, max(4, config.learner.batch_size // GROUP_SIZE))
    points, publishing, loading = [], [], []
    with tempfile.TemporaryDirectory(prefix="ngu-plan-") as scratch:
        export_model_dir(model, tokenizer, Path(scratch) / "model")
        publisher = WeightPublisher(Path(scratch) / "weights")
        engine = make_engine(config.engines, str(Path(scratch) / "model"), 0, config.model.chat_template)
        for share in GROUPS_SHARES:
            part = groups[: max(1, round(share * len(groups)))]
            tokens = sum(r.num_sampled for group in part for r in group.rollouts)
            times, ends_s = [], clock() + seconds / len(GROUPS_SHARES)
            while clock() < ends_s or len(times) < 2:
                begun = clock()
                learner.step(part)
                trained = clock()
                ids, logprobs = learner.canary()
                weights, version = learner.state_dict(), learner.policy_version
                notice = publisher.publish(weights, version, Path(scratch) / "model", ids.numpy(), logprobs.numpy())
                published = clock()
                engine.load_weights(notice)
                times.append(trained - begun)
                publishing.append(published - trained)
                loading.append(clock() - published)
            points.append((tokens, median(times)))
        publisher.close()
        engine.close()
    tokens_of, seconds_of = zip(*points, strict=True)
    return *line(list(tokens_of), list(seconds_of)), float(np.median(publishing)), float(np.median(loading))
