"""HTTP to one SGLang server: JSON both ways, a deadline on every call, one error type."""

import asyncio
from typing import Any

import aiohttp
import msgspec

from pipeline.errors import EngineError

# Less than the five seconds after which a server closes what is idle: the loop may not run when that happens, and the
# next request would go to a closed connection.
IDLE_S = 2.0


class Client:
    """Belongs to one event loop. Raises EngineError for an error status and when there is no answer.

    It is retryable unless the status is 4xx, which says that the call itself is wrong.
    """

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        # As many connections as there are requests, and no deadline but the one of each call.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_S),
            timeout=aiohttp.ClientTimeout(total=None),
        )

    async def get(self, path: str, deadline_s: float) -> Any:
        return await self._call("GET", path, None, deadline_s)

    async def post(self, path: str, body: dict[str, Any], deadline_s: float | None) -> Any:
        return await self._call("POST", path, body, deadline_s)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, deadline_s: float | None) -> Any:
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"}
        try:
            async with (
                asyncio.timeout(deadline_s),
                self._session.request(method, self.url + path, data=data, headers=headers) as response,
            ):
                answer = await response.read()
                status = response.status
        except TimeoutError:
            raise EngineError(f"{self.url}{path} gave no answer within {deadline_s:g} s") from None
        except aiohttp.ClientError as e:
            raise EngineError(f"{self.url}{path} cannot be reached: {e or type(e).__name__}") from None
        if status >= 400:
            text = " ".join(answer.decode(errors="replace").split())
            raise EngineError(f"{self.url}{path} answered {status}: {text[:300]}", retryable=status >= 500)
        try:
            return msgspec.json.decode(answer) if answer else None
        except msgspec.DecodeError as e:
            raise EngineError(f"{self.url}{path} answered what is not JSON: {e}") from None

    async def close(self) -> None:
        await self._session.close()
