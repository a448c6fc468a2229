"""The closed forms, and that the check of sampler and advantages against them can fail."""

import msgspec
import numpy as np
import pytest

from bench.lab import check as check_module
from bench.lab import closed_forms
from bench.lab.check import check


def test_sampler_and_advantages_agree_with_the_closed_forms():
    rows = list(check(num_chains=700))
    assert len(rows) > 60
    assert [row for row in rows if not row.is_right] == []
    assert len(msgspec.json.decode(msgspec.json.encode(rows))) == len(rows)


def test_the_published_weights():
    weights = closed_forms.round_weights(0.01, round_size=4, p_ngu=0.9, keep_rounds=2)
    assert weights["predictable"] == pytest.approx(29.53, abs=0.005)
    # These were published as Monte-Carlo estimates of 400,000 chains, good to about 0.07.
    for name, expected in (("centered", 27.37), ("anchored, kept", 27.37), ("not rescaled, kept", 27.22)):
        assert weights[name] == pytest.approx(expected, abs=0.15)
    assert weights["own baseline, kept"] == pytest.approx(25.42, abs=0.15)
    assert weights["standardized / N"] == pytest.approx(6.98, abs=0.04)
    assert weights["centered / N"] == pytest.approx(1.97, abs=0.02)


def test_single_weights_at_the_rare_end():
    p = 1e-4
    weights = closed_forms.single_weights(p)
    assert weights["centered / N"] == pytest.approx(np.log(1 / p) - np.pi**2 / 6, rel=0.01)
    assert weights["standardized / N"] == pytest.approx((np.pi / p) ** 0.5, rel=0.02)
    assert weights["leave-one-out / N"] == pytest.approx(np.log(1 / p) - 1, rel=0.01)


def test_doubling_to_the_first_round_is_a_fixed_group():
    assert closed_forms.doubling(0.3, 4, 4) == {"E[N]": 4.0, "P(accept)": pytest.approx(1 - 0.7**4)}


@pytest.mark.parametrize("broken", ["advantages", "sampler"])
def test_a_fault_is_found(monkeypatch, broken: str):
    if broken == "advantages":
        real = check_module.chain_advantages
        monkeypatch.setattr(check_module, "chain_advantages", lambda *a, **k: 1.1 * real(*a, **k))
    else:
        monkeypatch.setattr("samplers.never_give_up.uniform", lambda *key: 0.0)  # always another round
    monkeypatch.setattr(check_module, "PASS_RATES", (0.2,))
    monkeypatch.setattr(check_module, "SINGLE_PASS_RATES", (0.3,))
    off = {row.name for row in check(num_chains=4000) if not row.is_right}
    assert ("w(p), centered" in off) if broken == "advantages" else ({"E[N]", "P(accept)"} <= off)
