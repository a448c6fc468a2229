"""The coordinator's parts on their own: credit, batches, ledger, checkpoints, staleness rules, wire checks."""

import math
import struct

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pipeline import checkpoints, staleness
from pipeline.coordinator.batcher import Batcher, BatcherState
from pipeline.coordinator.book import BookState
from pipeline.coordinator.credit import CreditQueue
from pipeline.coordinator.journal import Journal
from pipeline.errors import NguError, OtherVersion, WireError
from pipeline.ledger import TURN_ENDS, TURN_SEEN, Ledger
from pipeline.manifest import write_manifest
from pipeline.messages import (
    Group,
    Rollout,
    SamplingParams,
    Verdict,
    VersionSpan,
    Work,
    pack_ids,
    pack_logprobs,
)
from pipeline.soundness import are_sound
from samplers.base import Problem

PROBLEM = Problem("p", "list", "1?", "1", "easy")


def rollout(attempt_id=1, versions=(0,), n=3, logprobs=None) -> Rollout:
    spans = tuple(VersionSpan(i, v) for i, v in enumerate(versions)) if n else ()
    packed = pack_logprobs([-1.0] * n if logprobs is None else logprobs)
    return Rollout(attempt_id, 1, 0, pack_ids([1]), pack_ids(range(n)), packed, spans, "stop", "", "e", 0, 0)


def group(*rollouts: Rollout) -> Group:
    verdicts = tuple(Verdict("correct", 1.0) for _ in rollouts)
    n = len(rollouts)
    return Group(1, PROBLEM, rollouts, verdicts, tuple(range(n)), (1.0,) * n, (n,))


def work(attempt_id: int) -> Work:
    return Work(attempt_id, 1, 0, PROBLEM, SamplingParams(1.0, 8))


# --- credit ---


@given(st.lists(st.integers(0, 3), max_size=80), st.integers(1, 4))
def test_no_peer_ever_holds_more_than_its_slots_and_order_is_kept(script, slots):
    queue: CreditQueue[int] = CreditQueue()
    queue.add_peer("a", slots)
    held: list[int] = []
    handed: list[int] = []
    for i, action in enumerate(script):
        if action:
            queue.put(i, i)
        elif held:
            assert queue.done(held.pop(0), "a")
        new = queue.assign().get("a", [])
        held += new
        handed += new
        assert len(held) == queue.num_held <= slots
        assert queue.num_waiting == 0 or len(held) == slots
    assert handed == sorted(handed)


def test_what_a_lost_peer_held_is_returned_and_urgent_items_go_first():
    queue: CreditQueue[str] = CreditQueue()
    queue.add_peer("a", 1)
    queue.put(1, "first")
    queue.put(2, "second")
    assert queue.assign() == {"a": ["first"]}
    assert queue.remove_peer("a") == {1: "first"}
    assert not queue.done(1, "a")
    queue.put(1, "first", urgent=True)
    queue.add_peer("b", 2)
    assert queue.assign() == {"b": ["first", "second"]}
    assert not queue.done(1, "a") and not queue.done(2, "a"), "they are with another"
    assert queue.discard({1}) == {"b": [1]}
    assert queue.num_held == 1


# --- batches ---


def test_by_attempts_filtered_rounds_count_and_the_surplus_carries_over():
    batcher = Batcher("attempts", 8)
    batcher.add_round(4, None)
    batcher.add_round(6, group(rollout()))
    assert batcher.ready
    assert len(batcher.take()) == 1
    assert batcher.num_waiting == 8 + 2, "the batch in training and the surplus"
    batcher.consumed()
    assert batcher.num_waiting == 2
    batcher.add_round(6, None)
    assert batcher.ready
    assert batcher.take() == []


@pytest.mark.parametrize(("unit", "size"), [("completions", 3), ("groups", 2)])
def test_by_completions_or_groups_only_what_is_trained_counts(unit, size):
    batcher = Batcher(unit, size)
    batcher.add_round(100, None)
    batcher.add_round(4, group(rollout(1), rollout(2)))
    assert not batcher.ready
    batcher.add_round(4, group(rollout(3)))
    assert batcher.ready
    assert len(batcher.take()) == 2


def test_a_restored_batcher_cuts_the_same_batches():
    a = Batcher("attempts", 8)
    for _ in range(3):
        a.add_round(5, group(rollout()))
    a.take()
    b = Batcher("attempts", 8)
    b.restore(a.state())
    a.consumed()
    assert b.num_waiting == a.num_waiting
    for batcher in (a, b):
        batcher.add_round(5, None)
    assert [g.chain_id for g in a.take()] == [g.chain_id for g in b.take()]


# --- staleness ---


def test_room_counts_everything_not_yet_consumed():
    assert staleness.room(max_lag=0, batch_size=8, num_waiting=0, num_in_flight=0) == 8
    assert staleness.room(max_lag=0, batch_size=8, num_waiting=8, num_in_flight=0) == 0, "synchronous while it trains"
    assert staleness.room(max_lag=2, batch_size=8, num_waiting=8, num_in_flight=5) == 11


