"""Reading curves and sweeps: runs, tables, units, and every wrong input as one clear line."""

import json
from pathlib import Path

import pytest

from bench.scaling.curves import check_recipe, load_recipes
from bench.scaling.sweep import load_sweep
from pipeline.errors import ConfigError


def write_csv(path: Path, header: str, *rows: str) -> Path:
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


def write_run(path: Path, seed: int, lr: float = 1e-4, num_steps: int = 12, every: int = 2) -> Path:
    """A run of 2 engines that spends 100 rollouts, 1,000 tokens and 6 s a step."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"seed": seed, "engines": {"count": 2}, "learner": {"lr": lr}}))

    def rate(step: int) -> float:
        return 0.1 + 0.04 * step + 0.001 * seed

    def evaluation(step: int, phase: str, late: int) -> dict:
        return {
            "kind": "eval",
            "step": step,
            "phase": phase,
            "rollouts": 100 * (step + late),
            "tokens": 1000 * (step + late),
            "mix_pass_at_1": rate(step) + (0.01 if phase == "after" else 0.0),
            "hard_pass_at_1": None,
        }

    records = [evaluation(0, "before", 0)]
    for step in range(1, num_steps + 1):
        spent = {"rollouts": 100 * step, "tokens": 1000 * step, "metrics": {"wall_s": 6.0 * step}}
        records.append({"kind": "step", "step": step, "time": 0.0} | spent)
        if step % every == 0:
            records.append(evaluation(step, "during", 1))
    records.append(evaluation(num_steps, "after", 0))
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


@pytest.mark.parametrize(
    ("unit", "per_step"), [("rollouts", 100.0), ("tokens", 1000.0), ("steps", 1.0), ("core_hours", 6.0 * 3 / 3600)]
)
def test_a_run_is_measured_at_the_compute_of_its_steps(tmp_path: Path, unit, per_step: float):
    """Not at the counters of the evaluation's own record, which were read after it had overlapped with training."""
    (recipe,), found = load_recipes([write_run(tmp_path / "a", 0)], unit, "mix")
    assert found == unit
    assert recipe.compute.tolist() == pytest.approx([per_step * s for s in (2, 4, 6, 8, 10, 12)])
    assert recipe.r0 == pytest.approx(0.1)
    assert recipe.reward[-1] == pytest.approx(0.1 + 0.48 + 0.01), "the evaluation after training is the better one"


def test_runs_that_differ_in_the_seed_alone_are_one_recipe(tmp_path: Path):
    runs = [write_run(tmp_path / name, seed, lr) for name, seed, lr in (("a", 0, 1.0), ("b", 1, 1.0), ("c", 0, 2.0))]
    recipes, unit = load_recipes(runs, None, "mix")
    assert unit == "rollouts"
    assert [(r.name, r.num_seeds, len(r.reward)) for r in recipes] == [("a", 2, 12), ("c", 1, 6)]
    assert recipes[0].r0 == pytest.approx(0.1005)


