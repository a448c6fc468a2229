"""Every loss at every lag under every seed: arms over the cores, whose results outlive an interruption."""

import itertools
import multiprocessing
import shlex
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from bench.files import config_key, read_results, run_rest
from bench.stability.course import Course
from bench.stability.loop import num_batches, run_arm
from pipeline.config import Config, load_config
from pipeline.errors import ConfigError, NguError
from pipeline.role import bind_to_parent
from pipeline.tasks.registry import CodeConfig


class Runnable(Protocol):
    @property
    def config(self) -> Config: ...


A = TypeVar("A", bound=Runnable)


class Arm(msgspec.Struct, frozen=True):
    """One course to be run. `key` identifies its resolved config."""

    key: str
    loss: str
    config: Config


class Result(msgspec.Struct, frozen=True):
    """A line of the result file. `loss` is as the arm was asked for; its full config is in the key."""

    key: str
    loss: str
    lag: int
    seed: int
    course: Course


def make_arms(
    settings: Sequence[str], losses: Sequence[str], lags: Sequence[int], seeds: Sequence[int], base: Path | None = None
) -> list[Arm]:
    """Every arm, checked before any is run; all of one seed before the next, so that a part is a whole table.

    A loss is its kind, and perhaps settings of its own: "gspo learner.loss.eps_low=0.004". Raises ConfigError.
    """
    arms = []
    for seed, lag, loss in itertools.product(seeds, lags, losses):
        words = shlex.split(loss)
        if not words:
            raise ConfigError("--losses: an empty name; give kinds of [learner.loss]")
        own = [f"learner.loss.kind={words[0]}", *words[1:], f"staleness.max_lag={lag}", f"seed={seed}"]
        config = load_config(base, [*settings, *own])
        check_runnable(config)
        arms.append(Arm(config_key(config), loss, config))
    return arms


def check_runnable(config: Config) -> None:
    """Raises ConfigError for what a course cannot be run of."""
    if isinstance(config.task, CodeConfig) or config.verifier.reward:
        raise ConfigError("answers are judged without a deadline here: choose a task without code or own rewards")
    if config.engines.kind == "fake" or not num_batches(config):
        raise ConfigError("there is nothing to train: max_rollouts must hold a batch, and engines.kind not be fake")


def run_arms(arms: Sequence[Arm], out: Path, processes: int, on_done: Callable[[Result, int], object]) -> list[Result]:
    """Run what `out` does not hold yet and append it line by line; the results of these arms, in their order.

    `on_done` is told each new result and how many arms are left. Raises ConfigError.
    """

    def courses(todo: Sequence[Arm]) -> Iterator[Result]:
        for arm, course in run_courses(todo, processes):
            yield Result(arm.key, arm.loss, arm.config.staleness.max_lag, arm.config.seed, course)

    return run_rest(arms, out, Result, courses, on_done)


def find_results(arms: Sequence[Arm], out: Path) -> list[Result]:
    """What `out` holds of these arms, in their order, and nothing is written; raises ConfigError."""
    done = {result.key: result for result in read_results(out, Result, repair=False)}
    return [done[arm.key] for arm in arms if arm.key in done]


def run_courses(arms: Sequence[A], processes: int) -> Iterator[tuple[A, Course]]:
    """Courses as they finish; leaving early cancels what has not begun. Raises NguError when a process is killed."""
    if min(processes, len(arms)) <= 1:
        yield from ((arm, run_arm(arm.config)) for arm in arms)
        return
    # Forking a process in which torch has run may hang the child.
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=_begin_worker) as pool:
        futures = {pool.submit(run_arm, arm.config): arm for arm in arms}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        except BrokenProcessPool:
            raise NguError("a process was killed, perhaps for memory; the same command goes on") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _begin_worker() -> None:
    bind_to_parent()  # a worker whose parent was killed would wait for work for ever
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a traceback
