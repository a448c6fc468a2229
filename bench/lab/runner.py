"""Simulations over several cores. Each depends on its config alone, so neither order nor number of cores shows."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.lab.config import LabConfig
from bench.lab.population import make_population
from bench.lab.tally import Report
from bench.lab.world import World


def simulate(config: LabConfig) -> Report:
    """Raises ConfigError when the population's file does not hold what it should."""
    return World(config, make_population(config.lab, config.seed)).run()


def simulate_all(configs: Sequence[LabConfig], jobs: int) -> Iterator[tuple[int, Report]]:
    """Each report with the index of its config, as they finish; leaving early cancels what has not begun."""
    jobs = min(jobs, len(configs))
    if jobs <= 1:
        yield from ((i, simulate(config)) for i, config in enumerate(configs))
        return
    # Forking a process that has threads (the progress bar's) may hang the child.
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        futures = {pool.submit(simulate, config): i for i, config in enumerate(configs)}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def with_seeds(config: LabConfig, seeds: int) -> list[LabConfig]:
    """The config under `seeds` seeds, counted up from its own."""
    return [msgspec.structs.replace(config, seed=config.seed + i) for i in range(seeds)]


def default_jobs() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def progress(what: str, total: int, done: int = 0) -> Iterator[Progress]:
    """A bar on stderr with one task, whose id is 0; nothing where stderr is no terminal."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        bar.add_task(what, total=total, completed=done)
        yield bar