def test_lag_is_judged_by_the_oldest_token():
    mixed = group(rollout(versions=(5,)), rollout(versions=(2, 5)))
    assert staleness.group_lag(mixed, 6) == 4
    assert staleness.group_lag(group(rollout(n=0)), 6) == 0
    assert staleness.admit(mixed, 6, 3, "correct") is mixed
    assert staleness.admit(mixed, 6, 3, "drop") is None
    assert staleness.admit(mixed, 6, 4, "drop") is mixed
    assert staleness.admit(mixed, 6, 4, "pace") is mixed
    kept = staleness.admit(mixed, 6, 3, "pace")
    assert kept is not None and kept.rollouts == mixed.rollouts[:1] and kept.draw_indices == mixed.draw_indices[:1]
    assert kept.verdicts == mixed.verdicts[:1] and kept.chain_rewards == mixed.chain_rewards
    assert staleness.admit(mixed, 6, 0, "pace") is None


# --- wire checks ---


def test_a_rollout_knows_the_version_of_each_token():
    r = rollout(versions=(3, 4))
    assert r.version_array().tolist() == [3, 4, 4]
    r.check()
    rollout(n=0).check()
    assert are_sound([r, rollout(n=0)], 0) and are_sound([], 0)


@pytest.mark.parametrize(
    "bad",
    [
        rollout(logprobs=[-1.0, math.nan, -1.0]),
        rollout(logprobs=[-1.0, -math.inf, -1.0]),
        rollout(logprobs=[-1.0, 0.5, -1.0]),
        rollout(logprobs=[-1.0, -1.0]),
        rollout(versions=()),
        rollout(versions=(0, 1, 2, 3)),
    ],
    ids=["nan", "inf", "positive", "too few logprobs", "no span", "span past the end"],
)
def test_a_malformed_rollout_is_refused(bad):
    with pytest.raises(WireError, match="attempt 1"):
        bad.check()
    assert not are_sound([rollout(2), bad, rollout(3)], 0)


def test_one_token_that_the_model_does_not_know_among_many_is_found():
    many = [rollout(i) for i in range(9)]
    assert are_sound(many, 3) and not are_sound(many, 2)
    negative = msgspec.structs.replace(many[4], prompt_ids=pack_ids([-1]))
    assert not are_sound([*many, negative], 1 << 20)


# --- ledger ---


