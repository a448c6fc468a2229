"""What a load costs an engine in tokens, as `ngu bench weights` counts it."""

import pytest

from bench.suite.busy import SLOTS, Busy, Losses, own_count
from bench.suite.sglang import read_counts
from pipeline.engines.base import LoadReport
from pipeline.engines.fake import FakeEngine, FakeScript
from pipeline.errors import NguError
from pipeline.messages import WeightsNotice, Work

NUM_AGAIN = 5


def notice(policy_version: int) -> WeightsNotice:
    return WeightsNotice(policy_version, "", "", 0, "", b"", b"")


class Aborting(FakeEngine):
    """Ends some requests with each load but the first; runs them again, if asked to."""

    def __init__(self, again: bool):
        super().__init__(SLOTS, 0, script=FakeScript(min_tokens=60, max_tokens=70))
        self._again = again
        self.num_thrown_away = 0

    def load_weights(self, notice: WeightsNotice) -> LoadReport:
        ended = list(self._running.values())[:NUM_AGAIN]
        works: list[Work] = [running.request.work for running in ended]
        self.num_thrown_away += sum(len(running.request.completion_ids) for running in ended)
        self.cancel([work.attempt_id for work in works])
        if self._again:
            self.submit(works)
        return super().load_weights(notice)


@pytest.mark.parametrize("again", [True, False])
def test_what_a_load_aborts_is_counted_as_requests_and_as_tokens(again: bool):
    engine = Aborting(again)
    busy = Busy(engine, notice(1), own_count(engine))
    for version in (2, 3):
        assert busy.pace()[1] > 0
        busy.load(notice(version))
    assert busy.losses() == Losses(0 if again else 2 * NUM_AGAIN, engine.num_thrown_away)
    assert engine.num_thrown_away > 2 * NUM_AGAIN


def test_a_load_that_aborts_nothing_costs_nothing():
    engine = FakeEngine(SLOTS, 0)
    busy = Busy(engine, notice(1), own_count(engine))
    busy.load(notice(2))
    assert busy.losses() == Losses(0, 0)


def test_a_servers_tokens_are_read_by_what_they_were_computed_for():
    text = """# HELP sglang:realtime_tokens_total Total number of tokens processed.
# TYPE sglang:realtime_tokens_total counter
sglang:realtime_tokens_total{engine_type="unified",mode="prefill_compute",model_name="/m",tp_rank="0"} 3744.0
sglang:realtime_tokens_total{engine_type="unified",mode="decode",model_name="/m",tp_rank="0"} 1.2e+06
sglang:generation_tokens_total{engine_type="unified",mode="other",model_name="/m"} 9998.0
"""
    assert read_counts(text) == {"prefill_compute": 3744, "decode": 1_200_000}
    with pytest.raises(NguError, match="just sglang"):
        read_counts(text.replace("realtime", "other"))
