"""`ngu sweep isocompute`: what it runs, that it goes on, and that its table is what `ngu fit isocompute` reads."""

import csv
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import bench.sweep
from bench.scaling.sweep import load_sweep
from bench.stability import grid
from bench.stability.course import Course, Ending, Evaluated
from bench.sweep.plan import load_plan
from pipeline import cli
from pipeline.config import Config
from pipeline.errors import ConfigError

SWEEP = """
seeds = [0, 1]
budget = 64
eval_every = 32
n = [2, 4, 8]
b_problem = [2, 8]
batch = [16]
[set]
staleness.max_lag = 0
learner.lr = 1e-3
learner.batch_size = 64
eval.num_rollouts = 2
[targets]
easy = ["+1", "+2"]
"""
# One real arm: two steps of 24 rollouts, and three evaluations of a problem a level.
REAL = """
seeds = [0]
budget = 48
eval_every = 24
n = [4, 8]
b_problem = [3]
[set]
staleness.max_lag = 0
eval.num_rollouts = 2
task.eval_per_level = 1
sampling.max_new_tokens = 24
[targets]
easy = ["+1", "+2"]
"""


@pytest.fixture(autouse=True)
def ngu_verbs(monkeypatch: pytest.MonkeyPatch):
    verbs = [EntryPoint("sweep", "bench.sweep.commands:sweep", cli.GROUP)]
    verbs.append(EntryPoint("fit", "bench.scaling.commands:fit", cli.GROUP))
    monkeypatch.setattr(cli, "entry_points", lambda group: verbs)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def rows(table: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(table.read_text().splitlines()))


def course(config: Config, ending: Ending = "finished") -> Course:
    """Larger groups learn more slowly and to a higher end."""
    batch, n = config.learner.batch_size, 8
    found = []
    for batches in range(0, config.max_rollouts // batch + 1, config.eval.every_steps):
        rate = 0.1 + 0.01 * batches * batch / n
        found.append(Evaluated(batches, rate, None, {"+1": rate, "*1": 0.0}, {"+1": 1.0, "*1": 0.5}, {"+1": rate / 2}))
    return Course(found, [], ending, "hopeless" if ending == "collapsed" else "", 1.0)


def test_a_sweep_is_every_pair_of_its_slices_at_equal_rollouts(tmp_path: Path):
    plan = load_plan(write(tmp_path / "s.toml", SWEEP))
    of_seed = [(a.b_problem, a.n) for a in plan.arms if a.config.seed == 0]
    # Fixed B_problem, then a fixed batch of 16, of which (8, 2) and (2, 8) are there already; smallest batches first.
    assert of_seed == [(2, 2), (2, 4), (2, 8), (4, 4), (8, 2), (8, 4)]
    assert [a.config.seed for a in plan.arms] == [0] * 6 + [1] * 6
    assert plan.left_out == [(8, 8)]
    for arm in plan.arms:
        config = arm.config
        assert (
            config.max_rollouts == 64 and config.max_steps == 0 and config.learner.batch_size == arm.b_problem * arm.n
        )
        assert config.eval.every_steps * config.learner.batch_size == 32 and config.eval.final_num_rollouts == 2
        assert config.learner.scaled_lr == pytest.approx(1e-3 * (config.learner.batch_size / 64) ** 0.5)
    assert set(plan.weights["easy"]) == {"+1", "+2"} and sum(plan.weights["reward"].values()) == pytest.approx(1.0)


def test_the_shipped_sweep_fixes_problems_and_batches():
    plan = load_plan(Path(bench.sweep.__file__).parent / "builtin.toml")
    of_seed = [(a.b_problem, a.n) for a in plan.arms if a.config.seed == 0]
    assert len(plan.arms) == 3 * len(of_seed)
    for b_problem, batch in ((8, None), (None, 256)):
        ns = {n for b, n in of_seed if b == b_problem or b * n == batch}
        assert ns == {2, 4, 8, 16, 32, 64, 128}


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("budget = 64", "budget = 65", "budget = 65 is no multiple of eval_every = 32"),
        ("batch = [16]", "batch = [18]", "batch = 18 is no multiple of n = 4"),
        ("b_problem = [2, 8]", "b_problem = [3]", "no multiple of 3 problems x 2 rollouts"),
        ("n = [2, 4, 8]", "n = [1, 2]", "not a sweep"),
        ("seeds = [0, 1]", "seeds = [0, 0]", "names one seed twice"),
        ("b_problem = [2, 8]\nbatch = [16]", "", "give b_problem, batch or both"),
        ("eval_every = 32", "eval_every = 2", "every batch is larger than eval_every = 2"),
        ('easy = ["+1", "+2"]', 'easy = ["+9"]', "no level '\\+9'; there are"),
        ('easy = ["+1", "+2"]', 'reward = ["+1"]', "reward is the name of another column"),
        ("staleness.max_lag = 0", "staleness.max_leg = 0", "max_leg"),
        ("staleness.max_lag = 0", 'verifier.reward = "a.b:c"', "without a deadline"),
        ("staleness.max_lag = 0", 'model.path = "nowhere"', "nowhere"),
    ],
)
def test_a_bad_sweep_is_refused_before_any_run(tmp_path: Path, old: str, new: str, words: str):
    assert old in SWEEP
    with pytest.raises(ConfigError, match=words) as error:
        load_plan(write(tmp_path / "s.toml", SWEEP.replace(old, new)))
    assert "\n" not in error.value.message and "s.toml" in error.value.message


