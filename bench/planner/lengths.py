"""How long completions are: measured lengths, or a guess from their mean and their limit."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np

from pipeline.errors import ConfigError

# Of the lengths of reasoning models, as the lag figures of docs/LOG.md assume where nothing was measured.
GUESSED_CV2 = 0.79
NUM_GUESSED = 4096


class Lengths:
    """A sample of lengths in tokens, sorted; `is_measured` is false where it was made up from a mean and a limit."""

    def __init__(self, tokens: np.ndarray, is_measured: bool):
        self.tokens = np.sort(np.asarray(tokens, dtype=np.float64))
        self.is_measured = is_measured
        self.mean = float(self.tokens.mean())
        self.largest = float(self.tokens[-1])
        self.cv2 = float(self.tokens.var() / self.mean**2)

    def expected_max(self, n: float) -> float:
        """The mean of the longest of `n` completions, drawn with replacement."""
        share = np.arange(self.tokens.size + 1) / self.tokens.size
        return float(self.tokens @ np.diff(share**n))

    def draw(self, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
        return np.random.default_rng(seed).choice(self.tokens, shape)


def read_lengths(text: str) -> Lengths:
    """`MEAN,MAX`, a run directory or its ledger, or a file with a number a line. Raises ConfigError."""
    if "," in text:
        return guessed(text)
    path = Path(text)
    if path.is_dir():
        path /= "ledger.sqlite"
    try:
        found = _of_ledger(path) if path.suffix == ".sqlite" else np.loadtxt(path, ndmin=1)
    except (OSError, ValueError, sqlite3.Error) as e:
        raise ConfigError(f"--lengths {text}: not MEAN,MAX, a run, nor a file with a number a line ({e})") from None
    found = found[(found > 0) & np.isfinite(found)]
    if found.size < 2:
        raise ConfigError(f"--lengths {text}: has fewer than two lengths")
    return Lengths(found, is_measured=True)


def _of_ledger(path: Path) -> np.ndarray:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return np.array([n for (n,) in db.execute("SELECT num_tokens FROM attempts WHERE num_tokens > 0")], float)


def guessed(text: str) -> Lengths:
    """Log-normal lengths of that mean, cut off at the limit."""
    try:
        mean, most = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--lengths {text}: expected MEAN,MAX in tokens, as in 1357,8192") from None
    if not 1 <= mean <= most < np.inf:
        raise ConfigError(f"--lengths {text}: the mean is at least 1 and at most the limit, which is finite")
    from scipy.stats import norm

    sigma = np.sqrt(np.log1p(GUESSED_CV2))
    spread = np.exp(sigma * norm.ppf((np.arange(NUM_GUESSED) + 0.5) / NUM_GUESSED))
    scale = mean / spread.mean()
    for _ in range(50):  # cutting off shortens the mean: stretch until it is the one asked for
        scale *= mean / np.minimum(scale * spread, most).mean()
    return Lengths(np.maximum(np.minimum(scale * spread, most), 1), is_measured=False)
