"""The measured inputs of a plan."""

import pytest

from bench.planner.measure import line, step_rates
from pipeline.cli import main


def test_a_line_through_two_points_has_no_negative_part():
    assert line([64.0, 16.0], [0.011, 0.005]) == pytest.approx((0.003, 0.000125))
    assert line([64.0, 16.0], [0.004, 0.005]) == (0.004, 0.0), "noise made more rows faster"
    assert line([2.0, 1.0], [4.0, 1.0]) == (0.0, 3.0), "noise made no rows take less than nothing"
    assert line([1.0, 1.0], [0.5, 0.4]) == (0.4, 0.0), "one slot"


def test_the_rates_of_a_step_are_told_apart():
    rows, read = [64, 64, 16, 16, 40], [0, 3, 0, 2, 7]
    assert step_rates(rows, read, [0.002 + 1e-4 * h + 5e-4 * p for h, p in zip(rows, read, strict=True)]) == (
        pytest.approx((0.002, 1e-4, 5e-4))
    )
    assert min(step_rates(rows, read, [0.005 - 1e-5 * h - 1e-4 * p for h, p in zip(rows, read, strict=True)])) == 0.0


def test_engines_that_serve_elsewhere_are_refused(capsys, tmp_path):
    assert main(["plan", "measure", "engines.kind=sglang", "--out", str(tmp_path / "r.json")]) == 2
    assert "engines of this process" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
