from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def closing() -> Iterator[list[Any]]:
    """Whatever a test puts in is closed after it, the last first."""
    made: list[Any] = []
    yield made
    for thing in reversed(made):
        thing.close()
