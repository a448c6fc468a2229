"""The verb `ngu study`. The report goes to stdout, progress to stderr."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from cyclopts import Parameter

from bench.files import hold

if TYPE_CHECKING:
    from bench.study.plan import Job


def study(
    file: Annotated[Path, Parameter(name="STUDY.toml", help="What to compare; docs/STUDY.md shows one.")],
    /,
    *,
    out: Annotated[Path | None, Parameter(help="Directory of the runs and the report. Default: studies/STUDY.")] = None,
    as_json: Annotated[
        bool, Parameter(name="--json", negative="", help="Print the report as one JSON object.")
    ] = False,
) -> int:
    """Compare variants of a job by real training runs under several seeds; the same command goes on with it."""
    from bench.study.plan import load_study

    plan = load_study(file)
    out = out or Path("studies") / file.stem
    with hold(out, "ngu study"):
        _run(plan.jobs, out)

        from bench.study.report import report_on
        from bench.study.tables import markdown, write

        found = report_on(plan, out)
        paths = write(found, out)
    if as_json:
        print(msgspec.json.encode(found).decode())
        return 0
    print(markdown(found))
    print(f"\nwrote {', '.join(str(path) for path in paths)}")
    return 0


def _run(jobs: "list[Job]", out: Path) -> None:
    from bench.study.runs import run_all

    try:
        run_all(jobs, out, _say)
    except KeyboardInterrupt:
        _say("interrupted; the same command goes on with the study")
        raise


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
