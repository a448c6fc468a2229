"""What is wrong with a config, in the user's words: where, and what would have been right."""

import difflib
import re
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

import msgspec


def explain(raw: dict[str, Any], message: str, schema: type[msgspec.Struct]) -> str:
    """msgspec's message with the path in the user's words and, for an unknown name or value, the nearest known one.

    `raw` holds the plain tables that did not fit into `schema`.
    """
    text, _, path = message.partition(" - at `$")
    path = path.rstrip("`").lstrip(".")
    where = f"[{path}] " if path else ""
    if "unknown field" in text:
        name = text.split("`")[1]
        return f"{where}unknown key {name!r}; {_hint(name, _fields(raw, path, schema))}"
    if "missing required field" in text:
        return f"{where}the key {text.split('`')[1]!r} is missing"
    if found := re.fullmatch(r"Invalid (?:enum )?value '(.*)'", text):
        return f"{where}there is no {found[1]!r}; {_hint(found[1], _values(raw, path, schema))}"
    return f"{where}{text[:1].lower()}{text[1:]}".replace("`object`", "a table").replace("`array`", "a list")


def _hint(given: str, known: Iterable[str]) -> str:
    known = sorted(known)
    near = difflib.get_close_matches(given, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _fields(raw: dict[str, Any], path: str, schema: Any) -> list[str]:
    """The keys that the table at `path` may have."""
    kind = _chosen(*_at(raw, _names(path), schema))
    names = [f.encode_name for f in msgspec.structs.fields(kind)]
    return names + (["kind"] if kind.__struct_config__.tag else [])


def _values(raw: dict[str, Any], path: str, schema: Any) -> list[str]:
    """What the key at `path` may be: a kind of its table, or one of a few words."""
    *tables, key = _names(path)
    if key == "kind":
        union, _ = _at(raw, tables, schema)
        if tags := [str(config.tag) for option in get_args(union) if (config := _struct(option)) and config.tag]:
            return tags
    words, _ = _at(raw, [*tables, key], schema)
    return [word for word in get_args(words) if isinstance(word, str)]


def _names(path: str) -> list[str]:
    return re.findall(r"[^.\[\]]+", path)


def _at(raw: dict[str, Any], names: list[str], schema: Any) -> tuple[Any, Any]:
    """The annotation at a path, and the value there."""
    kind: Any = schema
    value: Any = raw
    for name in names:
        if name.isdigit():
            kind, value = get_args(kind)[0], value[int(name)]
        else:
            kind, value = get_type_hints(_chosen(kind, value))[name], value[name]
    return kind, value


def _chosen(kind: Any, value: Any) -> Any:
    """Of a union of tables the one that `value` names."""
    named = value.get("kind") if isinstance(value, dict) else None
    return next((o for o in get_args(kind) if (config := _struct(o)) and config.tag == named), kind)


def _struct(option: Any) -> Any:
    return getattr(option, "__struct_config__", None)
