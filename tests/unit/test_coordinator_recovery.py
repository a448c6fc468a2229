"""kill -9 of a whole run at any moment, and what the next life makes of it: nothing lost, nothing trained twice."""

import itertools
import os
import random
import shutil
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from fakes import Simulation
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from pipeline import checkpoints
from pipeline.checkpoints import latest, load, partial_dir
from pipeline.config import Config, parse_config
from pipeline.coordinator import journal, saving
from pipeline.coordinator.book import Result
from pipeline.coordinator.journal import FRAME_ITEMS, Journal, Judged, Stepped
from pipeline.coordinator.lineage import NotKept
from pipeline.coordinator.status import describe
from pipeline.engines.fake import FakeScript
from pipeline.errors import NguError
from pipeline.ledger_cli import ledger as ledger_verb
from pipeline.messages import Batch, Heartbeat, Rollout, SetLearningRate, Verdict, pack_ids

Moment = Literal["turn", "commit", "copy", "publish", "drop"]
MOMENTS: tuple[Moment, ...] = ("turn", "commit", "copy", "publish", "drop")
SAVE_TURNS = 60  # that writing a checkpoint takes where it takes long: a step takes 40
REWARD = "generated/reward_mean"
SCRIPT = FakeScript(lambda problem: 0.6 if problem.level == "easy" else 0.05, fail_frac=0.02)


CONTINUED = {"sampling": {"max_new_tokens": 5}, "sampler": {"seq_multiplier": 3}}
INTERRUPTED = {"sampling": {"interruption": {"min_tokens": 4, "max_tokens": 9, "answer_tokens": 3}}}


class Crash(Exception):
    pass


def crash(*args: object, **more: object) -> None:
    raise Crash


def config(seed: int = 0, **changes: Any) -> Config:
    raw = {
        "seed": seed,
        "max_rollouts": 320,
        "engines": {"slots": 8},
        "learner": {"batch_size": 32},
        "eval": {"every_steps": 3, "final_num_rollouts": 1},
        "daemon": {"checkpoint_every_steps": 3},
    }
    return parse_config(raw | changes, "test")


def books_balance(path: Path) -> bool:
    (path / "config.json").write_text("{}")  # all that makes it a run for the verb
    return ledger_verb(path, verify=True) == 0


def held(run: Simulation) -> set[int]:
    """Attempts that are judged and neither dropped nor safe in a checkpoint's weights."""
    flow, batch = run.coordinator.flow, run.coordinator.lineage.training
    waiting = {result.rollout.attempt_id for result in flow.waiting()}
    return waiting | {r.attempt_id for g in (batch.groups if batch else ()) for r in g.rollouts}


def ids(groups: Any) -> list[int]:
    return [r.attempt_id for g in groups for r in g.rollouts]