def test_a_table_of_recipes_and_seeds(tmp_path: Path):
    rows = [f"{name},{seed},{c},{0.1 + c / 100}" for name in "xy" for seed in (3, 4) for c in (0, 10, 20)]
    recipes, unit = load_recipes([write_csv(tmp_path / "t.csv", "recipe,seed,tokens,reward", *rows)], None, "mix")
    assert unit == "tokens"
    assert [r.name for r in recipes] == ["x", "y"]
    assert recipes[0].seed.tolist() == [0, 0, 1, 1]
    assert recipes[0].compute.tolist() == [10, 20, 10, 20]
    assert recipes[0].r0 == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("header", "rows", "message"),
    [
        ("compute,reward", ["1,0.1", "2,nan"], "t.csv, row 2: reward is nan"),
        ("compute,reward", ["1,0.1", "2,"], "t.csv, row 2: reward is '', not a number"),
        ("compute,reward", ["1,0.1", "x,0.2"], "row 2: compute is 'x', not a number"),
        ("compute,reward", ["2,0.1", "1,0.2"], "compute must increase, but 1 follows 2"),
        ("compute,reward", ["1,0.1", "1,0.2"], "compute must increase, but 1 follows 1"),
        ("compute,reward", ["-1,0.1", "1,0.2"], "compute -1 is negative"),
        ("compute,reward", ["1,0.1", "2,1.7"], "reward 1.7 is no pass rate"),
        ("compute,score", ["1,0.1"], "missing column reward; it has compute, score"),
        ("hours,reward", ["1,0.1"], "missing a column of compute; name it one of core_hours"),
        ("tokens,steps,reward", ["1,1,0.1"], "several columns of compute (tokens, steps); choose one with --unit"),
        ("compute,reward,seed", ["1,0.1,0.5"], "seed is 0.5, not a whole number"),
        ("compute,reward", [], "no rows"),
    ],
)
def test_a_wrong_table_is_one_line(tmp_path: Path, header: str, rows: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        load_recipes([write_csv(tmp_path / "t.csv", header, *rows)], None, "mix")
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.exit_status == 2


def test_what_no_law_can_be_fitted_to(tmp_path: Path):
    few = write_csv(tmp_path / "few.csv", "compute,reward", *[f"{i},{i / 10}" for i in range(1, 5)])
    flat = write_csv(tmp_path / "flat.csv", "compute,reward", *[f"{i},0.25" for i in range(1, 9)])
    (first, second), _ = load_recipes([few, flat], None, "mix")
    with pytest.raises(ConfigError, match="few: 4 evaluations in the fit window, at least 6 are needed"):
        check_recipe(first)
    with pytest.raises(ConfigError, match=r"flat: the reward is 0.25 throughout"):
        check_recipe(second)


def test_wrong_runs(tmp_path: Path):
    run = write_run(tmp_path / "a", 0)
    with pytest.raises(ConfigError, match="a run is measured in core_hours"):
        load_recipes([run], "gpu_hours", "mix")
    with pytest.raises(ConfigError, match="no evaluation with hard_pass_at_1"):
        load_recipes([run], None, "hard")
    with pytest.raises(ConfigError, match=r"no metrics.jsonl with records"):
        load_recipes([tmp_path], None, "mix")
    with pytest.raises(ConfigError, match="nowhere: no such file"):
        load_recipes([tmp_path / "nowhere"], None, "mix")
    (run / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json: cannot be read"):
        load_recipes([run], None, "mix")


HEADER = "run_id,seed,b_problem,n,step,compute,reward,best_at_k"


def test_a_sweep_in_both_formats(tmp_path: Path):
    rows = [
        f"{run},0,32,{n},{s},{32 * n * s},{0.1 + s / 10},{0.2 + s / 10}"
        for run, n in (("a", 8), ("b", 4))
        for s in (0, 1, 2)
    ]
    table = write_csv(tmp_path / "s.csv", HEADER, *rows)
    names = HEADER.split(",")
    lines = [json.dumps(dict(zip(names, (r.split(",")[0], *map(float, r.split(",")[1:])), strict=True))) for r in rows]
    (tmp_path / "s.jsonl").write_text("\n".join(lines))
    for path in (table, tmp_path / "s.jsonl"):
        sweep = load_sweep([path], "best_at_k")
        assert sweep.compute.tolist() == [128, 256, 256, 512]
        assert sweep.n.tolist() == [4, 4, 8, 8] or sweep.n.tolist() == [4, 8, 4, 8]
        assert sweep.reward.tolist() == pytest.approx([0.3, 0.4, 0.3, 0.4])
        assert sweep.r0 == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a,0,32,8,1,256,0.1,0.1", "a,0,32,16,2,512,0.2,0.1"], "run a: n or b_problem changes within the run"),
        (["a,0,32,8,2,512,0.1,0.1", "a,0,32,8,1,256,0.2,0.1"], "run a: compute must increase"),
        (["a,0,32,8,0,256,0.1,0.1"], "step at least 1 once compute is spent"),
        (["a,0,32,8,1,256,1.1,0.1"], "row 1: reward is 1.1; rescale it to [0, 1]"),
        (["a,0,32,8.5,1,256,0.1,0.1"], "n is 8.5, not a whole number"),
        (["a,0,32,8,1,inf,0.1,0.1"], "compute is inf"),
    ],
)
def test_a_wrong_sweep_is_one_line(tmp_path: Path, rows: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        load_sweep([write_csv(tmp_path / "s.csv", HEADER, *rows)], "reward")
    assert message in caught.value.message


def test_a_sweep_without_its_target(tmp_path: Path):
    with pytest.raises(ConfigError, match="missing column worst_at_k"):
        load_sweep([write_csv(tmp_path / "s.csv", HEADER, "a,0,32,8,1,256,0.1,0.1")], "worst_at_k")
    (tmp_path / "bad.jsonl").write_text("[1]\n")
    with pytest.raises(ConfigError, match=r"bad.jsonl, line 1: not a JSON object"):
        load_sweep([tmp_path / "bad.jsonl"], "reward")
