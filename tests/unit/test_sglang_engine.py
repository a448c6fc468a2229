"""The SGLang engine against a fake server: what goes wrong there, and what the engine makes of it."""

import asyncio
import contextlib
import time

import pytest
import torch
from fake_sglang import LOGPROB, FakeSGLang
from tiny_models import save_model_dir, tiny_model, work

from pipeline.config import EnginesConfig
from pipeline.engines.base import Failure
from pipeline.engines.sglang import client as client_module
from pipeline.engines.sglang import connection as connection_module
from pipeline.engines.sglang import engine as engine_module
from pipeline.engines.sglang.engine import SGLangEngine
from pipeline.engines.sglang.push import buckets_of
from pipeline.engines.sglang.server import AttachedServer
from pipeline.errors import EngineError, WeightError
from pipeline.messages import Interruption, Rollout
from pipeline.tokenization import PromptCodec
from pipeline.weights import WeightPublisher
from pipeline.weights_layout import TensorEntry

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(engine_module, "WATCH_S", 0.05)
    monkeypatch.setattr(engine_module, "BACKOFF_S", (0.0,))
    monkeypatch.setattr(connection_module, "POLL_S", 0.01)


class World:
    """One fake server and one engine attached to it."""

    def __init__(self, directory, **settings):
        self.fake = FakeSGLang(**settings.pop("server", {}))
        self.model_dir = save_model_dir(directory / "model", "qwen2")
        self.publishers = {name: WeightPublisher(directory / name) for name in ("weights", "wrong")}
        self.url = self.fake.start()
        self.codec = PromptCodec(self.model_dir)
        settings = {"hang_s": 5.0, "slots": 4} | settings
        config = EnginesConfig(kind="sglang", urls=(self.url,), push="disk", **settings)
        self.engine = SGLangEngine(config, self.codec, AttachedServer(self.url), "engine-0")

    def notice(self, version, kind="weights", model="qwen2"):
        state = tiny_model(model, version).state_dict()
        return self.publishers[kind].publish(state, version, self.model_dir, [3, 4, 5], [LOGPROB, LOGPROB])

    def load(self, version, kind="weights"):
        return self.engine.load_weights(self.notice(version, kind))

    def step_until(self, count):
        ended, deadline = [], time.monotonic() + 20
        while len(ended) < count:
            assert time.monotonic() < deadline, ended
            ended += self.engine.step()
        return ended

    def wait_for(self, condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            assert self.engine.step() == []

    def until_lost(self):
        with pytest.raises(EngineError) as raised:
            self.step_until(1 << 30)
        assert raised.value.retryable
        assert self.engine.num_in_flight == 0
        return raised.value.message

    def close(self):
        self.engine.close()
        self.fake.stop()
        for publisher in self.publishers.values():
            publisher.close()


@pytest.fixture
def world(tmp_path):
    made = []

    def make(**settings):
        made.append(World(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_attempts_end_once_with_the_servers_tokens_and_spans(world):
    w = world()
    report = w.load(3)
    assert (report.policy_version, report.canary_error, report.is_right) == (3, 0.0, True)
    assert w.engine.slots == 4
    w.engine.submit([work(i, "abc"[: 1 + i % 3], max_new_tokens=5) for i in range(9)])
    w.engine.submit([work(8, "ab"), work(9, ""), work(10, "a", max_new_tokens=600)])
    ended = {e.attempt_id: e for e in w.step_until(11)}
    assert sorted(ended) == list(range(11))
    assert all(isinstance(ended[i], Failure) and not ended[i].retryable for i in (9, 10))
    for i in range(9):
        ended[i].check()
        assert (ended[i].num_tokens, ended[i].finish_reason) == (5, "length")
        assert [(s.start, s.policy_version) for s in ended[i].version_spans] == [(0, 3)]
        assert ended[i].text == w.codec.decode(ended[i].completion_array().tolist())
    stats = w.engine.stats()
    assert (stats["rollouts"], stats["tokens"], stats["update_count"]) == (9, 45, 1)
    w.wait_for(lambda: w.engine.stats().get("cache_used_frac") == 0.25)


def test_an_update_pauses_pushes_and_continues_and_running_requests_get_a_span(world):
    w = world()
    w.load(0)
    w.fake.hold, w.fake.num_tokens_now = True, 2
    w.engine.submit([work(i, "ab", max_new_tokens=6) for i in range(4)])
    w.wait_for(lambda: w.fake.num_calls("/generate") == 5)
    assert w.load(1).stall_s > 0
    control = [path for path, _ in w.fake.calls if path.split("_")[0] in ("/pause", "/update", "/continue")]
    assert control[-3:] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    assert next(b for p, b in w.fake.calls if p == "/pause_generation") == {"mode": "in_place"}
    assert [b["flush_cache"] for p, b in w.fake.calls if p.startswith("/update")] == [False, False]
    w.fake.hold = False
    for rollout in w.step_until(4):
        assert [(s.start, s.policy_version) for s in rollout.version_spans] == [(0, 0), (2, 1)]
    w.engine.submit([work(9, "ab")])
    w.step_until(1)
    keys = [b["extra_key"] for p, b in w.fake.calls if p == "/generate"]
    assert keys == ["canary-0", *["v0"] * 4, "canary-1", "v1"]


def test_recompute_retracts_and_flushes(world):
    w = world(kv="recompute")
    w.load(0)
    assert next(b for p, b in w.fake.calls if p == "/pause_generation") == {"mode": "retract"}
    assert next(b for p, b in w.fake.calls if p.startswith("/update"))["flush_cache"] is True


def test_a_server_that_reports_no_spans_gets_the_oldest_label(world):
    w = world(server={"version": "0.5.6"})
    w.load(0)
    w.fake.hold = True
    w.engine.submit([work(0, "ab", max_new_tokens=6)])
    w.wait_for(lambda: w.fake.num_calls("/generate") == 2)
    w.load(1)
    w.fake.hold = False
    (rollout,) = w.step_until(1)
    assert [(s.start, s.policy_version) for s in rollout.version_spans] == [(0, 0)]


@pytest.mark.parametrize(
    ("server", "says"),
    [
        ({"version": "0.5.5"}, "SGLang 0.5.5 cannot pause"),
        ({"disable_overlap_schedule": False}, "--disable-overlap-schedule"),
        ({"version": "0.5.3"}, "0.5.6 or newer"),
    ],
)
def test_servers_that_cannot_be_trained_with_are_refused_by_name(world, server, says):
    w = world(server=server)
    with pytest.raises(EngineError, match=says) as raised:
        w.load(0)
    assert not raised.value.retryable


def test_slots_are_what_the_server_can_run_less_one_for_the_canary(world):
    w = world(slots=64)
    w.load(0)
    assert w.engine.slots == 8


def test_a_cancelled_attempt_is_ended_at_the_server_too(world):
    w = world()
    w.load(0)
    w.fake.hold = True
    w.engine.submit([work(i, "ab") for i in range(6)])
    w.wait_for(lambda: w.fake.num_calls("/generate") == 5)
    w.engine.cancel([0, 5, 77])
    assert w.engine.num_in_flight == 4
    w.wait_for(lambda: w.fake.num_calls("/abort_request") >= 2)  # one is of the attachment
    w.wait_for(lambda: w.fake.num_calls("/generate") == 6)  # its slot goes to the one that waited
    sent = [b["rid"] for p, b in w.fake.calls if p == "/generate" and "rid" in b]
    assert w.fake.calls and {b["rid"] for p, b in w.fake.calls if p == "/abort_request"} == {"", sent[0]}
    w.fake.hold = False
    assert sorted(r.attempt_id for r in w.step_until(4)) == [1, 2, 3, 4]


def test_an_answer_500_costs_one_attempt_and_three_in_a_row_the_server(world):
    w = world()
    w.load(0)
    left = [1]

    def fail(path):
        if path == "/generate" and left[0]:
            left[0] -= 1
            return 500
        return None

    w.fake.hook = fail
    w.engine.submit([work(0, "ab")])
    (failure,) = w.step_until(1)
    assert isinstance(failure, Failure) and failure.retryable and "500" in failure.reason
    left[0] = 1000
    w.engine.submit([work(i, "ab") for i in range(1, 5)])
    assert "500" in w.until_lost()
    left[0] = 0
    w.load(1)
    w.engine.submit([work(9, "ab")])
    assert isinstance(w.step_until(1)[0], Rollout)


def test_work_after_a_pause_does_not_go_to_a_connection_that_the_server_has_closed(world, monkeypatch):
    monkeypatch.setattr(client_module, "IDLE_S", 0.1)
    w = world(server={"keepalive_s": 0.3})
    w.load(0)
    w.engine.submit([work(0, "ab")])
    assert isinstance(w.step_until(1)[0], Rollout)
    time.sleep(1.0)  # nothing to do: the engine's loop does not run, so it does not see what becomes of its connections
    w.engine.submit([work(i, "ab") for i in range(1, 5)])
    assert all(isinstance(ended, Rollout) for ended in w.step_until(4))


def stall(seconds):
    async def wait():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(seconds)

    return wait()


@pytest.mark.parametrize("path", ["/pause_generation", "/update_weights_from_disk", "/continue_generation"])
def test_a_control_call_that_never_returns_costs_the_server_not_the_run(world, path, monkeypatch):
    monkeypatch.setattr(connection_module, "CONTINUE_S", 0.3)
    w = world(hang_s=0.5)
    w.load(0)
    w.fake.hold = True
    w.engine.submit([work(0, "ab")])
    w.wait_for(lambda: w.fake.num_calls("/generate") == 2)
    w.fake.hook = lambda asked: stall(30) if asked == path else None
    before = w.fake.num_calls("/continue_generation")
    with pytest.raises(EngineError, match=r"within 0\.[35] s") as raised:
        w.load(1)
    assert raised.value.retryable
    assert w.engine.num_in_flight == 0
    assert w.fake.num_calls("/continue_generation") > before  # whatever happened, it was told to go on
    w.fake.hook, w.fake.hold = lambda asked: None, False
    assert w.load(2).is_right
    w.engine.submit([work(1, "ab")])
    assert w.step_until(1)[0].version_spans[0].policy_version == 2


@pytest.mark.parametrize("fault", ["disconnect", 400, 500])
def test_a_push_that_dies_half_way_is_followed_by_continue_and_a_new_start(world, fault):
    w = world()
    w.load(0)
    w.fake.hook = lambda asked: fault if asked == "/update_weights_from_disk" else None
    with pytest.raises(EngineError, match="update_weights_from_disk"):
        w.load(1)
    assert not w.fake.is_paused
    w.fake.hook = lambda asked: None
    assert w.load(2).is_right


def test_a_server_that_stops_generating_is_found_out(world):
    w = world(hang_s=0.4)
    w.load(0)
    w.fake.hold = True
    w.fake.hook = lambda asked: stall(30) if asked == "/health_generate" else None
    w.engine.submit([work(0, "ab")])
    assert "health_generate" in w.until_lost()
    w.fake.hook, w.fake.hold = lambda asked: None, False
    assert w.load(1).is_right


def test_a_wrong_canary_ends_what_ran_and_the_weights_are_loaded_again(world):
    w = world()
    w.load(0)
    w.fake.hold = True
    w.engine.submit([work(i, "ab") for i in range(5)])
    w.wait_for(lambda: w.fake.num_calls("/generate") == 5)
    report = w.load(1, "wrong")
    assert not report.is_right
    assert w.load(1).is_right
    w.fake.hold = False
    ended = w.step_until(5)
    assert sorted(e.attempt_id for e in ended) == list(range(5))
    assert all(isinstance(e, Failure) and e.retryable for e in ended)


def test_weights_of_another_shape_are_refused_before_the_server_hears_of_them(world):
    w = world()
    w.load(0)
    num_calls = len(w.fake.calls)
    with pytest.raises(WeightError, match="tensor"):
        w.engine.load_weights(w.notice(1, model="qwen3"))
    assert not [p for p, _ in w.fake.calls[num_calls:] if "generation" in p or "weights" in p]


def test_a_rollout_whose_prompt_was_cached_under_older_weights_is_not_used(world):
    w = world()
    w.load(5)
    w.fake.weight_version = "6"

    async def cached(body, original=w.fake._generate):
        reply = await original(body)
        reply["meta_info"]["cached_tokens"] = 2
        return reply

    w.fake._generate = cached
    w.engine.submit([work(0, "ab")])
    (failure,) = w.step_until(1)
    assert isinstance(failure, Failure) and "older weights" in failure.reason


def test_a_server_that_was_restarted_behind_our_back_is_found_out(world):
    w = world()
    w.load(5)
    w.fake.weight_version = "default"
    w.engine.submit([work(0, "ab")])
    assert "'default'" in w.until_lost()
    assert w.load(5).is_right


def test_a_request_that_the_server_aborts_goes_on_within_its_budget(world):
    w = world()
    w.load(0)

    async def in_parts(body, original=w.fake._generate):
        part = body | {"sampling_params": {"max_new_tokens": min(3, body["sampling_params"]["max_new_tokens"])}}
        return await original(part)

    w.fake._generate = in_parts
    w.engine.submit([work(0, "ab", max_new_tokens=10)])
    (rollout,) = w.step_until(1)
    assert (rollout.num_tokens, rollout.finish_reason) == (10, "length")
    sent = [b for p, b in w.fake.calls if p == "/generate" and "rid" in b]
    assert [len(b["input_ids"]) for b in sent] == [2, 5, 8, 11]
    assert [b["sampling_params"]["max_new_tokens"] for b in sent] == [10, 7, 4, 1]


def test_continuation_and_interruption(world):
    w = world()
    w.load(0)
    w.engine.submit([work(0, "ab", max_new_tokens=3)])
    (cut,) = w.step_until(1)
    w.load(1)
    interruption = Interruption(position=5, phrase="abc", thought_end="n", answer_tokens=2)
    w.engine.submit([work(1, "ab", 20, prefix=cut.as_prefix(), interruption=interruption)])
    (rollout,) = w.step_until(1)
    rollout.check()
    assert rollout.completion_ids.startswith(cut.completion_ids)
    assert [(s.start, s.policy_version) for s in rollout.version_spans] == [(0, 0), (3, 1)]
    assert [(s.start, s.end) for s in rollout.forced_spans] == [(5, 8)]
    assert rollout.num_tokens == 10
    assert rollout.logprob_array()[5:8].tolist() == [0.0] * 3


def test_a_server_that_never_comes_ends_the_run_with_its_reason(world, monkeypatch):
    monkeypatch.setattr(connection_module, "ATTACH_S", 0.1)
    w = world()
    w.fake.hook = lambda asked: 503
    with pytest.raises(EngineError, match="did not become healthy") as raised:
        w.load(0)
    assert not raised.value.retryable


def test_buckets_are_neighbours_within_the_limit():
    entries = [TensorEntry(str(i), "float32", [1], begin, end) for i, (begin, end) in enumerate([(8, 12), (12, 20)])]
    entries += [TensorEntry("empty", "float32", [0], 20, 20), TensorEntry("large", "float32", [25], 20, 120)]
    assert [[e.name for e in b] for b in buckets_of(entries, 12)] == [["0", "1"], ["large"]]
    assert [[e.name for e in b] for b in buckets_of(entries, 1000)] == [["0", "1", "large"]]
