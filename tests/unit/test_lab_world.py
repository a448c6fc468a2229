"""The lab's simulation: populations, the policy, and the pipeline on a virtual clock."""

from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from bench.lab.config import LabConfig, LearningConfig, LengthsConfig, load_lab_config
from bench.lab.policy import Policy, gradient, rollout_weights
from bench.lab.population import Population, make_population
from bench.lab.runner import simulate, simulate_all, with_seeds
from bench.lab.tally import Report
from pipeline.errors import ConfigError
from pipeline.learner_config import Aggregation

SMALL = ["max_rollouts=1500", "learner.batch_size=64", "lab.population.kind=levels", "lab.population.num_problems=100"]
STILL = ["lab.learning.level=0", "lab.learning.shared=0"]


def config(*settings: str) -> LabConfig:
    return load_lab_config(None, [*SMALL, *settings])


def population(*settings: str) -> Population:
    loaded = config(*settings)
    return make_population(loaded.lab, loaded.seed)


def report(*settings: str) -> Report:
    return simulate(config(*settings))


def test_the_same_seed_gives_the_same_report_and_another_seed_another():
    assert report() == report()
    assert report("seed=1") != report()


def test_reports_do_not_depend_on_the_number_of_processes():
    configs = with_seeds(config("max_rollouts=300"), 2)
    assert dict(simulate_all(configs, jobs=2)) == dict(simulate_all(configs, jobs=1))


@pytest.mark.parametrize("kind", ["levels", "beta", "log_uniform", "two_point", "ladder"])
def test_rates_are_probabilities_and_the_last_rung_is_right(kind: str):
    made = population(f"lab.population.kind={kind}", "lab.population.num_problems=100")
    assert len(made.problems) == len({p.problem_id for p in made.problems}) == 100
    assert np.all(made.rates > 0) and np.allclose(made.rates.sum(axis=1), 1)
    assert np.all(np.diff(made.rewards) > 0) and made.rewards[-1] == 1


def test_harder_problems_get_longer_completions():
    made = population("lab.population.kind=log_uniform", "lab.lengths.harder=2")
    by_rate = np.argsort(made.pass_rates)
    assert np.all(np.diff(made.median_tokens[by_rate]) < 0)


def test_a_level_gets_its_share_of_the_problems():
    made = population("lab.population.levels={a=[1, 0.5], b=[3, 0.1]}", "lab.population.spread=0")
    assert sum(p.level == "b" for p in made.problems) == 75
    assert np.allclose(sorted(set(made.pass_rates)), [0.1, 0.5])


def test_a_ladder_has_the_pass_rate_it_was_given_and_pays_as_told():
    settings = "lab.population.kind=ladder", "lab.population.num_tests=4", "lab.population.steepness=1"
    made = population(*settings, "lab.population.low=0.0081", "lab.population.high=0.0081")
    at_least = made.rates[0][::-1].cumsum()[::-1]
    assert np.allclose(at_least, 0.3 ** np.arange(5))
    assert made.rewards.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert population(*settings, "lab.population.reward=all_pass").rewards.tolist() == [0, 0, 0, 0, 1]
    assert population(*settings, "lab.population.reward=mixed").rewards.tolist() == [0, 0.125, 0.25, 0.375, 1]


@pytest.mark.parametrize("name", ["rates.csv", "rates.jsonl"])
def test_a_file_of_pass_rates(tmp_path: Path, name: str):
    rows = {"rates.csv": "problem_id,pass_rate,level,tokens\na,0,x,10\nb,0.5,y,20\n"}
    rows["rates.jsonl"] = '{"problem_id":"a","pass_rate":0,"level":"x","tokens":10}\n' + (
        '{"problem_id":"b","pass_rate":0.5,"level":"y","tokens":20}\n'
    )
    path = tmp_path / name
    path.write_text(rows[name])
    made = make_population(
        load_lab_config(None, ["lab.population.kind=file", f"lab.population.path={path}", "lab.lengths.spread=0"]).lab,
        seed=0,
    )
    assert [(p.problem_id, p.level) for p in made.problems] == [("a", "x"), ("b", "y")]
    assert np.allclose(made.pass_rates, [0, 0.5], atol=1e-5)
    assert made.median_tokens.tolist() == [10, 20]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("problem_id,rate\na,1\n", "missing column pass_rate"),
        ("problem_id,pass_rate\na,1\nb,1.5\n", "row 2: pass_rate is 1.5"),
        ("problem_id,pass_rate\na,much\n", "row 1: pass_rate is 'much'"),
        ("problem_id,pass_rate\na,1\na,0\n", "'a' appears twice"),
        ("problem_id,pass_rate\n", "no rows"),
    ],
)
def test_a_bad_file_of_pass_rates_is_one_line(tmp_path: Path, text: str, words: str):
    path = tmp_path / "rates.csv"
    path.write_text(text)
    loaded = load_lab_config(None, ["lab.population.kind=file", f"lab.population.path={path}"])
    with pytest.raises(ConfigError, match=words) as error:
        make_population(loaded.lab, 0)
    assert "\n" not in error.value.message and str(path) in error.value.message


def test_the_gradient_moves_a_pass_rate_by_the_score():
    made = population()
    rates = made.rates[:2]
    found = gradient(rates, np.array([0, 0, 1]), np.array([1, 0, 1]), np.array([2.0, -1.0, 0.5]))
    p, r = rates[0, 1], rates[1, 1]
    assert np.allclose(found[:, 1], [2 * (1 - p) + 1 * p, 0.5 * (1 - r)])
    assert np.allclose(found.sum(axis=1), 0)


