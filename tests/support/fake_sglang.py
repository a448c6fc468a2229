"""A server that speaks as much of SGLang's HTTP as the engine uses, in milliseconds, with faults on request.

In a thread (`FakeSGLang`), or as the process that an engine starts (`python fake_sglang.py --port P …`). Every logprob
is `LOGPROB`, so a canary that expects it is right, except under weights from a directory named "wrong". Weights come by
path only: it joins no process group.
"""

import asyncio
import hashlib
import json
import mmap
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

LOGPROB = -1.0
STOP_TOKEN = 1


class FakeSGLang:
    """`hook` is called with every request's path before it is answered and may return another response, or stall it."""

    def __init__(self, version: str = "0.5.23", keepalive_s: float = 5.0, **server_info: Any):
        self.version = version
        self._keepalive_s = keepalive_s  # after so long it closes an idle connection
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.hook: Callable[[str], Any] = lambda path: None
        self.weight_version = "default"
        self.weights_path = ""
        self.num_tokens_now = 0  # what a running request has generated when its weights change
        self.is_paused = False
        self.hold = False  # requests run until they are aborted or this is cleared
        self.info = {
            "version": version,
            "max_req_input_len": 506,
            "device": "cpu",
            "dtype": "float32",
            "tp_size": 1,
            "disable_overlap_schedule": True,
            "disable_radix_cache": False,
            "internal_states": [{"effective_max_running_requests_per_dp": 9}],
        } | server_info
        self._changes: dict[str, list[tuple[str, int]]] = {}  # by request: version and first token of each span
        self._aborted: set[str] = set()

    # --- the description ---

    @property
    def _is_old(self) -> bool:
        return tuple(map(int, self.version.split("."))) < (0, 5, 19)

    def _schema(self) -> dict[str, Any]:
        minor = int(self.version.split(".")[2])

        def call(*fields: str) -> dict[str, Any]:
            schema = {"properties": {field: {} for field in fields}}
            return {"post": {"requestBody": {"content": {"application/json": {"schema": schema}}}}}

        paths = {
            "/generate": call("input_ids", *(["extra_key"] if minor >= 4 else [])),
            "/pause_generation": call(*(["mode"] if minor >= 6 else [])),
            "/update_weights_from_disk": call("model_path"),
        }
        paths |= {"/begin_weight_update": call()} if minor >= 21 else {}
        paths |= {"/v1/loads": call()} if minor >= 21 else {}
        paths |= {"/server_info": call()} if minor >= 19 else {"/get_server_info": call()}
        return {"paths": paths, "components": {"schemas": {}}}

    # --- answers ---

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.method == "POST" else {}
        self.calls.append((request.path, body))
        fault = self.hook(request.path)
        if asyncio.iscoroutine(fault):
            fault = await fault
        if fault == "disconnect":
            assert request.transport is not None
            request.transport.close()
        if isinstance(fault, int):
            return web.json_response({"message": "scripted"}, status=fault)
        match request.path:
            case "/openapi.json":
                return web.json_response(self._schema())
            case "/server_info" | "/get_server_info":
                return web.json_response(self.info)
            case "/v1/loads":
                load = {"num_running_reqs": len(self._changes), "num_waiting_reqs": 0, "token_usage": 0.25}
                return web.json_response({"loads": [load | {"gen_throughput": 10.0}]})
            case "/pause_generation":
                self.is_paused = True
            case "/continue_generation":
                self.is_paused = False
            case "/update_weights_from_disk":
                self._update(body)
            case "/abort_request":
                self._aborted |= set(self._changes) if body.get("abort_all") else {body["rid"]}
            case "/generate":
                return web.json_response(await self._generate(body))
        return web.json_response({})

    def _update(self, body: dict[str, Any]) -> None:
        assert self.is_paused
        self.weights_path = str((Path(body["model_path"]) / "model.safetensors").resolve())
        self.weight_version = body["weight_version"]
        for changes in self._changes.values():
            changes.append((self.weight_version, self.num_tokens_now))

    async def _generate(self, body: dict[str, Any]) -> dict[str, Any]:
        rid, sampling = body.get("rid", ""), body["sampling_params"]
        logprob = -5.0 if Path(self.weights_path).parent.name == "wrong" else LOGPROB
        if sampling["max_new_tokens"] == 0:
            scored = [[None, body["input_ids"][0], None]] + [[logprob, i, None] for i in body["input_ids"][1:]]
            return {"meta_info": {"input_token_logprobs": scored, "finish_reason": {"type": "length"}}}
        self._changes[rid] = [(self.weight_version, 0)]
        while (self.hold or self.is_paused) and rid not in self._aborted:
            await asyncio.sleep(0.005)
        changes = self._changes.pop(rid)
        n = sampling["max_new_tokens"]
        meta: dict[str, Any] = {
            "finish_reason": {"type": "abort" if rid in self._aborted else "length"},
            "output_token_logprobs": [[logprob, 3 + i % 4, None] for i in range(n)],
            "weight_version": self.weight_version,
            "cached_tokens": 0,
        }
        if not self._is_old:
            meta["weight_versions"] = [{"version": v, "start": s} for v, s in changes]
        self._aborted.discard(rid)
        return {"meta_info": meta}

    # --- running it ---

    async def _serve(self, port: int) -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1, keepalive_timeout=self._keepalive_s)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port)
        await site.start()
        return runner, runner.addresses[0][1]

    def start(self) -> str:
        """Serve from a thread until `stop`; returns the URL."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._runner, port = asyncio.run_coroutine_threadsafe(self._serve(0), self._loop).result(10)
        return f"http://127.0.0.1:{port}"

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def num_calls(self, path: str) -> int:
        return sum(p == path for p, _ in self.calls)


def segments_of(model_dir: Path) -> list[Path]:
    """What server processes of that model have left in /dev/shm."""
    return list(Path("/dev/shm").glob(f"{_segment_prefix(model_dir)}*"))


def _segment_prefix(model_dir: Path) -> str:
    return f"sglang_loads_fake_{hashlib.sha1(str(model_dir).encode()).hexdigest()[:12]}_"


def main() -> None:
    """As a server process, which maps shared memory and never removes it, as SGLang does.

    A file faults.json beside the model, `{"exit": why}`, makes it fail at once.
    """
    port = int(sys.argv[sys.argv.index("--port") + 1])
    model_dir = Path(sys.argv[sys.argv.index("--model-path") + 1])
    if (faults := model_dir / "faults.json").is_file():
        print(f"RuntimeError: {json.loads(faults.read_text())['exit']}")
        sys.exit(3)
    segment = Path("/dev/shm", f"{_segment_prefix(model_dir)}{os.getpid()}.shm")
    segment.write_bytes(bytes(4096))
    with segment.open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), 0)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(FakeSGLang()._serve(port))
    loop.run_forever()
    mapped.close()


if __name__ == "__main__":
    main()
