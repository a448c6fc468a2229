"""The measured inputs of a plan."""

import pytest

from bench.planner.measure import line
from pipeline.cli import main


def test_a_line_through_two_points_has_no_negative_part():
    assert line([64.0, 16.0], [0.011, 0.005]) == pytest.approx((0.003, 0.000125))
    assert line([64.0, 16.0], [0.004, 0.005]) == (0.004, 0.0), "noise made more rows faster"
    assert line([2.0, 1.0], [4.0, 1.0]) == (0.0, 3.0), "noise made no rows take less than nothing"
    assert line([1.0, 1.0], [0.5, 0.4]) == (0.4, 0.0), "one slot"


def test_engines_that_serve_elsewhere_are_refused(capsys, tmp_path):
    assert main(["plan", "measure", "engines.kind=sglang", "--out", str(tmp_path / "r.json")]) == 2
    assert "engines of this process" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
