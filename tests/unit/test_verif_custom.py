"""A user's own reward function: found, called, and never trusted to return what it should."""

import math
from pathlib import Path

import pytest

from pipeline.config import Config, VerifierConfig
from pipeline.errors import ConfigError
from pipeline.messages import PeerFailed, Verdict
from pipeline.remote import command as remote
from pipeline.remote.wire import Welcome
from pipeline.verifiers.custom import CustomVerifier, resolve_reward
from pipeline.verifiers.preflight import resolve_verifier
from samplers.base import Problem

PROBLEM = Problem("p:1", "jsonl", "Say hello", "hello", "easy")


def rewarded_by(tmp_path: Path, body: str, text: str = "hello there") -> Verdict:
    path = tmp_path / "mine.py"
    path.write_text(
        f"import math\nfrom pipeline.messages import Verdict\ndef score(problem, text, truncated):\n    {body}\n"
    )
    return CustomVerifier(f"{path}:score").verify(PROBLEM, text, True)


@pytest.mark.parametrize(
    ("body", "outcome", "reward"),
    [
        ("return 1.0", "correct", 1.0),
        ("return 0.25", "incorrect", 0.25),
        ("return -1", "incorrect", -1.0),
        ("return problem.answer in text", "correct", 1.0),
        ("return float(truncated)", "correct", 1.0),
        ("return len(problem.prompt) / 100", "incorrect", 0.09),
        ("return Verdict('correct', 0.5, detail='half')", "correct", 0.5),
        ("import numpy; return numpy.float32(0.5)", "incorrect", 0.5),
        ("import numpy; return Verdict('correct', numpy.float64(0.5))", "correct", 0.5),
    ],
)
def test_what_it_returns_is_the_reward(tmp_path, body, outcome, reward):
    verdict = rewarded_by(tmp_path, body)
    assert (verdict.outcome, verdict.reward) == (outcome, reward)


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        ("return None", "returned None"),
        ("return math.nan", "returned nan"),
        ("return math.inf", "returned inf"),
        ("return 'much'", "returned 'much'"),
        ("return Verdict('correct', math.nan)", "returned Verdict"),
        ("return Verdict('right', 1.0)", "returned Verdict"),
        ("return Verdict('correct', 'much')", "returned Verdict"),
        ("return Verdict('correct', 1.0, detail=7)", "returned Verdict"),
        ("return 10**400", "returned 1000"),
        ("return chr(0xd800)", "returned '\\ud800'"),
        ("return 1 / 0", "ZeroDivisionError at mine.py:4"),
        ("return text.nothing", "AttributeError at mine.py:4"),
    ],
)
def test_mistakes_are_unknown_and_say_where(tmp_path, body, detail):
    verdict = rewarded_by(tmp_path, body)
    assert verdict.outcome == "unknown" and verdict.reward == 0.0 and detail in verdict.detail
    assert math.isfinite(verdict.reward)


def test_an_importable_module_is_named_with_dots(tmp_path, monkeypatch):
    (tmp_path / "rewards_for_test").mkdir()
    (tmp_path / "rewards_for_test" / "short.py").write_text(
        "def score(problem, text, truncated): return 1 / len(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert resolve_reward("rewards_for_test.short:score") == "rewards_for_test.short:score"
    assert CustomVerifier("rewards_for_test.short:score").verify(PROBLEM, "four", False).reward == 0.25


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("score", "must be written"),
        ("mine.py:", "must be written"),
        ("absent.py:score", "absent.py: no such file"),
        ("no.such.module:score", "cannot import no.such.module: ModuleNotFoundError"),
        ("mine.py:other", "has no function 'other'"),
        ("mine.py:two", r"must be a function of \(problem, text, truncated\)"),
        ("mine.py:VALUE", "must be a function"),
        ("broken.py:score", "cannot import .*broken.py: SyntaxError"),
    ],
)
def test_what_cannot_be_called_is_refused_when_the_run_is_created(tmp_path, monkeypatch, spec, message):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("VALUE = 1\ndef two(problem, text): return 1\n")
    Path("broken.py").write_text("def score(:\n")
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_reward(spec)
    assert "\n" not in caught.value.message


def test_a_relative_file_is_found_from_the_run_directory_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def score(problem, text, truncated): return 1\n")
    config = resolve_verifier(Config(verifier=VerifierConfig(reward="mine.py:score")))
    assert config.verifier.reward == f"{tmp_path}/mine.py:score"
    assert resolve_verifier(Config()) == Config()


class Joined:
    """A remote verifier's socket to a run whose reward is `reward`."""

    def __init__(self, reward: str):
        self._welcome = Welcome("session", "remote0", {"verifier": {"reward": reward}})
        self.sent: list[object] = []
        self.send = self.sent.append
        self.join = lambda: self._welcome
        self.close = lambda: None


def test_another_machine_without_the_function_says_so_instead_of_judging(monkeypatch: pytest.MonkeyPatch):
    socket = Joined("absent.py:score")
    monkeypatch.setattr(remote, "RemoteSocket", lambda *_: socket)
    monkeypatch.setattr(remote.signal, "signal", lambda *_: None)
    with pytest.raises(ConfigError, match=r"absent\.py: no such file"):
        remote.worker(connect="tcp://run:5555", key=Path("worker.key"), role="verifier")
    [failed] = socket.sent
    assert isinstance(failed, PeerFailed) and "absent.py" in failed.reason
