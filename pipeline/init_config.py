"""A commented TOML file written from the schema itself: names, defaults, limits and docstrings cannot drift from it."""

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as schema

from pipeline.config import Config, dump_config
from pipeline.errors import ConfigError
from pipeline.recipes import RecipeName, load_recipe

WIDTH = 100


def init(file: Path = Path("run.toml"), /, *, recipe: RecipeName | None = None) -> None:
    """Write a commented config file with every setting at its default.

    Parameters
    ----------
    file:
        Where to write it; an existing file is never overwritten.
    recipe:
        Set what a published method prescribes; the file's first lines say what of it is not available.
    """
    about, config = load_recipe(recipe) if recipe else ("", Config())
    heading = "".join(f"{line}\n" for paragraph in about.splitlines() for line in _comment(paragraph))
    try:
        with file.open("x") as out:
            out.write(f"{heading}\n" if heading else "")
            out.write(render_config(config, alternatives=True))
    except FileExistsError:
        raise ConfigError(f"{file} exists already; give another name or remove it") from None
    except OSError as e:
        raise ConfigError(f"{file}: cannot write it: {e.strerror}") from None
    print(f"wrote {file}; edit it, then: ngu train {file}")


def render_config(config: Config, alternatives: bool = False) -> str:
    """`config` as TOML with comments; `load_config` on the text gives `config` back.

    TOML has no null: a None is a commented-out line, so it reads back as its field's default.
    With `alternatives` the other kinds of each tagged table (tasks, samplers) follow as commented-out tables.
    """
    root = schema.type_info(Config)
    assert isinstance(root, schema.StructType)
    return "\n".join(_render_table((), root, dump_config(config), alternatives)).strip() + "\n"


def _render_table(
    path: tuple[str, ...], kind: schema.StructType, values: dict[str, Any], alternatives: bool
) -> Iterator[str]:
    yield from _comment(kind.cls.__dict__.get("__doc__") or "")
    if path:
        yield f"[{'.'.join(path)}]"
    if kind.tag_field is not None:
        yield f"{kind.tag_field} = {_literal(kind.tag)}"
    tables = []
    for field in kind.fields:
        options = _struct_options(field.type)
        if options:
            tables.append((field.encode_name, options))
        else:
            yield _render_field(field, values.get(field.encode_name))
    for name, options in tables:
        value = values[name]
        if value is None:
            for option in options:
                yield "#"
                yield "# ---- or, which is off as it stands, with ----"
                yield from _render_alternative((*path, name), option)
            continue
        chosen = next(o for o in options if o.tag_field is None or o.tag == value[o.tag_field])
        yield ""
        yield from _render_table((*path, name), chosen, value, alternatives)
        for other in options if alternatives else ():
            if other is not chosen:
                yield "#"
                yield "# ---- or instead of the table above ----"
                yield from _render_alternative((*path, name), other)


def _render_alternative(path: tuple[str, ...], kind: schema.StructType) -> Iterator[str]:
    """One comment sign before every line, so that taking it away gives the table with its own comments."""
    defaults = {f.encode_name: _default(f) for f in kind.fields}
    for line in _render_table(path, kind, defaults, alternatives=False):
        yield f"# {line}".rstrip()


def _render_field(field: schema.Field, value: Any) -> str:
    limits = _limits(field.type)
    if value is None:
        missing = "required" if field.required else "not set"
        return (
            f"# {field.encode_name} =   # {missing}; {limits}" if limits else f"# {field.encode_name} =   # {missing}"
        )
    line = f"{field.encode_name} = {_literal(value)}"
    return f"{line}  # {limits}" if limits else line


def _default(field: schema.Field) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.to_builtins(field.default_factory())
    return None if field.default is msgspec.NODEFAULT else msgspec.to_builtins(field.default)


def _struct_options(kind: schema.Type) -> list[schema.StructType]:
    options = kind.types if isinstance(kind, schema.UnionType) else (kind,)
    return [o for o in options if isinstance(o, schema.StructType)]


def _limits(kind: schema.Type) -> str:
    """What a value may be, in words; empty where its default says enough."""
    match kind:
        case schema.LiteralType(values):
            return "one of " + ", ".join(_literal(v) for v in values) if len(values) > 1 else ""
        case schema.UnionType(types):
            return " or ".join(filter(None, (_limits(t) for t in types)))
        case schema.IntType() | schema.FloatType():
            bounds = ((">", kind.gt), (">=", kind.ge), ("<", kind.lt), ("<=", kind.le))
            return ", ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
    return ""


def _literal(value: Any) -> str:
    """A TOML literal."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)  # inf and nan are spelled the same in TOML
        case str():
            # JSON's escapes are a subset of TOML's basic strings, except that TOML also refuses a raw DEL.
            return msgspec.json.encode(value).decode().replace("\x7f", "\\u007F")
        case dict():
            return "{" + ", ".join(f"{_literal(k)} = {_literal(v)}" for k, v in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_literal, value)) + "]"
    raise TypeError(f"no TOML literal for {value!r}")


def _comment(docstring: str) -> Iterator[str]:
    for paragraph in textwrap.dedent(docstring.strip()).split("\n\n"):
        for line in textwrap.wrap(" ".join(paragraph.split()), WIDTH - 2, break_on_hyphens=False):
            yield f"# {line}"