def test_an_interrupted_sweep_can_be_fitted_and_goes_on(tmp_path: Path, monkeypatch, capsys):
    ran: list[tuple[int, int]] = []

    def fake_arm(config: Config) -> Course:
        if len(ran) == 3:
            ran.append((-1, -1))
            raise KeyboardInterrupt
        ran.append((config.learner.batch_size, config.seed))
        return course(config, "collapsed" if len(ran) == 2 else "finished")

    monkeypatch.setattr(grid, "run_arm", fake_arm)
    file, out = write(tmp_path / "s.toml", SWEEP), tmp_path / "out"
    argv = ["sweep", "isocompute", str(file), "--out", str(out), "--processes", "1"]
    with pytest.raises(SystemExit, match="130"):
        cli.main(argv)
    part = rows(out / "sweep.csv")
    assert {r["run_id"] for r in part} == {"b2-n2-s0", "b2-n4-s0", "b2-n8-s0"}
    assert load_sweep([out], "reward").n.tolist() == load_sweep([out / "sweep.csv"], "easy").n.tolist()
    with (out / "runs.jsonl").open("ab") as lines:
        lines.write(b'{"key":"torn')
    capsys.readouterr()
    assert cli.main(argv) == 0
    said = capsys.readouterr()
    assert len(ran) == 1 + 12 and "[4/12] " in said.err and "[12/12] " in said.err
    assert "left out: 8 problems x 8" in said.out and "collapsed: 2 problems x 4, seed 0: hopeless" in said.out
    table = rows(out / "sweep.csv")
    assert {r["ending"] for r in table if r["run_id"] == "b2-n4-s0"} == {"collapsed"}
    assert [int(r["compute"]) for r in table if r["run_id"] == "b8-n4-s1"] == [0, 32, 64]
    assert {r["easy_best_at_k"] for r in table} == {"1.0"}
    monkeypatch.setattr(grid, "run_arm", lambda config: pytest.fail("it is done"))
    assert cli.main(argv) == 0 and rows(out / "sweep.csv") == table


@pytest.mark.timeout(280)  # a real course, and the machine may be busy
def test_from_a_sweep_to_the_fit(tmp_path: Path, capsys):
    out = tmp_path / "out"
    argv = ["sweep", "isocompute", str(write(tmp_path / "s.toml", REAL)), "--out", str(out), "--processes", "1"]
    assert cli.main(argv) == 0
    table = rows(out / "sweep.csv")
    assert [(r["run_id"], r["compute"]) for r in table] == [
        (f"b3-n{n}-s0", str(compute)) for n in (4, 8) for compute in (0, 24, 48)
    ]
    for row in table:
        assert 0 <= float(row["worst_at_k"]) <= float(row["reward"]) <= float(row["best_at_k"]) <= 1
        assert 0 < float(row["easy_best_at_k"]) <= 1
    capsys.readouterr()
    assert cli.main(["fit", "isocompute", str(out), "--out", str(tmp_path / "fits")]) == 2
    assert "2 values of n, at least 3 are needed" in capsys.readouterr().err
