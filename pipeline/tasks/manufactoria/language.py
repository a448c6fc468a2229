"""The Manufactoria language: parse, print and run programs.

A robot carries a tape of the colours R, B, Y and G through nodes. A puller takes the front colour if it is one of its
two and routes on it; otherwise it routes on [EMPTY] and takes nothing. A painter appends a colour. Reaching END accepts
with the tape as it is, reaching NONE rejects, and so does a program that has not ended after `MAX_STEPS` nodes.

There are two written forms of one `Program`. The text form is for people and large models:

    START start:
        NEXT n0
    PULLER_RB n0:        # a missing route is a route to NONE
        [R] n1
        [EMPTY] end
    PAINTER_YELLOW n1:
        NEXT n0
    END end

The word form, `START n0 PULLER_RB n0 n1 NONE END PAINTER_YELLOW n1 n0`, has one token a word, for small models.
Names are not kept: nodes are numbered in the order they are written.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

from pipeline.errors import NguError

PAIRS = ("RB", "YG")
PAINTERS = {"PAINTER_RED": "R", "PAINTER_BLUE": "B", "PAINTER_YELLOW": "Y", "PAINTER_GREEN": "G"}
PULLERS = {f"PULLER_{pair}": pair for pair in PAIRS}
# Targets below 0 end the program; all others are indices of nodes.
ACCEPT, REJECT = -1, -2
MAX_STEPS = 1000
MAX_CHARS = 100_000

_PAINTER_OF = {colour: opcode for opcode, colour in PAINTERS.items()}
_HEADER = re.compile(r"([A-Z_]+)\s+(\w+)\s*(:?)", re.ASCII)
_ROUTE = re.compile(r"(?:\[(R|B|Y|G|EMPTY)\]|(NEXT))\s+(\w+)", re.ASCII)
_NODE_WORD = re.compile(r"n[0-9]+")


class ProgramError(NguError):
    """The text is not a program; the message names the line or the word."""


class Puller(NamedTuple):
    """`first` and `second` are the targets for the two colours of `pair`, `empty` for anything else."""

    pair: str
    first: int
    second: int
    empty: int


class Painter(NamedTuple):
    colour: str
    then: int


class Program(NamedTuple):
    """`start` is the first target; targets are indices into `nodes`, ACCEPT or REJECT."""

    start: int
    nodes: tuple[Puller | Painter, ...] = ()


class _Block(NamedTuple):
    """One statement with its names unresolved; a route is (target name, where it is written)."""

    opcode: str
    name: str
    where: str
    routes: dict[str, tuple[str, str]]


def run(program: Program, tape: str) -> str | None:
    """The tape that `program` ends with when it accepts, None when it rejects or runs too long."""
    nodes, colours, head = program.nodes, list(tape), 0
    target = program.start
    for _ in range(MAX_STEPS + 1):
        if target < 0:
            return "".join(colours[head:]) if target == ACCEPT else None
        node = nodes[target]
        if isinstance(node, Painter):
            colours.append(node.colour)
            target = node.then
        elif head < len(colours) and colours[head] in node.pair:
            target = node.first if colours[head] == node.pair[0] else node.second
            head += 1
        else:
            target = node.empty
    return None


def parse(text: str) -> Program:
    """A program in either form (only the text form has colons); raises ProgramError."""
    if len(text) > MAX_CHARS:
        raise ProgramError(f"{len(text)} characters; a program has at most {MAX_CHARS}")
    return _link(list(_read_lines(text) if ":" in text else _read_words(text)))


def to_text(program: Program) -> str:
    """The text form; `parse` gives the same program back."""
    names = {ACCEPT: "end", REJECT: "NONE"} | {i: f"n{i}" for i in range(len(program.nodes))}
    lines = ["START start:", f"    NEXT {names[program.start]}"]
    for i, node in enumerate(program.nodes):
        if isinstance(node, Painter):
            lines += [f"{_PAINTER_OF[node.colour]} n{i}:", f"    NEXT {names[node.then]}"]
        else:
            routes = zip((*node.pair, "EMPTY"), node[1:], strict=True)
            lines += [f"PULLER_{node.pair} n{i}:", *(f"    [{key}] {names[target]}" for key, target in routes)]
    return "\n".join([*lines, "END end"]) + "\n"


def to_words(program: Program) -> str:
    """The word form; `parse` gives the same program back."""
    names = {ACCEPT: "END", REJECT: "NONE"} | {i: f"n{i}" for i in range(len(program.nodes))}
    words = ["START", names[program.start]]
    for i, node in enumerate(program.nodes):
        opcode = _PAINTER_OF[node.colour] if isinstance(node, Painter) else f"PULLER_{node.pair}"
        words += [opcode, f"n{i}", *(names[target] for target in node[1:])]
    return " ".join(words)


def _keys(opcode: str) -> tuple[str, ...]:
    """What a statement may route on, in the order of the word form."""
    if opcode in PULLERS:
        return (*PULLERS[opcode], "EMPTY")
    return () if opcode == "END" else ("NEXT",)


def _read_lines(text: str) -> Iterator[_Block]:
    block: _Block | None = None
    for number, raw in enumerate(text.split("\n"), start=1):
        line, where = raw.partition("#")[0].strip(), f"line {number}"
        if not line:
            continue
        if route := _ROUTE.fullmatch(line):
            key, target = route[1] or route[2], route[3]
            if block is None or key not in _keys(block.opcode):
                owner = block.opcode if block else "the beginning"
                raise ProgramError(f"{where}: {owner} has no route {key}")
            if key in block.routes:
                raise ProgramError(f"{where}: a second route {key}")
            block.routes[key] = (target, where)
            continue
        header = _HEADER.fullmatch(line)
        if header is None or not _is_opcode(header[1]) or bool(header[3]) == (header[1] == "END"):
            raise ProgramError(f"{where}: neither a statement nor a route: {line[:40]!r}")
        if block:
            yield block
        block = _Block(header[1], header[2], where, {})
    if block:
        yield block


def _read_words(text: str) -> Iterator[_Block]:
    words = text.split()
    position = 0
    while position < len(words):
        opcode, where = words[position], f"word {position + 1}"
        if not _is_opcode(opcode) or opcode == "END":
            raise ProgramError(f"{where}: {opcode[:40]!r} is not a statement")
        # START has no name of its own: its word is its route.
        first_route = position + (1 if opcode == "START" else 2)
        keys = _keys(opcode)
        end = first_route + len(keys)
        if end > len(words):
            raise ProgramError(f"{where}: {opcode} lacks {end - len(words)} of its words")
        name = "START" if opcode == "START" else words[position + 1]
        if opcode != "START" and not _NODE_WORD.fullmatch(name):
            raise ProgramError(f"word {position + 2}: {name[:40]!r} is not the name of a node")
        routes = {key: (words[first_route + i], f"word {first_route + i + 1}") for i, key in enumerate(keys)}
        yield _Block(opcode, name, where, routes)
        position = end
    yield _Block("END", "END", "the end", {})


def _is_opcode(word: str) -> bool:
    return word in ("START", "END") or word in PULLERS or word in PAINTERS


def _link(blocks: list[_Block]) -> Program:
    for opcode in ("START", "END"):
        if (count := sum(block.opcode == opcode for block in blocks)) != 1:
            raise ProgramError(f"{count} {opcode} statements; a program has exactly one")
    targets = {"NONE": REJECT}
    statements = []
    for block in blocks:
        if block.name in targets:
            raise ProgramError(f"{block.where}: the name {block.name[:40]} is taken")
        # A route back to START goes where START goes; until that is known it stands for a loop, which rejects.
        targets[block.name] = {"START": REJECT, "END": ACCEPT}.get(block.opcode, len(statements))
        if _keys(block.opcode) == ("NEXT",) and not block.routes:
            raise ProgramError(f"{block.where}: {block.opcode} needs a NEXT")
        if block.opcode not in ("START", "END"):
            statements.append(block)
    start = next(block for block in blocks if block.opcode == "START")
    first = _resolve(targets, start.routes["NEXT"])
    targets[start.name] = first
    return Program(first, tuple(_node(block, targets) for block in statements))


def _node(block: _Block, targets: dict[str, int]) -> Puller | Painter:
    routes = [_resolve(targets, block.routes.get(key, ("NONE", ""))) for key in _keys(block.opcode)]
    if block.opcode in PAINTERS:
        return Painter(PAINTERS[block.opcode], *routes)
    return Puller(PULLERS[block.opcode], *routes)


def _resolve(targets: dict[str, int], route: tuple[str, str]) -> int:
    name, where = route
    if name not in targets:
        raise ProgramError(f"{where}: no node is called {name[:40]}")
    return targets[name]
