"""Endless shuffled passes over `num_items` indices; where they stand is two integers."""

import random

from pipeline.errors import ConfigError


class ShuffledPasses:
    """Pass number `epoch` is a permutation that depends on the seed and the epoch alone."""

    def __init__(self, num_items: int, seed: int):
        self._num_items = num_items
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._permutation()

    def next_index(self) -> int:
        if self._position == self._num_items:
            self._epoch += 1
            self._position = 0
            self._order = self._permutation()
        self._position += 1
        return self._order[self._position - 1]

    def state(self) -> dict[str, object]:
        return {
            "seed": self._seed,
            "num_items": self._num_items,
            "epoch": self._epoch,
            "position": self._position,
        }

    def restore(self, state: dict[str, object]) -> None:
        """Continue where `state` was taken; raises ConfigError when it belongs to other data or another seed."""
        if (state["seed"], state["num_items"]) != (self._seed, self._num_items):
            raise ConfigError(
                f"the checkpoint's task has {state['num_items']} problems and seed {state['seed']}, this one has "
                f"{self._num_items} and seed {self._seed}: resume with the run's own data and seed"
            )
        self._epoch = int(str(state["epoch"]))
        self._position = int(str(state["position"]))
        self._order = self._permutation()

    def _permutation(self) -> list[int]:
        order = list(range(self._num_items))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(order)
        return order
