"""IsoCompute: records, the recovery of a known n*(C), what it refuses to claim, and plans."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.scaling.isocompute import REWARD_BIN, IsoFit, fit_isocompute, record_breaking
from bench.scaling.isocompute_check import NS, World
from bench.scaling.isocompute_report import IsoReport, sentences
from bench.scaling.plan import make_plan
from bench.scaling.sensitivity import Sensitivity, sensitivity
from bench.scaling.sweep import Sweep, restrict
from pipeline.config import load_config
from pipeline.errors import ConfigError
from samplers.fixed import FixedConfig
from samplers.isocompute import IsoComputeConfig, isocompute_rollouts

WORLD = World(128, 6e4, 2.0)


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    return WORLD.sweep(np.random.default_rng(0))


@pytest.fixture(scope="module")
def fit(sweep: Sweep) -> IsoFit:
    return fit_isocompute(sweep, 100, np.random.default_rng(1))


def report(fit: IsoFit, b_problem: int | None = None, batch: int | None = None) -> IsoReport:
    return IsoReport(["sweep.csv"], "reward", b_problem, batch, 100, 0, fit, Sensitivity(1.0, None, None), [])


@settings(max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.data())
def test_records_are_the_first_points_in_a_higher_bin(rewards: list[float], data: st.DataObject):
    included = data.draw(st.lists(st.booleans(), min_size=len(rewards), max_size=len(rewards)))
    best, expected = -1, []
    for reward, there in zip(rewards, included, strict=True):
        own = int(np.floor(reward / REWARD_BIN + 1e-9))
        expected.append(there and own > best)
        if there:
            best = max(best, own)
    found = record_breaking(np.array(rewards), np.array([included, [True] * len(rewards)]))
    assert found[0].tolist() == expected
    assert found[1, 0]


def test_the_synthetic_world_is_what_it_says():
    """The n that maximises the reward, searched on a fine grid, is the sigmoid asked for."""
    fine = 2 ** np.linspace(3, 9, 1201)
    compute = np.geomspace(3e3, 1e6, 7)
    best = fine[WORLD.reward(fine[:, None], compute).argmax(0)]
    expected = 2 ** (3 + 4 / (1 + (6e4 / compute) ** (2 / np.log(10))))
    np.testing.assert_allclose(best, expected, rtol=0.01)


def test_a_known_n_star_is_recovered(fit: IsoFit):
    assert fit.n_min == 8
    for estimate, truth in ((fit.n_sat, 128), (fit.c0, 6e4), (fit.k, 2.0)):
        assert estimate.low <= truth <= estimate.high
        assert estimate.value == pytest.approx(truth, rel=0.4)
    assert fit.grows_frac == 1.0
    assert fit.saturation.observed
    assert [c.num_runs for c in fit.curves] == [6] * len(NS)
    assert all(c.compute_per_rollout == pytest.approx(1.0, rel=0.1) for c in fit.curves)


def test_dips_do_not_bend_the_curves(fit: IsoFit):
    """A twentieth of the evaluations lost 0.15 at once; a fit to all points would be several hundredths too low."""
    for point in fit.frontier[::9]:
        truth = WORLD.reward(np.array(NS)[:, None], np.array([point.compute])).max()
        assert point.reward.value == pytest.approx(truth, abs=0.015)


@pytest.mark.parametrize(
    ("world", "ns", "reason"),
    [
        (World(2048, 1e6, 2.0), NS, ""),
        (WORLD, NS[:5], "n = 128"),
        (WORLD, NS[:3], "is the best at the largest compute"),
    ],
)
def test_saturation_that_was_not_observed_is_not_reported(world: World, ns: tuple[int, ...], reason: str):
    found = fit_isocompute(world.sweep(np.random.default_rng(3), ns), 60, np.random.default_rng(0))
    assert not found.saturation.observed
    assert reason in found.saturation.reason
    says = sentences(found, Sensitivity(1.0, None, None), "any batch")
    assert any("Saturation was not observed" in line for line in says)
    assert not any("saturates at" in line for line in says)


def test_a_flat_sweep_shows_no_growth():
    rng = np.random.default_rng(0)
    compute = np.tile(np.geomspace(1e3, 1e6, 25), 6)
    n = np.repeat([8, 8, 16, 16, 32, 32], 25)
    reward = 0.1 + 0.5 / (1 + (2e4 / compute)) - 0.01 * np.log2(n) + rng.normal(0, 0.003, len(n))
    run = np.repeat(np.arange(6), 25)
    flat = Sweep(run, np.full(150, 32), n, np.arange(150) + 1, compute, reward, 0.1).in_order()
    found = fit_isocompute(flat, 100, rng)
    assert found.grows_frac < 0.95
    assert "does not show that n*(C) grows" in sentences(found, sensitivity(flat), "any batch")[0]


def test_a_curve_ends_where_its_records_end():
    """Runs that stop improving early: a curve through the records alone would go on rising."""
    compute = np.geomspace(1e3, 1e5, 20)
    steps = 0.1 + 0.1 * np.minimum(np.arange(20), 6)
    rows = [(run, 8 << (run // 2), c, r) for run in range(6) for c, r in zip(compute, steps, strict=True)]
    run, n, at, reward = (np.array(column) for column in zip(*rows, strict=True))
    flat = Sweep(run, np.full(120, 8), n, np.ones(120, int), at.astype(float), reward, None).in_order()
    found = fit_isocompute(flat, 60, np.random.default_rng(0))
    assert found.frontier[-1].reward.value == pytest.approx(0.7, abs=0.06)
    assert [c.num_records for c in found.curves] == [7] * 3


def test_single_runs_show_neither_growth_nor_saturation(sweep: Sweep):
    one = sweep.where((sweep.run % 6) == 0)
    found = fit_isocompute(one, 60, np.random.default_rng(0))
    assert [c.num_runs for c in found.curves] == [1] * len(NS)
    says = sentences(found, Sensitivity(1.0, None, None), "any batch")
    assert "does not show that n*(C) grows" in says[0] and "a single run" in says[1]


def test_fixed_problems_or_fixed_batch(sweep: Sweep):
    assert set(restrict(sweep, 32, None).b_problem) == {32}
    with pytest.raises(ConfigError, match="b_problem = 99: 0 values of n, at least 3"):
        restrict(sweep, 99, None)
    with pytest.raises(ConfigError, match="exclude each other"):
        restrict(sweep, 32, 1024)
    with pytest.raises(ConfigError, match="the sweep has 256, 512"):
        restrict(sweep, None, 1024)


def test_too_few_records_are_an_error(sweep: Sweep):
    start_only = sweep.where(sweep.compute < 1300)
    with pytest.raises(ConfigError, match="only 0 values of n have 3 record-breaking points"):
        fit_isocompute(start_only, 50, np.random.default_rng(0))


def test_sensitivity_by_hand():
    # n = 8 reaches 0.4 and 0.5 with 16 and 32 problems, n = 16 reaches 0.6 and 0.5; beyond compute 100 nothing counts.
    rows = [
        (0, 16, 8, 100, 0.4),
        (1, 32, 8, 100, 0.5),
        (2, 16, 16, 100, 0.6),
        (3, 32, 16, 100, 0.5),
        (3, 32, 16, 200, 0.9),
    ]
    run, b_problem, n, compute, reward = (np.array(column) for column in zip(*rows, strict=True))
    found = sensitivity(Sweep(run, b_problem, n, np.ones(5, int), compute.astype(float), reward, None))
    assert found.compute == 100
    assert found.n == pytest.approx((0.2 / 0.5 + 0.0) / 2)
    assert found.b_problem == pytest.approx((0.1 / 0.45 + 0.1 / 0.55) / 2)


def test_a_run_cut_short_does_not_shorten_the_comparison():
    rows = [(0, 8, 100, 0.4), (0, 8, 200, 0.5), (1, 8, 100, 0.3), (2, 16, 100, 0.4), (2, 16, 200, 0.6)]
    run, n, compute, reward = (np.array(column) for column in zip(*rows, strict=True))
    found = sensitivity(Sweep(run, np.full(5, 16), n, np.ones(5, int), compute.astype(float), reward, None))
    assert found.compute == 200 and found.n == pytest.approx(0.2 / 0.5)


def test_a_plan_within_the_sweep(fit: IsoFit):
    plan = make_plan(report(fit), 1e6, 1e-6)
    assert plan.n in (64, 128)
    assert plan.b_problem in (32, 128)
    assert plan.num_steps * plan.n * plan.b_problem == pytest.approx(1e6, rel=0.05)
    assert plan.lr == pytest.approx(1e-6 * np.sqrt(plan.n * plan.b_problem / 1024))
    run = load_config(None, plan.settings)
    assert run.learner.scaled_lr == plan.lr and run.max_steps == plan.num_steps
    assert run.learner.batch_size == plan.n * plan.b_problem and run.sampler == FixedConfig(plan.n)
    assert plan.n_star.low <= plan.n_star.value <= plan.n_star.high
    assert not plan.extrapolates
    assert plan.says == []
    sampler = load_config(None, plan.growing).sampler
    assert isinstance(sampler, IsoComputeConfig)
    for compute in (1e3, 6e4, 3e6):
        assert isocompute_rollouts(sampler, int(compute)) == pytest.approx(2 ** fit.log2_n_star(compute).value, abs=0.6)


def test_a_plan_beyond_the_sweep_says_so(fit: IsoFit):
    plan = make_plan(report(fit), 3e8, 1e-6)
    assert plan.extrapolates
    assert "100.0 times beyond the largest compute" in plan.says[0]
    with pytest.raises(ConfigError, match="one step of 32 problems x 8 rollouts costs"):
        make_plan(report(fit, b_problem=32), 5.0, 1e-6)


def test_a_plan_keeps_what_the_fit_held_fixed(fit: IsoFit):
    assert make_plan(report(fit, b_problem=48), 1e6, 1e-6).b_problem == 48
    plan = make_plan(report(fit, batch=4096), 1e6, 1e-6)
    assert plan.n * plan.b_problem == 4096


def test_a_fit_survives_being_saved(fit: IsoFit):
    assert msgspec.json.decode(msgspec.json.encode(report(fit)), type=IsoReport) == report(fit)
