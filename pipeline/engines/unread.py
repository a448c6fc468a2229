"""What the rows of a batch have sampled, until their requests are told.

A request is one Python object; telling each of each token would take as long as a tenth of a small model's pass.
"""

from collections.abc import Collection, Sequence

import numpy as np

from pipeline.engines.requests import Request

_AT_MOST = 64  # tokens a row, so that dropping rows moves little however long completions get


class UnreadTokens:
    """One row a running request. `last` int64 [rows] has the token that each row reads next."""

    def __init__(self, eos_ids: Collection[int]):
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int64)
        self._ids = np.empty((0, _AT_MOST), dtype=np.int64)
        self._logprobs = np.empty((0, _AT_MOST), dtype=np.float32)
        self._num = np.empty(0, dtype=np.int64)  # unread, by row
        self._left = np.empty(0, dtype=np.int64)  # tokens until the request wants to look
        self.last = np.empty(0, dtype=np.int64)

    def admit(self, requests: Sequence[Request]) -> None:
        """Append a row for each."""
        num = len(requests)
        self._ids = np.concatenate([self._ids, np.empty((num, _AT_MOST), dtype=np.int64)])
        self._logprobs = np.concatenate([self._logprobs, np.empty((num, _AT_MOST), dtype=np.float32)])
        self._num = np.concatenate([self._num, np.zeros(num, dtype=np.int64)])
        self._left = np.concatenate([self._left, [_left(r) for r in requests]])
        self.last = np.concatenate([self.last, [r.last_token for r in requests]])

    def keep(self, rows: Sequence[int]) -> None:
        """Row i is from now on what was row `rows[i]`."""
        index = np.array(rows, dtype=np.int64)
        self._ids, self._logprobs, self._num = self._ids[index], self._logprobs[index], self._num[index]
        self._left, self.last = self._left[index], self.last[index]

    def add(self, ids: np.ndarray, logprobs: np.ndarray) -> list[int]:
        """One token a row: int64 and float32 [rows]; returns the rows whose requests should look now."""
        rows = np.arange(len(ids))
        self._ids[rows, self._num] = ids
        self._logprobs[rows, self._num] = logprobs
        self._num += 1
        self._left -= 1
        self.last = ids
        return np.flatnonzero((self._left == 0) | (ids[:, None] == self._eos_ids).any(axis=1)).tolist()

    def read(self, row: int, request: Request, policy_version: int) -> None:
        """Hand what is unread to the row's request, all of it sampled under one version."""
        num = self._num[row]
        if not num:
            return
        request.extend(self._ids[row, :num].tolist(), self._logprobs[row, :num].tolist(), policy_version)
        self._num[row] = 0

    def looked(self, row: int, request: Request) -> None:
        """The request has decided what comes next."""
        self.last[row] = request.last_token
        self._left[row] = _left(request)


def _left(request: Request) -> int:
    return min(request.num_until_look, _AT_MOST)
