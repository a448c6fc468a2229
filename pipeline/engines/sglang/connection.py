"""One server from start to end: waiting until it is healthy, updating its weights, starting it again."""

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable

import msgspec

from pipeline.config import EnginesConfig
from pipeline.engines.base import CANARY_TOLERANCE, LoadReport
from pipeline.engines.sglang.capabilities import Capabilities, read_capabilities
from pipeline.engines.sglang.client import Client
from pipeline.engines.sglang.push import DiskPusher, GroupPusher, Pusher, PushKind, WeightsFile, choose_push
from pipeline.engines.sglang.server import Server
from pipeline.errors import EngineError

# A large model on several GPUs loads and captures its graphs for minutes; a server that is said to run answers soon.
START_S = 900.0
ATTACH_S = 60.0
HEALTHY_S = 30.0
POLL_S = 0.2
CONTINUE_S = 10.0
# In bfloat16 a rare token's logprob is off by tenths; a wrong tensor moves the whole prompt by nats.
BFLOAT16_TOLERANCE = 0.5
PAUSE_MODES = {"keep": "in_place", "recompute": "retract"}


class Phases(msgspec.Struct):
    """How many weight updates there were, and the seconds that they have spent in each of their phases."""

    count: int = 0
    pause_s: float = 0.0
    push_s: float = 0.0
    continue_s: float = 0.0
    canary_s: float = 0.0


