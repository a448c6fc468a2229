"""What one SGLang server can do, read from its own description instead of guessed from its version."""

from typing import Any

import msgspec

from pipeline.engines.sglang.client import Client
from pipeline.errors import EngineError

DEADLINE_S = 30.0
OLDEST = "0.5.6"


class Capabilities(msgspec.Struct, frozen=True):
    """`slots` is how many requests it runs at once, `max_tokens` the longest prompt and completion together.
    `load_path` answers with the gauges of its scheduler.
    """

    version: str
    slots: int
    max_tokens: int
    device: str
    is_float32: bool
    tp: int
    has_sessions: bool
    has_cache_keys: bool
    load_path: str


async def read_capabilities(client: Client) -> Capabilities:
    """Raises EngineError, not retryable, for a server that cannot be trained with: too old, or started wrongly."""
    spec = await client.get("/openapi.json", DEADLINE_S)
    paths = spec["paths"]
    info_path = "/server_info" if "/server_info" in paths else "/get_server_info"
    info = await client.get(info_path, DEADLINE_S)
    version = str(info.get("version", "of an unknown version"))
    if "mode" not in _fields(spec, "/pause_generation"):
        raise EngineError(
            f"{client.url}: SGLang {version} cannot pause its requests for new weights; {OLDEST} or newer is needed",
            retryable=False,
        )
    if not info.get("disable_overlap_schedule", False):
        raise EngineError(
            f"{client.url}: with its overlap scheduler SGLang labels the first token after an update with the wrong "
            "version; start the server with --disable-overlap-schedule",
            retryable=False,
        )
    has_cache_keys = "extra_key" in _fields(spec, "/generate")
    if not (has_cache_keys or info.get("disable_radix_cache", False)):
        raise EngineError(
            f"{client.url}: SGLang {version} would serve cached prompts of older weights; start the server with "
            "--disable-radix-cache",
            retryable=False,
        )
    return Capabilities(
        version=version,
        slots=_slots(info),
        # A few more would fit, but not be taken as the prompt of a completion that is continued there.
        max_tokens=int(info["max_req_input_len"]) - 1,
        device=str(info.get("device") or "cuda"),
        is_float32=info.get("dtype") == "float32",
        tp=int(info.get("tp_size", 1)),
        has_sessions="/begin_weight_update" in paths,
        has_cache_keys=has_cache_keys,
        load_path="/v1/loads?include=core" if "/v1/loads" in paths else info_path,
    )


def read_load(answer: dict[str, Any]) -> dict[str, float]:
    """Gauges of the scheduler from an answer to `load_path`; those that this version does not report are absent."""
    load = (answer.get("loads") or answer.get("internal_states") or [{}])[0]
    names = {
        "server_running": ("num_running_reqs",),
        "server_waiting": ("num_waiting_reqs",),
        "cache_used_frac": ("token_usage",),
        "server_tokens_per_s": ("gen_throughput", "last_gen_throughput"),
    }
    found = {ours: next((load[n] for n in theirs if n in load), None) for ours, theirs in names.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def _slots(info: dict[str, Any]) -> int:
    states = info.get("internal_states") or [{}]
    effective = states[0].get("effective_max_running_requests_per_dp")
    return int(effective or info.get("max_running_requests") or 1)


def _fields(spec: dict[str, Any], path: str) -> set[str]:
    """Names in the JSON body of POST `path`; empty when there is no such call."""
    try:
        body = spec["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    except KeyError:
        return set()
    names: set[str] = set()
    todo = [body]
    while todo:
        schema = todo.pop()
        if "$ref" in schema:
            schema = spec["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        names.update(schema.get("properties", {}))
        todo += [part for key in ("allOf", "anyOf", "oneOf") for part in schema.get(key, [])]
    return names
