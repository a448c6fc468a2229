"""The soak measures what runs, and calls growth by its name."""

import soak
from soak import CONFIG, SHORT, Sample, Soak, changes, observe

from pipeline.config import parse_config
from pipeline.metrics import open_sinks


def test_a_sample_is_of_real_files_and_attempts(tmp_path):
    sink = open_sinks(tmp_path)
    run = Soak(tmp_path, parse_config(CONFIG, "soak"), script=SHORT, step_turns=1, sink=sink)
    while run.version < 6:
        run.turn()
    sample = observe(run, 0.5)
    run.ledger.close()
    sink.close()
    assert sample.attempts_per_core_s >= sample.attempts_per_s > 0
    assert sample.memory_mib > 10
    assert sample.disk_mib * (1 << 20) > (tmp_path / "ledger.sqlite").stat().st_size


def test_growth_after_the_warm_up_is_seen_and_before_it_is_not():
    warm = [Sample(1.0, 1.0, m, 5.0, 1.0) for m in (1.0, 2.0, 4.0, 9.0)]
    flat, growing = [10.0] * 8, [10.0] * 4 + [11.0] * 4
    for memory, change in ((flat, 0.0), (growing, 0.1)):
        samples = warm + [Sample(1.0, 1.0, m, 5.0, 1.0) for m in memory]
        found = changes(samples)
        assert abs(found["memory_mib"] - change) < 1e-9 and found["disk_mib"] == 0.0
    assert len(samples) == soak.NUM_SAMPLES
