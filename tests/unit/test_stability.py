"""`ngu stability`: the lag is exact, a course repeats, collapse is told from noise, and a grid can be interrupted."""

from importlib.metadata import EntryPoint
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from bench.files import read_results
from bench.stability import grid, loop
from bench.stability.commands import LAGS, LOSSES, stability
from bench.stability.course import Course, Ending, Evaluated, Stepped, is_hopeless, survives
from bench.stability.grid import Result, make_arms, run_arms
from bench.stability.loop import LaggedLoop, num_batches, run_arm
from bench.stability.report import cells_of, heat_map, markdown
from learner.model import completion_logprobs
from learner.packing import collate
from pipeline import cli
from pipeline.config import Config, load_config
from pipeline.errors import ConfigError

SMALL = (
    "sampler.kind=fixed",
    "sampler.num_rollouts=8",
    "learner.batch_size=48",
    "learner.lr=3e-4",
    "learner.warmup_steps=0",
    "max_steps=5",
    "task.eval_per_level=1",
    "eval.every_steps=2",
    "eval.final_num_rollouts=1",
    "sampling.max_new_tokens=40",
)
PNG = b"\x89PNG"

pytestmark = pytest.mark.timeout(280)  # real courses, and the machine may be busy


def small(*settings: str) -> Config:
    return load_config(None, [*SMALL, *settings])


# --- the loop ---


@pytest.mark.parametrize("sampler", ["fixed", "never_give_up"])
def test_every_token_is_sampled_by_the_version_that_the_lag_says(tmp_path: Path, sampler: str):
    """Each batch is scored again by a copy of the weights it must come from; the neighbours must not fit."""
    own = [] if sampler == "fixed" else ["sampler.kind=never_give_up"]
    looped = LaggedLoop(small("staleness.max_lag=2", "eval.every_steps=0", "max_steps=7", *own), tmp_path)
    learner, step = looped.learner, looped.learner.step
    weights, batches = [{k: v.clone() for k, v in learner.model.state_dict().items()}], []

    def recorded(groups, num_attempts):
        batches.append(groups)
        report = step(groups, num_attempts)
        weights.append({k: v.clone() for k, v in learner.model.state_dict().items()})
        return report

    learner.step = recorded
    course = looped.run()
    assert course.ending == "finished" and len(batches) == len(course.steps) > 3  # some may have nothing to train
    if sampler == "fixed":
        assert [s.lag for s in course.steps] == [0, 1, 2, 2, 2, 2, 2][: len(batches)]
    for number, groups in enumerate(batches):
        rollouts = [r for g in groups for r in g.rollouts]
        claimed = {int(v) for r in rollouts for v in r.version_array()}
        expected = max(0, number - 2)
        # Never Give Up trains a chain with the rollouts of its earlier rounds, which are older.
        assert max(claimed) == expected and (claimed == {expected} or sampler == "never_give_up")
        for version in claimed:
            assert _error(learner.model, weights[version], rollouts, version) < 1e-4
            assert all(
                _error(learner.model, other, rollouts, version) > 1e-3
                for v, other in enumerate(weights[: number + 1])
                if v != version
            )


def _error(model, weights, rollouts, version: int) -> float:
    model.load_state_dict(weights)
    chosen = [r for r in rollouts if r.oldest_version == version]
    batch = collate([r.prompt_array() for r in chosen], [r.completion_array() for r in chosen])
    with torch.no_grad():
        ours, _ = completion_logprobs(model, batch, 1.0)
    return float(np.abs(ours.numpy() - np.concatenate([r.logprob_array() for r in chosen])).max())


def test_a_course_repeats_and_its_evaluations_do_not_lag():
    config = small("staleness.max_lag=3")
    first, again = run_arm(config), run_arm(config)
    assert msgspec.structs.replace(first, cpu_s=0.0) == msgspec.structs.replace(again, cpu_s=0.0)
    assert [e.batches for e in first.evaluations] == [0, 2, 4, 5]
    assert all(0.0 <= s.reward <= 1.0 and s.grad_norm > 0 and not s.refused for s in first.steps)
    assert first.steps[0].ess == pytest.approx(1.0, abs=1e-6) and first.steps[-1].ess < 0.9999
    # With as many versions of lag as steps every batch is from the start, but what is evaluated is the newest.
    frozen = run_arm(small("staleness.max_lag=9", "learner.lr=0.05"))
    assert frozen.steps[-1].lag == len(frozen.steps) - 1 > 1
    assert frozen.final.overall < 0.2 < frozen.start.overall


def test_a_policy_without_anything_to_learn_from_ends():
    """One token cannot be an answer: no group has variance, no step is ever taken, and the course ends all the same."""
    course = run_arm(small("sampling.max_new_tokens=1"))
    assert course.ending == "finished" and course.steps == []
    assert [e.overall for e in course.evaluations] == [0.0] * 4


def test_a_policy_that_falls_apart_is_a_result():
    course = run_arm(small("learner.lr=1e30"))
    assert course.ending == "failed" and course.reason and not survives(course)
    assert course.evaluations