class Lives:
    """One run over several processes' lives; `trained` is its lineage, the attempts of each step."""

    def __init__(self, path: Path, cfg: Config, deaths: random.Random | None = None, save_turns: int = 0):
        self.path, self.cfg, self.deaths, self.save_turns = path, cfg, deaths, save_turns
        self.trained: dict[int, list[int]] = {}
        self.run = self._start()

    def _start(self) -> Simulation:
        self.base_path = latest(self.path)
        run = Simulation(self.path, self.cfg, script=SCRIPT, resume=self.base_path, save_turns=self.save_turns)
        run.check_books()
        self.base = run.version
        return run

    def turn(self) -> None:
        """With `deaths`, the learner alone dies now and then, and is away for some turns."""
        if self.deaths is not None and self.deaths.random() < 0.1:
            if "learner" in self.run.alive:
                self.run.kill_learner()
            else:
                self.run.start_learner()
        newest = self.run.coordinator.policy_version
        self.run.turn()
        assert self.run.coordinator.policy_version >= newest

    def live(self, num_turns: int, moment: Moment) -> None:
        """Run for `num_turns`, then crash at the next `moment`, and start again; stops early when the run ends."""
        with pytest.MonkeyPatch.context() as patch:
            for turn in range(num_turns + 400):
                if self.run.coordinator.ended:
                    break
                if turn >= num_turns and moment == "commit":
                    patch.setattr(self.run.ledger, "commit_turn", crash)
                elif turn >= num_turns and moment == "copy":
                    patch.setattr(saving, "take_snapshot", crash)
                elif turn >= num_turns and moment == "publish":
                    patch.setattr(checkpoints, "publish", crash)
                elif turn >= num_turns and moment == "drop":
                    patch.setattr(self.run.coordinator.journal, "drop_before", crash)
                elif turn >= num_turns:
                    break
                try:
                    self.turn()
                except Crash:
                    break
                self.run.check_books()
        self._note_batches()

    def start_again(self) -> None:
        before = self.run
        before.ledger._db.close()  # rolls back what was not committed, as a kill does
        self.run = self._start()
        flow, old = self.run.coordinator.flow, before.coordinator.flow
        lost_steps = [a for step, attempts in self.trained.items() if step > self.base for a in attempts]
        assert held(self.run) == held(before) | set(lost_steps)
        assert flow.sampler.state() == old.sampler.state()
        assert flow.book.state() == old.book.state()
        assert flow.batcher.state() == old.batcher.state()
        assert self.run.task.state() == before.task.state()

    def _note_batches(self) -> None:
        for step, batch in self.run.taken:
            attempts = ids(batch.groups)
            assert self.trained.setdefault(step, attempts) == attempts, f"step {step} was trained on something else"

    def finish(self) -> None:
        self.deaths = None
        if "learner" not in self.run.alive:
            self.run.start_learner()
        self.run.run()
        self._note_batches()
        self.run.ledger.close()
        every = [a for attempts in self.trained.values() for a in attempts]
        assert len(every) == len(set(every)), "an attempt was trained twice"
        assert sorted(self.trained) == list(range(1, self.run.version + 1))
        assert books_balance(self.path)