class Connection:
    """Calls that the engine makes of its server as a whole; belongs to the engine's event loop."""

    def __init__(self, server: Server, config: EnginesConfig, num_spare_gpus: int):
        self._server = server
        self._config = config
        self._num_spare_gpus = num_spare_gpus
        self._client: Client | None = None
        self._capabilities: Capabilities | None = None
        self._pusher: Pusher | None = None
        self._group_failed = False
        self.phases = Phases()

    @property
    def is_open(self) -> bool:
        return self._capabilities is not None

    @property
    def client(self) -> Client:
        assert self._client is not None
        return self._client

    @property
    def capabilities(self) -> Capabilities:
        assert self._capabilities is not None
        return self._capabilities

    def why_dead(self, wait_s: float = 0.0) -> str:
        return self._server.why_dead(wait_s)

    async def open(self) -> None:
        """Start the server if it is ours and return when it has generated a token; raises EngineError."""
        self._server.start()
        self._client = Client(self._server.url)
        limit_s = START_S if self._server.is_owned else ATTACH_S
        try:
            async with asyncio.timeout(limit_s):
                # Whoever used it before may have died in the middle of an update.
                await self._until_answered("/model_info", "/get_model_info")
                if not self._server.is_owned:
                    await self._client.post("/continue_generation", {}, CONTINUE_S)
                await self._until_answered("/health_generate")
                capabilities = await read_capabilities(self._client)
                if not self._server.is_owned:
                    await self._abort_all()
                    if capabilities.has_sessions:
                        with contextlib.suppress(EngineError):  # refused when none is open
                            await self._client.post("/end_weight_update", {}, CONTINUE_S)
        except TimeoutError:
            raise EngineError(f"{self._server.url} did not become healthy within {limit_s:g} s") from None
        self._server.settle()
        self._capabilities = capabilities

    async def _until_answered(self, *paths: str) -> None:
        """Return when one of `paths` answers with success; the caller bounds the time."""
        while True:
            for path in paths:
                with contextlib.suppress(EngineError):
                    await self.client.get(path, HEALTHY_S)
                    return
            if reason := self._server.why_dead():
                raise EngineError(reason)
            await asyncio.sleep(POLL_S)

    async def shut(self) -> None:
        """Forget everything about the server, and end it if it is ours, else what it runs. `open` may follow."""
        if self.is_open and not self._server.is_owned:
            with contextlib.suppress(EngineError):
                await self._abort_all()
        self._capabilities = None
        self._drop_pusher()
        if self._client is not None:
            await self._client.close()
            self._client = None
        self._server.stop()

    async def update(self, weights: WeightsFile, canary_ids: list[int], canary_logprobs: list[float]) -> LoadReport:
        """Pause, push, continue, and hold the canary against the learner's logprobs.

        Raises EngineError when any of it fails; the server then holds nobody knows what. It was told to continue.
        """
        try:
            async with asyncio.timeout(self._config.hang_s):
                pusher = self._pusher or await self._make_pusher()
                self._pusher = pusher
                start = time.perf_counter()
                await self._push_paused(pusher, weights)
                stall_s = time.perf_counter() - start
                error = await self._canary_error(canary_ids, canary_logprobs, weights.notice.policy_version)
            self._server.settle()  # some shared memory is made with the first work
        except TimeoutError:
            raise EngineError(
                f"{self._server.url} did not finish a weight update within {self._config.hang_s:g} s (engines.hang_s)"
            ) from None
        self.phases.count += 1
        canary_s = time.perf_counter() - start - stall_s
        self.phases.canary_s += canary_s
        tolerance = CANARY_TOLERANCE if self.capabilities.is_float32 else BFLOAT16_TOLERANCE
        return LoadReport(weights.notice.policy_version, stall_s, error, tolerance, canary_s)

    async def _push_paused(self, pusher: Pusher, weights: WeightsFile) -> None:
        times = [time.perf_counter()]
        recompute = self._config.kv == "recompute"
        try:
            await self.client.post("/pause_generation", {"mode": PAUSE_MODES[self._config.kv]}, None)
            times.append(time.perf_counter())
            # With requests that keep their cache a flush is refused, or ends the server, by version.
            await pusher.push(weights, flush=recompute)
            times.append(time.perf_counter())
        except BaseException:
            with contextlib.suppress(EngineError):
                await self.client.post("/continue_generation", {}, CONTINUE_S)
            raise
        await self.client.post("/continue_generation", {}, CONTINUE_S)
        times.append(time.perf_counter())
        self.phases.pause_s += times[1] - times[0]
        self.phases.push_s += times[2] - times[1]
        self.phases.continue_s += times[3] - times[2]

    async def _make_pusher(self) -> Pusher:
        kind: PushKind | str = self._config.push
        if kind == "auto":
            kind = "disk" if self._group_failed else choose_push(self.capabilities, self._num_spare_gpus)
        if kind == "disk":
            return DiskPusher(self.client)
        backend = "nccl" if kind == "nccl" else "gloo"
        try:
            return await GroupPusher.connect(self.client, self.capabilities, backend, self._config.hang_s)
        except BaseException:
            # The server may wait for the group for half an hour, so it is started again: with a file, if it sees ours.
            self._group_failed = self._server.is_owned
            raise

    async def _canary_error(self, ids: list[int], expected: list[float], version: int) -> float:
        """The largest absolute difference to `expected`; infinite when a logprob is not a number."""
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        reply = await self.client.post("/generate", body | self.cache_key(f"canary-{version}"), None)
        found: Iterable[float | None] = (entry[0] for entry in reply["meta_info"]["input_token_logprobs"][1:])
        errors = [math.inf if a is None else abs(a - b) for a, b in zip(found, expected, strict=True)]
        return max(math.inf if math.isnan(e) else e for e in errors)

    def cache_key(self, name: str) -> dict[str, str]:
        """A field that keeps a request from the cached prompts of requests under another name."""
        return {"extra_key": name} if self.capabilities.has_cache_keys else {}

    async def distrust(self) -> None:
        """After weights that arrived wrong: no request goes on, and the next ones come whole, from the file."""
        await self._abort_all()
        self._drop_pusher()
        if self._server.is_owned:
            self._pusher = DiskPusher(self.client)

    async def _abort_all(self) -> None:
        await self.client.post("/abort_request", {"rid": "", "abort_all": True}, CONTINUE_S)

    def _drop_pusher(self) -> None:
        if self._pusher is not None:
            self._pusher.close()
            self._pusher = None