def test_a_hopeless_policy_is_cut_short(monkeypatch):
    monkeypatch.setattr(loop, "is_hopeless", lambda evaluations: len(evaluations) > 1)
    course = run_arm(small())
    assert course.ending == "collapsed" and "2 of 5" in course.reason
    assert [e.batches for e in course.evaluations] == [0, 2] and len(course.steps) == 2


def test_a_batch_of_groups_weighs_the_rollouts_behind_it(tmp_path):
    """As in a run: `launched` divides by rollouts, and a batch that counts groups holds more of them."""
    looped = LaggedLoop(small("learner.batch_by=groups", "learner.batch_size=2", "max_steps=1"), tmp_path)
    step, attempts = looped.learner.step, []

    def recorded(groups, num_attempts):
        attempts.append(sum(g.num_attempts for g in groups) if num_attempts is None else num_attempts)
        return step(groups, num_attempts)

    looped.learner.step = recorded
    looped.run()
    assert attempts == [16]


def test_both_limits_of_a_run_bound_its_batches():
    assert num_batches(small("max_steps=5", "max_rollouts=144")) == 3
    assert num_batches(small("max_steps=0", "max_rollouts=150")) == 3
    assert num_batches(small("max_steps=5", "max_rollouts=0")) == 5


# --- survival ---


def course(*overall: float, ending: Ending = "finished") -> Course:
    evaluations = [Evaluated(i, rate, rate / 2, {"+1": rate}) for i, rate in enumerate(overall)]
    steps = [Stepped(1, 0.0, 0.5, ess, 1.0, 0.01, 0.0, 0.2, norm, False) for ess, norm in ((1.0, 3.0), (0.9, 1.0))]
    return Course(evaluations, steps, ending, "", 1.0)


@pytest.mark.parametrize(
    ("found", "survived"),
    [
        (course(0.5, 0.9, 0.85), True),
        (course(0.5, 0.9, 0.79), False),  # far below its best
        (course(0.5, 0.45), True),  # learnt nothing, lost nothing
        (course(0.5, 0.39), False),  # far below its start
        (course(0.5, 0.9, ending="failed"), False),
        (course(0.5, 0.9, ending="collapsed"), False),
    ],
)
def test_survival(found: Course, survived: bool):
    assert survives(found) is survived


def test_one_bad_evaluation_is_not_hopeless():
    assert not is_hopeless(course(0.5, 0.1).evaluations)
    assert not is_hopeless(course(0.5, 0.1, 0.3).evaluations)
    assert not is_hopeless(course(0.5, 0.3, 0.1).evaluations)
    assert is_hopeless(course(0.5, 0.8, 0.3, 0.3).evaluations)


# --- the grid ---


def test_arms_cover_the_grid_one_seed_after_the_other():
    arms = make_arms(SMALL, ["cispo", "gspo learner.loss.eps_low=0.004"], [0, 8], [0, 1])
    assert [(a.loss.split()[0], a.config.staleness.max_lag, a.config.seed) for a in arms] == [
        (loss, lag, seed) for seed in (0, 1) for lag in (0, 8) for loss in ("cispo", "gspo")
    ]
    assert msgspec.to_builtins(arms[1].config.learner.loss)["eps_low"] == 0.004
    assert len({a.key for a in arms}) == len(arms)


@pytest.mark.parametrize(
    ("settings", "loss", "words"),
    [
        (SMALL, "cipso", "cipso"),
        (SMALL, "cispo learner.loss.bogus=1", "unknown key 'bogus'"),
        (SMALL, " ", "an empty name"),
        ((*SMALL, "verifier.reward=a.b:c"), "cispo", "without a deadline"),
        (("task.kind=code", "task.path=x"), "cispo", "without a deadline"),
        ((*SMALL, "max_rollouts=8"), "cispo", "nothing to train"),
        ((*SMALL, "engines.kind=fake"), "cispo", "nothing to train"),
    ],
)
def test_a_bad_arm_is_refused_before_any_is_run(settings, loss: str, words: str):
    with pytest.raises(ConfigError, match=words) as error:
        make_arms(settings, ["cispo", loss], [0], [0])
    assert "\n" not in error.value.message


def test_an_interrupted_grid_goes_on(tmp_path: Path, monkeypatch):
    ran: list[int] = []

    def fake_arm(config: Config) -> Course:
        if config.staleness.max_lag == 4 and not ran[2:]:
            ran.append(-1)
            raise KeyboardInterrupt
        ran.append(config.staleness.max_lag)
        return course(0.5, config.staleness.max_lag / 100)

    monkeypatch.setattr(grid, "run_arm", fake_arm)
    arms, out, left = make_arms(SMALL, ["cispo"], [1, 2, 4, 8], [0]), tmp_path / "r.jsonl", []
    with pytest.raises(KeyboardInterrupt):
        run_arms(arms, out, 1, lambda result, num_left: left.append(num_left))
    with out.open("ab") as file:
        file.write(b'{"key":"torn')
    results = run_arms(arms, out, 1, lambda result, num_left: left.append(num_left))
    assert ran == [1, 2, -1, 4, 8] and left == [3, 2, 1, 0]
    assert [r.lag for r in results] == [1, 2, 4, 8] and results == read_results(out, Result)
    monkeypatch.setattr(grid, "run_arm", lambda config: pytest.fail("it is done"))
    assert run_arms(list(reversed(arms)), out, 1, lambda result, num_left: None) == list(reversed(results))


