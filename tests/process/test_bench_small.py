"""Benchmarks at their smallest: every side runs, and each figure is there and is a figure."""

import pytest
from transformers import Qwen2Config

import pipeline.weights
from bench.suite import engine, learner, transport, weights
from bench.suite.base import Row
from bench.suite.engine import EngineBench
from bench.suite.learner import LearnerBench
from bench.suite.transport import TransportBench
from bench.suite.weights import WeightsBench

pytestmark = pytest.mark.timeout(280)  # children import libraries, and the machine may be busy


@pytest.fixture(autouse=True)
def no_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are installed or not: they would take a minute to start."""
    for module in (engine, weights):
        monkeypatch.setattr(module, "start_sglang", lambda model_dir, slots, say, *flags: say("SGLang: not here"))
    for module in (learner, transport):
        monkeypatch.setattr(module, "find_python", lambda *packages: None)


def named(rows: list[Row]) -> dict[str, Row]:
    found = {row.what: row for row in rows}
    assert len(found) == len(rows), "every figure has a name of its own"
    assert all(0 <= row.low <= row.median <= row.high for row in rows)
    return found


def test_transport_measures_every_side_and_names_those_that_are_not_there():
    said: list[str] = []
    rows = named(TransportBench(tokens=(64, 2048), seconds=0.05, repeats=1).run(said.append))
    assert [line.partition(":")[0] for line in said] == [transport.REDIS, transport.RAY]
    for tokens in ("64", "2,048"):
        for side in (transport.OURS, transport.OURS_TOGETHER, transport.RAW, transport.QUEUE):
            assert rows[f"{tokens} tokens, {side}"].median > 0
        ours, raw = rows[f"{tokens} tokens, {transport.OURS}"], rows[f"{tokens} tokens, {transport.RAW}"]
        against = rows[f"{tokens} tokens, against {transport.RAW}"]
        assert against.median == pytest.approx(ours.median / raw.median)
        assert against.at_least == {"64": 0.4, "2,048": 0.8}[tokens]
        together = rows[f"{tokens} tokens, {transport.OURS_TOGETHER}"].median / raw.median
        row = rows[f"{tokens} tokens, {transport.OURS_TOGETHER}, against {transport.RAW} with one"]
        assert row.median == pytest.approx(together) and row.outcome is None
        # Ids, logprobs and text are 11 bytes a token; the rest is small.
        per_token = 1e6 * rows[f"{tokens} tokens, {transport.OURS}: bytes"].median / ours.median
        assert 11 * int(tokens.replace(",", "")) < per_token < 11 * int(tokens.replace(",", "")) + 600


def test_weights_are_timed_by_transfer_and_nothing_is_lost(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    mapped: list[int] = []
    really = pipeline.weights._mapped
    monkeypatch.setattr(pipeline.weights, "_mapped", lambda fd: (mapped.append(fd), really(fd))[1])
    rows = named(WeightsBench(large_mb=3, repeats=2).run(said.append))
    files = 2 * 2 * pipeline.weights.NUM_FILES
    assert len(mapped) == files, "each file of two models and two ways is mapped once, before anything is timed"
    assert said == ["SGLang: not here"] * 2
    lost = [row for what, row in rows.items() if what.endswith("over all loads")]
    assert len(lost) == 4 and all(row.median == 0 and row.outcome == "met" for row in lost)
    small, large = (what.partition(",")[0] for what in rows if what.endswith("memcpy") and "against" not in what)
    for at in (small, large):
        for name in ("shared memory", "disk"):
            publish, loaded, canary, stall = (
                rows[f"{at}, {name}: {part}"] for part in ("publish", "publish to loaded", "canary", "engine stalls")
            )
            assert 0 < publish.median < loaded.high and 0 < canary.median < stall.high
            assert stall.median < loaded.high + canary.high
            per_s, tokens = (
                rows[f"{at}, {name}: decoded before the stall"],
                rows[f"{at}, {name}: not decoded for the stall"],
            )
            least, most = (s * rate / 1e3 for s, rate in ((stall.low, per_s.low), (stall.high, per_s.high)))
            assert 0 < least <= tokens.median <= most
    assert rows[f"{small}, shared memory: publish to loaded, against memcpy"].outcome is None, "few bytes: no target"
    assert rows[f"{large}, shared memory: publish to loaded, against memcpy"].at_most == 3


def test_a_model_of_any_size_has_heads_that_go_into_groups():
    for megabytes in (1, 50, 230, 300, 1000):
        config = weights._large(Qwen2Config(), megabytes)
        assert config.num_key_value_heads and config.num_attention_heads % config.num_key_value_heads == 0
        assert config.hidden_size == 64 * config.num_attention_heads


def test_engine_and_learner_give_a_figure_for_every_side():
    said: list[str] = []
    rows = named(EngineBench(slots=(2, 64), lengths=(72,), batches=(2, 4), repeats=1).run(said.append))
    kinds = {what.removeprefix("72 tokens, ").partition(",")[0] for what in rows}
    assert {"embedded", "transformers engine", "generate"} < kinds
    best = [what for what in rows if what.startswith("72 tokens, generate")]
    assert {what.split(", ")[2] for what in best} == {"dynamic cache", "static cache"}
    fastest, own = (
        max(rows[what].median for what in best),
        max(rows[f"72 tokens, embedded, {n} slots"].median for n in (2, 64)),
    )
    assert rows["72 tokens, embedded against generate, each at its best"].median == pytest.approx(own / fastest)
    assert rows["72 tokens, embedded, 64 slots, of that bound"].median < 1, "no engine is faster than its bound"
    assert 0 < rows["72 tokens, embedded, 64 slots, of the bound of large products"].median < 1
    bounds = [row.median for what, row in rows.items() if "bound at 64 slots" in what]
    assert len(bounds) == 2 and min(bounds) > 0
    assert said[0] == "SGLang: not here"
    said.clear()
    rows = named(LearnerBench(rollouts=16, repeats=1, micro_batch_tokens=()).run(said.append))
    assert [line.partition(":")[0] for line in said] == ["TRL"]
    kinds = "one padded batch", "padded micro-batches of 2048 tokens", "micro-batches of 2048 tokens"
    assert all(rows[f"{kind}: peak memory"].median > 1 for kind in kinds)
    for kind in kinds[1:]:
        speedup = rows[f"{kind}, against one padded batch"]
        assert speedup.median == pytest.approx(rows[kind].median / rows["one padded batch"].median)