def test_an_attempt_ends_once_and_the_counts_are_what_is_stored(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.launch([work(1), work(2), work(3)])
    ledger.end_judged([rollout(1, versions=(0, 1))], [Verdict("correct", 1.0)], "trained", step=1)
    ledger.end([2], "failed")
    ledger.commit()
    assert ledger.stored_counts() == {"open": 1, "trained": 1, "failed": 1}
    assert ledger.num_open == 1
    row = ledger._db.execute("SELECT outcome, oldest_version, newest_version, step FROM attempts WHERE attempt_id=1")
    assert row.fetchone() == ("correct", 0, 1, 1)
    ledger.close()
    again = Ledger(tmp_path / "l.sqlite")
    assert again.num_open == 1
    assert again.next_attempt_id() == 4
    again.close()


def test_a_turn_commits_what_was_launched_and_the_ends_of_a_batch_over_several(tmp_path):
    ledger, num = Ledger(tmp_path / "l.sqlite"), 10 * TURN_ENDS
    ledger.launch([work(i) for i in range(1, num + 1)])
    ledger.commit_turn()
    assert ledger.stored_counts() == {"open": num}
    ended = [rollout(i) for i in range(1, num + 1)]
    ledger.end_judged(ended, [Verdict("correct", 1.0)] * num, "trained", step=1)
    assert ledger.num_open == 0
    left = num
    while left:
        ledger.commit_turn()
        stored = ledger.stored_counts()
        assert stored.get("open", 0) == max(left - TURN_ENDS, 0) and sum(stored.values()) == num
        left = stored.get("open", 0)
    ledger.close()


def test_a_verdict_is_stored_with_the_end_or_on_demand_before_it(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")

    def outcomes() -> list[str | None]:
        return [row[0] for row in ledger._db.execute("SELECT outcome FROM attempts ORDER BY attempt_id")]

    ledger.launch([work(i) for i in (1, 2, 3)])
    ledger.end_judged([rollout(1)], [Verdict("correct", 1.0)], "trained", step=1)
    ledger.commit_turn()
    assert outcomes() == ["correct", None, None]
    ledger.judge([rollout(1), rollout(2)], [Verdict("incorrect", 0.0)] * 2)  # one has ended
    ledger.close()
    ledger = Ledger(tmp_path / "l.sqlite")
    assert outcomes() == ["correct", "incorrect", None]
    assert ledger.stored_counts() == {"trained": 1, "open": 2}
    ledger.close()


def test_what_is_old_is_folded_into_sums_some_with_each_commit(tmp_path):
    ledger, num = Ledger(tmp_path / "l.sqlite"), 3 * TURN_SEEN
    ledger.launch([work(i) for i in range(1, num + 2)])
    ledger.end(range(2, num + 1), "trained", step=1)
    ledger.end([num + 1], "trained", step=2)
    ledger.commit()
    stored = ledger.stored_counts()

    def rows() -> int:
        return ledger._db.execute("SELECT count(*) FROM attempts").fetchone()[0]

    ledger.prune(before_step=2)
    for left in (num + 2 - TURN_SEEN, num + 2 - 2 * TURN_SEEN, 2, 2):
        ledger.commit_turn()
        assert rows() == left and ledger.stored_counts() == stored, "one is open, one is not old"
    ledger.end([1], "failed", step=1)
    ledger.prune(before_step=3)
    ledger.commit_turn()
    assert rows() == 0 and sum(ledger.stored_counts().values()) == num + 1
    ledger.close()


def test_rewind_reopens_what_the_checkpoint_holds_and_cancels_the_rest(tmp_path):
    ledger = Ledger(tmp_path / "l.sqlite")
    ledger.launch([work(i) for i in range(1, 6)])
    ledger.end([1], "trained", step=3)  # before the checkpoint at 3
    ledger.end([2, 3], "trained", step=4)  # after it: 2 was waiting in it, 3 was launched later
    ledger.commit()
    ledger.rewind(step=3, keep=[2, 4])
    assert ledger.stored_counts() == {"trained": 1, "open": 2, "cancelled": 2}
    assert ledger.num_open == 2
    ledger.close()


# --- checkpoints ---


def snapshot(version: int) -> checkpoints.Snapshot:
    batcher = BatcherState([], 0)
    return checkpoints.Snapshot(version, {"launched": 3}, {}, 1.5, {"a": 1}, {}, BookState([], []), batcher, [], 1)


def publish(run_dir, version: int):
    partial = checkpoints.partial_dir(run_dir, version)
    partial.mkdir(parents=True, exist_ok=True)
    write_manifest(partial, [])
    return checkpoints.publish(run_dir, partial, snapshot(version))


@pytest.mark.parametrize("num", [0, 1, 15, 16, 17, 40, (1 << 16) + 1])
def test_a_checkpoint_is_encoded_in_small_pieces_of_the_bytes_that_it_would_be_at_once(num):
    records = {f"p{i}": Verdict("correct", i) for i in range(num)}
    sampler = {"records": records, "waiting": list(range(num)), "few": {"history": [[i] for i in range(num)]}}
    whole = msgspec.structs.replace(snapshot(1), sampler=sampler, pending=[[group()] * (num % 50)])
    made = list(checkpoints.pieces(whole))
    assert b"".join(made) == msgspec.msgpack.encode(whole)
    assert max(map(len, made)) < 10_000


def test_what_another_version_wrote_is_refused_and_not_taken_for_torn(tmp_path):
    path = publish(tmp_path, 1)
    data = msgspec.msgpack.encode(msgspec.to_builtins(snapshot(1)) | {"book": {"rounds": []}})
    (path / "coordinator.msgpack").write_bytes(xxhash.xxh3_64_digest(data) + data)
    with pytest.raises(OtherVersion, match=r"another version of this package .*model\.path="):
        checkpoints.latest(tmp_path)
    journal = Journal(tmp_path / "journal")
    frame = msgspec.msgpack.encode([["settled", 3, None]])
    header = struct.pack("<IQ", len(frame), xxhash.xxh3_64_intdigest(frame))
    (tmp_path / "journal" / "000000").write_bytes(header + frame)
    with pytest.raises(OtherVersion, match="another version of this package"):
        list(journal.replay(0))


def test_the_newest_checkpoints_are_kept_and_read_back(tmp_path):
    assert checkpoints.latest(tmp_path) is None
    paths = [publish(tmp_path, v) for v in (1, 2, 3)]
    assert [p.exists() for p in paths] == [False, True, True]
    assert checkpoints.latest(tmp_path) == paths[-1]
    assert checkpoints.load(paths[-1]) == snapshot(3)
    assert publish(tmp_path, 3) == paths[-1], "the closing checkpoint may repeat the last periodic one"
    for version in (999_999, 1_000_000):
        publish(tmp_path, version)
    assert [p.name for p in checkpoints.published(tmp_path)] == ["step_999999", "step_1000000"]


def test_a_checkpoint_torn_at_any_byte_is_refused_and_the_one_before_is_used(tmp_path):
    older, newer = publish(tmp_path, 1), publish(tmp_path, 2)
    file = newer / "coordinator.msgpack"
    whole = file.read_bytes()
    for cut in range(len(whole)):
        file.write_bytes(whole[:cut])
        with pytest.raises(NguError, match="unusable checkpoint"):
            checkpoints.load(newer)
        assert checkpoints.latest(tmp_path) == older
    file.write_bytes(whole)
    (newer / "learner.manifest").unlink()
    assert checkpoints.latest(tmp_path) == older, "the learner's part counts too"
    checkpoints.partial_dir(tmp_path, 9).mkdir()
    assert checkpoints.latest(tmp_path) == older, "an unfinished checkpoint is never read"