@pytest.mark.timeout(400)  # both import torch, and the machine may be busy
def test_several_processes_give_what_one_gives(tmp_path: Path):
    arms = make_arms([*SMALL, "max_steps=1"], ["cispo", "topr"], [0], [0])
    found = [r.course for r in run_arms(arms, tmp_path / "r.jsonl", 2, lambda result, num_left: None)]
    alone = [run_arm(arm.config) for arm in arms]
    assert [msgspec.structs.replace(c, cpu_s=0.0) for c in found] == [
        msgspec.structs.replace(c, cpu_s=0.0) for c in alone
    ]


# --- the report ---


def results() -> list[Result]:
    found = {
        ("cispo", 0): [course(0.5, 0.9), course(0.5, 0.7)],
        ("cispo", 4): [course(0.5, 0.9), course(0.5, 0.9, 0.1)],
        ("gspo", 0): [course(0.5, 0.6)],
    }
    return [Result("k", loss, lag, 0, one) for (loss, lag), courses in found.items() for one in courses]


def test_the_tables_say_who_survived_and_where_they_ended():
    cells = cells_of(results())
    assert cells["cispo", 4].overall_range == (0.1, 0.9) and cells["cispo", 4].hard == pytest.approx(0.25)
    text = markdown(cells)
    assert "| loss | lag 0 | lag 4 |" in text
    assert "| cispo | 2/2 .80 (.40) | 1/2 .50 (.25) |" in text
    assert "| gspo | 1/1 .60 (.30) | - |" in text
    assert "| cispo | 0.900 0.0100 |" in text and "| gspo | 3 |" in text


def test_the_heat_map_marks_what_did_not_survive():
    panels = heat_map(cells_of(results())).axes
    assert [p.get_title(loc="left") for p in panels] == ["overall pass@1 at the end", "hard pass@1 at the end"]
    assert [t.get_text() for t in panels[0].texts] == [".80", ".50\n1/2", ".60"]
    assert len(panels[0].patches) == 1
    assert panels[0].images[0].get_array().tolist()[0] == [pytest.approx(0.8), pytest.approx(0.5)]


# --- the verb ---


def test_the_verb_runs_a_grid_and_draws_it(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(grid, "run_arm", lambda config: course(0.5, 0.6))
    (tmp_path / "run.toml").write_text("max_rollouts = 640\n")
    out, plot = tmp_path / "r.jsonl", tmp_path / "p.png"
    settings = (str(tmp_path / "run.toml"), "learner.batch_size=64")
    assert stability(*settings, losses=("ppo",), lags=(0, 2), seeds=(3,), out=out, plot=plot) == 0
    printed = capsys.readouterr()
    assert "| ppo | 1/1 .60 (.30) | 1/1 .60 (.30) |" in printed.out
    assert "ppo, lag 2, seed 3: finished, overall 0.50 to 0.60 (1 core-seconds); 0 left, 0 min" in printed.err
    assert plot.read_bytes().startswith(PNG) and len(read_results(out, Result)) == 2
    monkeypatch.setattr(grid, "run_arm", lambda config: pytest.fail("--no-run"))
    with out.open("ab") as file:
        file.write(b'{"key":"being written')
    before = out.read_bytes()
    wider = {"losses": ("ppo", "topr"), "lags": (0, 2), "seeds": (3,), "out": out, "plot": plot, "run": False}
    assert stability(*settings, **wider) == 0
    assert "| ppo | 1/1 .60 (.30) | 1/1 .60 (.30) |" in capsys.readouterr().out and out.read_bytes() == before
    with pytest.raises(ConfigError, match="holds no result"):
        stability(*settings, **(wider | {"losses": ("topr",)}))


def test_the_verb_is_part_of_ngu_and_refuses_nonsense(tmp_path: Path, capsys, monkeypatch):
    verb = EntryPoint("stability", "bench.stability.commands:stability", cli.GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: [verb])
    assert cli.main(["stability", "--losses", "cispo", "cispo", "--out", str(tmp_path / "r")]) == 2
    assert cli.main(["stability", "a.toml", "b.toml"]) == 2
    assert cli.main(["stability", "--losses", "cipso", "ppo", "--lags", "0", "1"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and "--losses" in errors[0] and "one config file" in errors[1] and "cipso" in errors[2]
    assert len(set(LOSSES)) == 8 and all(a < b for a, b in pairwise(LAGS))
