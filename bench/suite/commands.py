"""The verb `ngu bench`. Tables go to stdout, progress to stderr."""

import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from bench.suite.base import Benchmark
from bench.suite.registry import BENCHMARKS, make_benchmarks
from bench.suite.results import (
    RESULTS,
    Result,
    append,
    commit,
    load_average,
    machine,
    make_history,
    new_key,
    read_history,
    versions,
    write_json,
)
from bench.suite.tables import text_table
from pipeline.errors import ConfigError

app = App(name="bench", help="Measure how fast the parts are, against whom, and how far from the limit.")

Arguments = Annotated[str, Parameter(show_default=False, help="Benchmarks, and their parameters as key=value.")]
Results = Annotated[Path, Parameter(help="Directory of the history: a file of JSON lines for each benchmark.")]


@app.default
def bench(
    *arguments: Arguments,
    json: Annotated[Path | None, Parameter(help="Write everything measured to this file.")] = None,
    results: Results = RESULTS,
) -> int:
    """Run benchmarks and add their figures to the history; without a name, list them."""
    settings = [a for a in arguments if "=" in a]
    names = list(dict.fromkeys(a for a in arguments if "=" not in a))
    if not names:
        if settings or json is not None:
            raise ConfigError("name a benchmark; `ngu bench` alone lists them")
        width = max(map(len, BENCHMARKS))
        print("\n".join(f"{name:<{width}}  {entry.sentence}" for name, entry in BENCHMARKS.items()))
        return 0
    benchmarks = make_benchmarks(names, settings)
    make_history(results)
    if json is not None and not json.absolute().parent.is_dir():
        raise ConfigError(f"{json}: its directory does not exist; choose another --json")
    found = []
    for name, benchmark in benchmarks.items():
        found.append(_run(name, benchmark))
        print(text_table(found[-1]), flush=True)
        # One by one, so that a later benchmark that fails or is interrupted takes no figures with it.
        append(results, found[-1])
        if json is not None:
            write_json(json, found)
    return 0


def _run(name: str, benchmark: Benchmark) -> Result:
    notes: list[str] = []

    def say(line: str) -> None:
        notes.append(line)
        print(line, file=sys.stderr, flush=True)

    key, of_commit, load, started = new_key(name), commit(), load_average(), time.monotonic()
    rows = benchmark.run(say)
    if not rows:
        raise ConfigError(f"{name}: these parameters leave nothing to measure")
    seconds, loads = time.monotonic() - started, (load, load_average())
    parameters, usual = msgspec.to_builtins(benchmark), msgspec.to_builtins(type(benchmark)())
    changed = {k: value for k, value in parameters.items() if value != usual[k]}
    return Result(key, name, parameters, rows, notes, seconds, loads, of_commit, machine(), versions(), changed)


@app.command
def report(
    *, results: Results = RESULTS, out: Annotated[Path | None, Parameter(help="Default: the history's.")] = None
) -> int:
    """Draw the history, and write the newest figures of every benchmark on one page (Markdown and PNG)."""
    from bench.suite.report import write_report

    history = read_history(results)
    if not history:
        raise ConfigError(f"{results}: no results yet; `ngu bench NAME` makes some")
    print("\n".join(map(str, write_report(history, out or results))))
    return 0