@settings(
    deadline=None,
    max_examples=8,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    lives=st.lists(st.tuples(st.integers(20, 160), st.sampled_from(MOMENTS)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
    changes=st.sampled_from([{}, CONTINUED, INTERRUPTED]),
    save_turns=st.sampled_from([0, SAVE_TURNS]),
)
@example(lives=[(31, "publish")], seed=92, changes=CONTINUED, save_turns=SAVE_TURNS)  # while a turn waits for the disk
def test_after_a_crash_at_any_moment_the_run_goes_on_exactly_where_it_was(
    tmp_path_factory, lives, seed, changes, save_turns
):
    path: Path = tmp_path_factory.mktemp("crash")
    run = Lives(path, config(seed, **changes), save_turns=save_turns)
    for num_turns, moment in lives:
        run.live(num_turns, moment)
        if run.run.coordinator.ended:
            break
        run.start_again()
    run.finish()
    shutil.rmtree(path)


def test_without_a_checkpoint_the_steps_are_trained_again_from_the_start(tmp_path):
    run = Lives(tmp_path, config(daemon={"checkpoint_every_steps": 0}))
    while run.run.version < 3:
        run.live(1, "turn")
    run.start_again()
    assert (run.base, run.base_path) == (0, None)
    assert len(run.run.coordinator.flow.pending) >= 3
    run.finish()


def live_until_torn(run: Lives, version: int) -> None:
    """Until that version, when the newest checkpoint, of step 6, is torn."""
    while run.run.version < version:
        run.live(1, "turn")
    newest = latest(run.path)
    assert newest is not None and newest.name == "step_000006"
    (newest / "coordinator.msgpack").write_bytes(b"torn")


def test_a_torn_newest_checkpoint_costs_only_steps_of_the_learner(tmp_path):
    run = Lives(tmp_path, config())
    live_until_torn(run, 7)
    run.start_again()
    assert run.base == 3
    run.finish()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_checkpoint_saved_once_more_leaves_the_way_on_from_the_one_before_it(tmp_path, is_resumed):
    run = Lives(tmp_path, config())
    while (newest := latest(tmp_path)) is None or newest.name != "step_000006":
        run.live(1, "turn")
    run.run.coordinator.mode = "pause"
    while run.run.version < 7 and run.run.coordinator.lineage.training is not None:
        run.live(1, "turn")
    if is_resumed:
        run.start_again()
        run.run.coordinator.mode = "pause"
        run.live(30, "turn")
    version = run.run.coordinator.policy_version
    for _ in range(3):
        run.run.coordinator.save_requested = True
        run.live(10, "turn")
        assert not run.run.coordinator.save_requested
    newest = latest(tmp_path)
    assert newest is not None and newest.name == f"step_{version:06d}"
    (newest / "coordinator.msgpack").write_bytes(b"torn")
    run.start_again()
    assert 0 < run.base < version
    run.finish()


def test_stopping_while_the_learner_catches_up_keeps_the_batches_it_still_owes(tmp_path):
    run = Lives(tmp_path, config(daemon={"checkpoint_every_steps": 0}))
    while run.run.version < 4:
        run.live(1, "turn")
    run.start_again()
    while run.run.version < 2:
        run.live(1, "turn")
    run.run.coordinator.stop_requested = True
    run.live(50, "turn")
    assert run.run.coordinator.state == "stopped"
    stopped = latest(tmp_path)
    assert stopped is not None and len(load(stopped).pending) >= 1
    run.start_again()
    run.finish()


def test_in_flight_attempts_are_run_again_under_their_own_ids(tmp_path):
    run = Lives(tmp_path, config())
    run.live(80, "turn")
    flying = {a for a, p in run.run.coordinator.flow.book.places.items() if p.work.purpose == "train"}
    assert flying
    run.start_again()
    assert set(run.run.coordinator.flow.book.places) == flying
    run.finish()


# --- the journal's files ---


def entries(directory: Path, serial: int) -> list[int]:
    return [e.policy_version for e in Journal(directory).replay(serial) if isinstance(e, Stepped)]


def segments(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def write(journal: Journal, *versions: int) -> None:
    """Each in a turn of its own."""
    for version in versions:
        journal.write(Stepped(version))
        journal.flush()


def test_a_journal_torn_at_any_byte_gives_the_entries_before_and_goes_on_there(tmp_path):
    journal = Journal(tmp_path / "whole")
    write(journal, 1, 2, 3)
    data = (tmp_path / "whole" / "000000").read_bytes()
    size = len(data) // 3
    for cut in range(len(data)):
        directory = tmp_path / str(cut)
        directory.mkdir()
        (directory / "000000").write_bytes(data[:cut])
        torn = Journal(directory)
        assert [e.policy_version for e in torn.replay(0) if isinstance(e, Stepped)] == [1, 2, 3][: cut // size]
        write(torn, 9)
        assert entries(directory, 0) == [*[1, 2, 3][: cut // size], 9]


@pytest.mark.parametrize("byte", range(0, 24, 3))
def test_a_flipped_byte_ends_the_replay(tmp_path, byte):
    journal = Journal(tmp_path / "j")
    write(journal, 1, 2)
    path = tmp_path / "j" / "000000"
    data = bytearray(path.read_bytes())
    assert byte < len(data)
    data[byte] ^= 0xFF
    path.write_bytes(data)
    assert len(entries(tmp_path / "j", 0)) < 2


def test_a_turn_of_many_entries_is_read_back_whole(tmp_path):
    journal, num = Journal(tmp_path / "j"), 2 * FRAME_ITEMS + 3
    for version in range(num):
        journal.write(Stepped(version))
    journal.flush()
    write(journal, num)
    assert entries(tmp_path / "j", 0) == list(range(num + 1))


def test_long_rollouts_of_one_message_are_in_frames_that_stay_small(tmp_path):
    packed, directory = pack_ids(range(8192)), tmp_path / "j"
    results = [
        Result(Rollout(i, i, 0, b"", packed, packed, (), "stop", "abc" * 8192, "e", 0, 0), Verdict("correct", float(i)))
        for i in range(9)
    ]
    written = Journal(directory)
    written.write(Judged(results))
    written.write(Stepped(1))
    written.flush()
    data, starts = (directory / "000000").read_bytes(), [0]
    while starts[-1] < len(data):
        starts.append(starts[-1] + 12 + int.from_bytes(data[starts[-1] :][:4], "little"))
    assert max(end - start for start, end in itertools.pairwise(starts)) < 3 * 8192 * 12
    *judged, stepped = Journal(directory).replay(0)
    assert [r for entry in judged if isinstance(entry, Judged) for r in entry.results] == results
    assert stepped == Stepped(1)


def test_segments_follow_each_other_and_old_ones_go(tmp_path):
    journal = Journal(tmp_path / "j")
    for version in range(1, 6):
        write(journal, version)
        journal.begin_segment()
        journal.drop_before(journal.serial)
    write(journal, 6)
    assert segments(tmp_path / "j") == ["000004", "000005"]
    assert entries(tmp_path / "j", 4) == [5, 6]
    assert entries(tmp_path / "j", 5) == [6]


def test_segments_of_a_checkpoint_that_was_never_published_stay_with_the_one_before(tmp_path):
    journal = Journal(tmp_path / "j")
    write(journal, 1)
    journal.begin_segment()
    journal.drop_before(1)
    write(journal, 2)
    journal.begin_segment()  # a crash ends the process before this checkpoint is published
    write(journal, 3)
    again = Journal(tmp_path / "j")
    assert len(list(again.replay(1))) == 2
    write(again, 4)
    again.begin_segment()
    again.drop_before(3)
    assert entries(tmp_path / "j", 1) == [2, 3, 4], "the checkpoint before the newest is the one that segment 1 follows"


def test_what_cannot_be_reached_from_the_checkpoint_is_removed(tmp_path):
    journal = Journal(tmp_path / "j")
    for version in range(1, 3):
        write(journal, version)
        journal.begin_segment()
    (tmp_path / "j" / "000000").unlink()
    write(journal, 3)
    assert entries(tmp_path / "j", 0) == [], "its own segment is gone, so the later ones do not follow"
    assert segments(tmp_path / "j") == []


def test_a_journal_of_another_sampler_is_refused_with_what_to_do(tmp_path):
    run = Simulation(tmp_path, config(), script=SCRIPT)
    for _ in range(60):
        run.turn()
    run.ledger.close()
    path = tmp_path / "journal" / "000000"
    kept = list(Journal(tmp_path / "journal").replay(0))
    path.unlink()
    journal = Journal(tmp_path / "journal")
    for entry in kept:
        is_launch = type(entry).__name__ == "Proposed"
        journal.write(msgspec.structs.replace(entry, num_attempts=99) if is_launch else entry)
    journal.flush()
    with pytest.raises(NguError, match="delete RUN/journal"):
        Simulation(tmp_path, config(), script=SCRIPT)


@pytest.mark.parametrize("seed", [int(s) for s in os.environ.get("NGU_CHAOS_SEEDS", "1").split(",")])
def test_chaos_of_twelve_lives(tmp_path, seed):
    """Many crashes in one run, so that recoveries of recoveries are recovered from; `just chaos` tries more seeds."""
    rng = random.Random(seed)
    run = Lives(tmp_path, config(seed, max_rollouts=600), deaths=random.Random(seed))
    for _ in range(12):
        run.save_turns = rng.choice((0, SAVE_TURNS))
        run.live(rng.randrange(5, 40), rng.choice(("turn", "turn", *MOMENTS)))
        if not run.run.coordinator.ended:
            run.start_again()
    run.finish()


def test_without_checkpoints_the_journal_asks_for_one_before_it_grows_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "MAX_SEGMENT_BYTES", 40_000)
    run = Simulation(tmp_path, config(max_rollouts=1200, daemon={"checkpoint_every_steps": 0}), script=SCRIPT)
    sizes = []
    while not run.coordinator.ended:
        run.turn()
        sizes.append(sum(p.stat().st_size for p in (tmp_path / "journal").glob("*")))
    run.ledger.close()
    assert run.coordinator.state == "finished"
    assert max(sizes) < 4 * 40_000, "two segments, each longer by what a step takes"
    assert run.coordinator.journal.serial >= 3


def test_a_checkpoint_is_published_beside_the_steps_that_follow_and_after_all_it_counts_on_is_synced(
    tmp_path, monkeypatch
):
    done: list[str] = []
    synced: list[Path] = []
    publish = checkpoints.publish

    def published(*args: Any) -> Path:
        done.append("published")
        return publish(*args)

    monkeypatch.setattr(saving, "sync", lambda path: done.append(path.name))
    monkeypatch.setattr(checkpoints, "sync", synced.append)
    monkeypatch.setattr(checkpoints, "publish", published)
    run = Simulation(tmp_path, config(), script=SCRIPT, save_turns=SAVE_TURNS)
    newest: dict[int, int] = {}  # published, when the learner came to a step
    while not run.coordinator.ended:
        run.turn()
        path = latest(tmp_path)
        newest.setdefault(run.version, int(path.name[-6:]) if path is not None else 0)
    run.ledger.close()
    assert newest[4] == 0 and newest[9] >= 3, "steps are taken while the first checkpoint is written"
    assert done[:4] == ["ledger.sqlite-wal", "published"] * 2
    whole = partial_dir(tmp_path, 3).with_suffix(".whole")
    parts = {whole / "coordinator.msgpack", whole / "learner.manifest", whole}
    assert set(synced[:3]) == parts and synced[3] == tmp_path / "checkpoints", "all of it before its name, then that"
    assert run.coordinator.state == "finished"
    assert latest(tmp_path) == tmp_path / "checkpoints" / f"step_{run.version:06d}"


# --- a learner that dies alone ---


def test_steps_are_taken_again_with_their_own_learning_rate(tmp_path):
    run = Simulation(tmp_path, config(daemon={"checkpoint_every_steps": 0}), script=SCRIPT)
    for until, lr in ((2, 0.25), (4, 0.5), (6, None)):
        while run.coordinator.policy_version < until:
            run.turn()
        if lr is not None:
            learner = msgspec.structs.replace(run.coordinator.config.learner, lr=lr)
            run.coordinator.reconfigure(msgspec.structs.replace(run.coordinator.config, learner=learner))
    first = [rates[-1] for rates in rates_of_steps(run)]
    assert set(first) == {run.config.learner.lr, 0.25, 0.5}
    run.kill_learner()
    run.sent.clear()
    run.start_learner()
    run.turn()
    assert describe(run.coordinator)["catching_up"] == {"at": 0, "to": 6}
    while run.version < 7:
        run.turn()
    assert describe(run.coordinator)["catching_up"] is None
    again = [rates[-1] for rates in rates_of_steps(run)]
    assert again[:6] == first[:6] and again[6] == 0.5
    run.ledger.close()


def test_what_was_measured_in_a_step_that_its_learner_did_not_survive_is_kept(tmp_path):
    run = Simulation(tmp_path, config(daemon={"checkpoint_every_steps": 0}), script=SCRIPT, step_turns=12)
    while (
        run.version < 2 or run.batch is None or run.batch_left < 4 or REWARD not in run.coordinator.tally.since_step()
    ):
        run.turn()
    run.inbox.append(("learner", Heartbeat({"micro_batches": 7.0, "peak_gib": 79.5})))
    run.turn()
    batch, step = run.batch, run.version + 1
    assert batch is not None
    for _ in range(2):  # the second is still catching up when it dies: of no step that anybody waits for
        run.kill_learner()
        run.start_learner()
        run.turn()
    (record,) = run.sink.of_kind("failure")
    assert (record["step"], record["reason"]) == (step - 1, f"the learner was lost in step {step}")
    metrics = record["metrics"]
    assert (metrics["learner/micro_batches"], metrics["learner/peak_gib"]) == (7.0, 79.5)
    assert metrics["in_step/rollouts"] == len(ids(batch.groups)) and metrics["in_step/groups"] == len(batch.groups)
    assert metrics["in_step/longest_tokens"] > 0 and metrics["in_step/lag_max"] >= 0 and metrics[REWARD] >= 0
    run.run()
    run.ledger.close()
    assert REWARD in run.sink.of_kind("step")[step - 1]["metrics"], "the step has what came before the crash too"
    assert len(run.sink.of_kind("failure")) == 1, "the end of a run is none"


def rates_of_steps(run: Simulation) -> list[list[float]]:
    """Of every batch the learning rates that its learner had been told so far."""
    rates, steps = [run.config.learner.lr], []
    for name, message in run.sent:
        if name == "learner" and isinstance(message, SetLearningRate):
            rates.append(message.lr)
        elif isinstance(message, Batch):
            steps.append(list(rates))
    return steps


def test_a_learner_of_whose_batches_one_is_gone_asks_for_a_restart_of_everything(tmp_path):
    run = Lives(tmp_path, config())
    live_until_torn(run, 8)
    run.run.kill_learner()
    run.run.start_learner()
    with pytest.raises(NotKept, match="stands at step 3 of 8, and batch 4 is kept no more"):
        run.run.turn()
    run.start_again()
    run.finish()


def test_half_a_checkpoint_is_deleted_once_nobody_can_finish_it(tmp_path):
    run = Simulation(tmp_path, config(), script=SCRIPT)
    while run.batch is None or not run.batch.checkpoint:
        run.turn()
    half = partial_dir(tmp_path, run.version)  # which a stop during the step that saves asks for
    half.mkdir(parents=True)
    while latest(tmp_path) is None:
        run.turn()
    assert half.exists(), "its learner lives and writes there"
    run.kill_learner()
    run.start_learner()
    run.turn()
    assert not half.exists()
    run.ledger.close()


@pytest.mark.parametrize("is_back", [False, True])
def test_a_stop_does_not_wait_for_a_learner_that_is_away_or_behind(tmp_path, is_back):
    run = Lives(tmp_path, config())
    while run.run.version < 5:
        run.live(1, "turn")
    run.run.kill_learner()
    if is_back:
        run.run.start_learner()
    run.run.coordinator.stop_requested = True
    run.live(3, "turn")
    assert run.run.coordinator.state == "stopped"
    run.start_again()
    assert run.base == 3
    run.finish()


def test_a_learner_that_dies_before_its_first_word_or_in_the_last_save_costs_nothing(tmp_path):
    run = Simulation(tmp_path, config(daemon={"checkpoint_every_steps": 0}), script=SCRIPT)
    run.kill_learner()
    for _ in range(5):
        run.turn()
    assert run.coordinator.weights is None
    run.start_learner()
    while run.coordinator.state != "stopping":
        run.turn()
    version = run.version
    run.kill_learner()
    for _ in range(5):
        run.turn()
    run.start_learner()
    assert run.version == 0, "there is no checkpoint"
    run.run()
    run.ledger.close()
    assert (run.coordinator.state, run.version) == ("finished", version)
    assert [record["step"] for record in run.sink.of_kind("step")] == list(range(1, version + 1))
    assert books_balance(tmp_path)