def test_a_step_reaches_the_problem_its_level_and_all_others_as_told():
    made = population("lab.population.levels={a=[1, 0.5], b=[1, 0.5]}", "lab.population.spread=0")
    trained, neighbour, stranger = 0, 1, 99
    gradient_ = np.array([[-1.0, 1.0]])
    for learning, risen in (
        (LearningConfig(own=1, level=0, shared=0), [True, False, False]),
        (LearningConfig(own=0, level=1, shared=0), [True, True, False]),
        (LearningConfig(own=0, level=0, shared=1), [True, True, True]),
    ):
        policy = Policy(made, learning)
        policy.step(gradient_, np.array([trained]))
        after = policy.pass_rates[[trained, neighbour, stranger]]
        assert (after > 0.5 + 1e-9).tolist() == risen


def test_the_scale_of_an_estimator_does_not_speed_it_up():
    made = population()
    after = []
    for scale in (1.0, 1000.0):
        policy = Policy(made, LearningConfig())
        for sign in (1.0, 1.0, -0.5):
            policy.step(scale * sign * np.array([[-1.0, 1.0]]), np.array([3]))
        after.append(policy.pass_rates)
    assert np.allclose(*after)


@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_loss_weights_are_the_learners(aggregation: Aggregation):
    from learner.losses import rollout_normalizers

    tokens, group = np.array([3, 10, 7, 0, 20]), np.array([0, 0, 1, 1, 1])
    tokens = np.maximum(tokens, 1)  # the lab has no empty completions
    learner = rollout_normalizers(tokens, group, aggregation, num_attempts=int(tokens.sum())) * tokens.sum()
    assert np.allclose(rollout_weights(tokens, group, 2, aggregation), learner)


@pytest.mark.parametrize(
    "settings",
    [
        ["sampler.kind=fixed"],
        ["sampler.kind=never_give_up", "staleness.max_lag=0"],
        ["sampler.kind=knapsack", "learner.batch_by=groups", "learner.batch_size=8"],
        ["sampler.kind=speed", "learner.batch_by=completions"],
        ["staleness.max_lag=1", "staleness.policy=drop", "engines.slots=256"],
        ["max_rollouts=0", "max_steps=5"],
        ["sampler.history.retire_at=0.05", "sampler.history.retire_min_attempts=1"],
    ],
)
def test_every_kind_of_run_comes_to_its_end(settings: list[str]):
    found = report(*settings)
    limit = config(*settings)
    assert found.rollouts > 0 and found.steps > 0
    assert not limit.max_steps or found.steps == limit.max_steps
    assert not limit.max_rollouts or found.rollouts < limit.max_rollouts + 130
    assert sum(level["launched"] for level in found.levels.values()) == found.rollouts
    assert found.hard_solved <= found.solved <= found.visited <= found.num_problems
    assert 0 <= found.trained_frac + found.wasted_right_frac + found.wasted_wrong_frac <= 1 + 1e-9
    assert [p.step for p in found.curve] == sorted(p.step for p in found.curve)


def test_without_learning_the_policy_stays_as_it_is():
    found = report(*STILL)
    assert found.curve[0].pass_rate == pytest.approx(found.end.pass_rate)
    assert report().end.pass_rate > found.end.pass_rate


def test_synchronous_runs_have_no_lag_and_take_longer():
    at_once, ahead = (report(f"staleness.max_lag={lag}", "sampler.kind=fixed") for lag in (0, 2))
    assert at_once.lag_mean == 0 < ahead.lag_mean
    assert at_once.seconds > ahead.seconds


def test_long_completions_are_cut_and_none_that_is_cut_is_right():
    lengths = LengthsConfig(median_tokens=1000, spread=0, harder=0)
    loaded = config("sampling.max_new_tokens=50", *STILL)
    loaded = msgspec.structs.replace(loaded, lab=msgspec.structs.replace(loaded.lab, lengths=lengths))
    found = simulate(loaded)
    assert found.tokens == 50 * found.rollouts


def test_the_weight_of_fixed_groups_is_what_theory_says():
    """Centered over n fixed rollouts, summed: w(p) = n - 1 at every p; groups without variance add nothing to it."""
    settings = "sampler.kind=fixed", "sampler.num_rollouts=8", "learner.advantage.kind=centered", "max_rollouts=40000"
    found = report(*settings, *STILL, "lab.population.kind=two_point", "lab.population.hard=0.2", "engines.slots=8")
    assert len(found.bins) == 2
    for b in found.bins:
        assert abs(b.weight - 7) < 4 * b.weight_se
        p = b.pass_rate
        assert b.trained / b.visits == pytest.approx(1 - p**8 - (1 - p) ** 8, abs=0.03)


def test_credit_for_the_best_changes_graded_rewards_only():
    ladder = ["lab.population.kind=ladder", "lab.population.num_problems=50"]
    assert report(*ladder, "learner.advantage.credit=best") != report(*ladder)
    assert report("learner.advantage.credit=best") == report()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("lab.lenghts.spread=1", "did you mean 'lengths'"),
        ("lab.lengths.sprad=1", "did you mean 'spread'"),
        ("lab.population.kind=bogus", "lab.population"),
        ("lab.hard_below=1", "lab.hard_below"),
        ("lab.population.num_problems=5", "'kind' is missing"),
    ],
)
def test_bad_settings_name_their_place(setting: str, words: str):
    with pytest.raises(ConfigError, match=words) as error:
        load_lab_config(None, [setting])
    assert "\n" not in error.value.message


def test_a_population_of_no_levels_is_refused():
    with pytest.raises(ConfigError, match="at least one level"):
        load_lab_config(None, ["lab.population.kind=levels", "lab.population.levels={}"])
