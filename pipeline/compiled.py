"""Functions that numba compiles when their module is imported, which takes seconds, or finds as compiled before.

They are kept beside the module or, where nobody may write there, in the user's cache.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from numba import njit


def compiled(signature: str, **options: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator for arguments of the types of `signature`; `options` are those of `numba.njit`."""

    def of(function: Callable[..., None]) -> Callable[..., None]:
        compile = partial(njit, signature, **options)
        try:
            return compile(cache=True)(function)
        except Exception:  # what is kept is damaged, or there is no folder to write to, or no room in it
            with suppress(Exception):
                njit(cache=True)(function).recompile()  # of no signature yet: it only forgets what is kept
                return compile(cache=True)(function)
            return compile()(function)

    return of
