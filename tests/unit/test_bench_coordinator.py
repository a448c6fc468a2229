"""The benchmarks of the coordinator and the ledger measure the real ones, and say so in figures with their targets."""

from bench.suite import coordinator
from bench.suite.coordinator import CoordinatorBench
from bench.suite.ledger import LedgerBench


def test_a_coordinator_is_measured_under_real_peers(monkeypatch, capsys):
    monkeypatch.setattr(coordinator, "IN_FLIGHT", {64: 64})
    rows = CoordinatorBench(workers=(4,), tokens=(64,), paced_per_s=300, blocks=2, block_s=0.3).run(print)
    found = {(row.what, row.unit): row for row in rows}
    saturated = found["4 workers, 64 tokens, saturated", "attempts/s"]
    assert saturated.median > 0 and saturated.at_least == 50_000
    assert found["4 workers, 64 tokens, saturated", "attempts/core s"].median >= saturated.median
    paced = "4 workers, 300/s asked for"
    assert 0 < found[paced, "attempts/s"].median < 400
    assert 0 < found[paced, "of a core"].median <= 1 and found[paced, "of a core"].at_most == 0.35
    assert found[f"{paced}, round trip p50", "s"].median <= found[f"{paced}, round trip p99", "s"].median < 10
    assert "refused" not in capsys.readouterr().err, "a load that is refused measures nothing"


def test_the_ledger_is_measured_by_rows_a_transaction_and_at_a_rate():
    rows = LedgerBench(rows=(1, 50), paced_per_s=2000, blocks=2, block_s=0.1).run(print)
    assert [row.what for row in rows[:2]] == ["1 a transaction", "50 a transaction"]
    assert all(row.median > 0 for row in rows)
    assert rows[-1].what == "2,000/s, commit p99" and rows[-1].at_most == 0.001
