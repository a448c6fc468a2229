"""The command `ngu`. Its verbs come from the entry-point group `ngu.commands`, so every room brings its own.

A verb's module is imported when the verb is called and not before; its one-line help is read from its source, so that
`ngu --help` costs no import of torch whatever the verbs need.
"""

import ast
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points, version
from pathlib import Path

from cyclopts import App

from pipeline.errors import NguError

GROUP = "ngu.commands"
HELP = "Asynchronous off-policy RL post-training for language models. `ngu train` runs the built-in job."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status, 2 for wrong input; SystemExit is raised for wrong usage (2) and
    Ctrl-C (130).
    """
    # A `kill` ends a command as Ctrl-C does: what it has started ends with it, and what it put aside is removed.
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return _app()(sys.argv[1:] if argv is None else list(argv))
    except NguError as e:
        print(f"ngu: error: {' '.join(e.message.split())}", file=sys.stderr)
        return e.exit_status
    except BrokenPipeError:
        # The reader (`head`, a pager) has left; the interpreter would complain when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    finally:
        signal.signal(signal.SIGTERM, previous)


def _app() -> App:
    app = App(
        name="ngu",
        help=HELP,
        version=lambda: version("ngu-rl"),
        result_action="return_int_as_exit_code_else_zero",
        help_format="plaintext",
    )
    for verb in sorted(entry_points(group=GROUP), key=lambda e: e.name):
        app.command(verb.value, name=verb.name, help=_first_line(verb))
    return app


def _first_line(verb: EntryPoint) -> str:
    """The first line of the verb's docstring, without importing its module; empty if it cannot be found.

    A verb with sub-commands is an `App`, whose line is the literal `help` that it is made with.
    """
    for node in _definitions(verb.module):
        if isinstance(node, ast.FunctionDef) and node.name == verb.attr:
            return (ast.get_docstring(node) or "").partition("\n")[0]
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and _is_name(node.targets[0], verb.attr):
            return _help_argument(node.value).partition("\n")[0]
    return ""


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _help_argument(call: ast.Call) -> str:
    given = [k.value.value for k in call.keywords if k.arg == "help" and isinstance(k.value, ast.Constant)]
    return str(given[0]) if given else ""


@cache
def _definitions(module: str) -> list[ast.stmt]:
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []
    return ast.parse(Path(spec.origin).read_bytes()).body


if __name__ == "__main__":
    sys.exit(main())
