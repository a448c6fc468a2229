"""The planner: model sizes, lengths, work and depth, Brent's bound, splits that fit, and the simulated coordinator."""

import json
import math
import sqlite3

import msgspec
import numpy as np
import pytest

from bench.overlap.devices import UNIT
from bench.overlap.hosts import Fabric, spread_s
from bench.overlap.scenarios import QWEN_7B, job_for, rates_for
from bench.overlap.world import World, config_of, simulate
from bench.planner.check import Comparison, judge
from bench.planner.check import Figure as PlanFigure
from bench.planner.cluster import cluster_config, plan_cluster, write_cluster
from bench.planner.hardware import Gpus, Rates, parse_gpus
from bench.planner.lengths import Lengths, guessed, read_lengths
from bench.planner.placements import PLACEMENTS, Split, batch_drain_s, drain_s, period_of, train_s
from bench.planner.plan import Machine, make_plan
from bench.planner.shape import ModelSize, read_model, size_of
from bench.planner.work import Job, depth_s, rounds_of, trained_share, work_of
from pipeline.cli import main
from pipeline.cluster.config import RayConfig, SlurmConfig
from pipeline.config import Config, load_config
from pipeline.errors import ConfigError
from pipeline.messages import WeightsNotice
from pipeline.metrics import JsonlSink
from pipeline.rundir import read_config, write_config

QWEN = {
    "hidden_size": 3584,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
QWEN_30B_A3B = QWEN | {
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
RATES = Rates(0.01, 1e-4, 0.5, 2e-4, 0.1, 0.2, "by hand")


def job(**changes) -> Job:
    fields = {"batch": 64, "group": 4, "algorithm": "grpo", "prompt_tokens": 100.0}
    return Job(**{"model": QWEN_7B, "lengths": guessed("300,2000"), **fields, **changes})


def test_sizes_are_those_that_the_models_are_published_with():
    size = size_of("qwen", QWEN)
    assert size.params == pytest.approx(7.62e9, rel=0.01)
    assert size.kv_bytes(2) == 2 * 2 * 28 * 4 * 128
    experts = size_of("qwen", QWEN_30B_A3B)
    assert experts.params == pytest.approx(30.5e9, rel=0.01)
    assert experts.active == pytest.approx(3.3e9 - 151936 * 2048, rel=0.05)  # published with the input embedding
    assert read_model("builtin").params == pytest.approx(447_104, rel=0.01)  # norms and biases are left out


def test_lengths_from_a_guess_a_file_and_a_run(tmp_path):
    made = guessed("1357,8192")
    assert made.mean == pytest.approx(1357, rel=0.01)
    assert made.largest == 8192 and not made.is_measured
    (tmp_path / "lengths.txt").write_text("3\n1\n2\n")
    own = read_lengths(str(tmp_path / "lengths.txt"))
    assert own.is_measured and own.tokens.tolist() == [1, 2, 3]
    assert own.expected_max(1) == pytest.approx(2) and own.expected_max(2) == pytest.approx(1 / 9 + 2 / 3 + 15 / 9)
    with sqlite3.connect(tmp_path / "ledger.sqlite") as db:
        db.execute("CREATE TABLE attempts (num_tokens INTEGER)")
        db.executemany("INSERT INTO attempts VALUES (?)", [(5,), (7,), (None,)])
    db.close()
    assert read_lengths(str(tmp_path)).mean == 6


def test_work_is_2p_a_token_forward_and_6p_trained():
    plain = ModelSize("m", 1e9, 1e9, 1, 1, 1)  # attention next to nothing
    same = Lengths(np.full(4, 100.0), is_measured=True)
    grpo = work_of(Job(plain, same, "grpo", 50.0, batch=8, group=4))
    assert grpo.generation == pytest.approx(2e9 * (2 * 50 + 8 * 100), rel=1e-3), "a prompt is read once a group"
    assert grpo.training == pytest.approx(6e9 * 8 * 150, rel=1e-3)
    assert grpo.scoring == 0
    ppo = work_of(Job(plain, same, "ppo", 50.0, batch=8, group=4, epochs=2))
    assert ppo.scoring == pytest.approx(4 * 2e9 * 8 * 150, rel=1e-3)
    assert ppo.training == pytest.approx(2 * 2 * grpo.training, rel=1e-3), "policy and critic, twice"
    attention = work_of(Job(ModelSize("m", 1.0, 1e-9, 2, 10, 1), same, "grpo", 0.0, batch=1, group=1))
    assert attention.generation == pytest.approx(4 * 2 * 10 * 100**2 / 2, rel=1e-3)


def test_training_takes_the_same_work_in_a_rate_as_in_a_total():
    """Also where prompts are so long that attention over them is most of it."""
    made = job(prompt_tokens=60_000.0)
    assert rates_for(made).train_token_s * 0.4 * 989e12 * made.step_tokens == pytest.approx(work_of(made).training)
    read = 60_000 * 2 * QWEN_7B.active + 4 * 28 * 3584 * 60_000**2 / 2
    assert work_of(made).training > 3 * made.batch * read, "attention within the prompt is work too"


def test_never_give_up_draws_and_trains_as_the_closed_forms_say():
    rng = np.random.default_rng(0)
    p, k, p_ngu, rounds, trained, n = 0.1, 4, 0.8, 0, 0, 20_000
    for _ in range(n):
        num = 0
        while True:
            num, right = num + 1, int((rng.random(k) < p).sum())
            if right or rng.random() >= p_ngu:
                break
        rounds += num
        trained += num if right and not (num == 1 and right == k) else 0
    assert rounds_of(p, k, p_ngu) == pytest.approx(rounds / n, rel=0.03)
    assert trained_share(p, k, "ngu", p_ngu) == pytest.approx(trained / rounds, rel=0.05)
    assert trained_share(0.5, 2, "grpo", 0.0) == pytest.approx(0.5)


@pytest.mark.parametrize("slots", [1, 3, 16])
def test_brents_bound_holds_for_the_schedule_of_an_engine(slots):
    """T_p <= W/p + D, and T_p >= max(W/p, D), with rows as processors and tokens as unit work."""
    for seed in range(20):
        lengths = np.random.default_rng(seed).integers(1, 200, 40).astype(float)
        unit = Rates(1.0, 0.0, 0, 0, 0, 0, "a token a second")
        took = drain_s(lengths, slots, unit)
        work, depth = lengths.sum(), lengths.max()
        assert max(work / slots, depth) <= took + 1e-9 <= work / slots + depth + 1e-6
    assert drain_s(lengths, 64, RATES) < lengths.max() * RATES.decode_s(40), "rows that are gone make a step faster"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_placement_is_faster_than_its_work_and_none_but_in_flight_than_its_depth(placement):
    split = Split(engines=2, tp=1, slots=32, learners=2, max_lag=3)
    found = period_of(placement, job(), split, RATES)
    least_s = job().step_tokens / 64 * RATES.decode_s(32)
    assert found.period_s >= max(least_s, train_s(job(), 2, RATES)) * (0.49 if placement == "fused" else 0.99)
    if placement != "in_flight":
        assert found.period_s >= 0.9 * batch_drain_s(job(), 2, 32, RATES)[0]
    assert 0 <= found.engine_idle < 1 and 0 <= found.learner_idle < 1


def test_a_plan_fits_the_memory_and_in_flight_wins(tmp_path):
    plan = make_plan(job(batch=512, group=8), Machine(Gpus("H100", 16), None), max_lag=8)
    assert plan.best.placement == "in_flight"
    assert plan.memory.engine <= plan.memory.available and plan.memory.learner <= plan.memory.available
    assert plan.best.lag.launch <= 8.5
    periods = {p.placement: p.period_s for p in plan.periods}
    assert periods["in_flight"] < periods["one_step_off"] <= periods["synchronous"]
    assert periods["fused"] <= periods["colocated"]
    assert plan.depth_s == depth_s(job(batch=512, group=8), plan.rates)
    assert any("not measured" in line for line in plan.says)
    short = job(batch=1024, group=8, prompt_tokens=256.0, lengths=guessed("5,50"))
    plan = make_plan(short, Machine(Gpus("H100", 4), None), 4)
    assert min(plan.periods, key=lambda p: p.period_s).placement == "fused"
    assert plan.best.split.engines + plan.best.split.learners == 4, "each device once, as `ngu train` has them"
    assert any("fused would be" in line for line in plan.says)
    big = ModelSize("big", 400e9, 400e9, 100, 16384, 1024)
    with pytest.raises(ConfigError, match="need"):
        make_plan(job(model=big), Machine(Gpus("H100", 8), None), 4)
    many = make_plan(job(model=ModelSize("70b", 70e9, 70e9, 80, 8192, 1024)), Machine(Gpus("H100", 64), None), 4)
    assert many.best.split.tp == 4


@pytest.mark.parametrize(
    ("placement", "slots", "learners", "max_lag"),
    [
        ("synchronous", 16, 5, 0),
        ("one_step_off", 32, 5, 1),
        ("in_flight", 16, 1, 3),  # admission never holds; engines set the pace
        ("in_flight", 64, 5, 8),  # admission holds
        ("in_flight", 64, 5, 3),
    ],
)
def test_period_and_lag_are_those_of_the_simulated_coordinator(placement, slots, learners, max_lag):
    made = job(batch=96, group=4, lengths=guessed("600,3000"))
    split, rates = Split(3, 1, slots, learners, max_lag), rates_for(made)
    plan, found = period_of(placement, made, split, rates), simulate(placement, made, split, rates, steps=40)
    assert found.period_s == pytest.approx(plan.period_s, rel=0.1)
    assert found.lag.token == pytest.approx(plan.lag.token, rel=0.1, abs=0.1)
    assert found.lag.launch == pytest.approx(plan.lag.launch, rel=0.1, abs=0.1)
    assert found.learner_idle == pytest.approx(plan.learner_idle, abs=0.1)


def test_a_run_is_compared_with_its_own_plan(tmp_path, capsys):
    made = job(batch=48, group=4, lengths=guessed("600,3000"))
    split, rates = Split(2, 1, 16, 4, 3), rates_for(made)
    config = config_of("in_flight", made, split, 40, seed=0)
    write_config(tmp_path, config)
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    World(tmp_path, config, made, split, rates, barrier=False, sink=sink).run()
    sink.close()
    # A token of the simulation stands for many.
    per_token = ("decode_step_s", "decode_row_s", "train_token_s")
    scaled = {name: UNIT * getattr(rates, name) for name in per_token} | {
        "train_token_s": UNIT * rates.train_token_s / 4
    }
    (tmp_path / "rates.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(rates, **scaled)))
    check = ["plan", "check", str(tmp_path), "--measured", str(tmp_path / "rates.json"), "--skip"]
    assert main([*check, "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    [found] = report["runs"]
    ratios = {f["name"]: f["measured"] / f["planned"] for f in found["figures"]}
    assert set(ratios) == {"period_s", "token lag", "launch lag", "largest lag"}
    judged = [name for name in ratios if name != "largest lag"]
    assert all(ratios[name] == pytest.approx(1, abs=0.1) for name in judged), ratios
    assert [v["row"]["what"] for v in report["verdicts"]] == [
        f"plan off by, {name}" for name in ("period", "token lag", "launch lag")
    ]
    assert [v["row"]["median"] for v in report["verdicts"]] == [
        pytest.approx(100 * abs(ratios[name] - 1)) for name in judged
    ]
    slow = msgspec.structs.replace(rates, **scaled | {"decode_step_s": 2 * scaled["decode_step_s"]})
    (tmp_path / "rates.json").write_bytes(msgspec.json.encode(slow))
    assert main([*check, "12"]) == 1, "an engine half as fast as planned is no plan"
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("plan off by, period")] == ["missed"]
    assert main([*check, "38"]) == 2
    assert "at least 4" in capsys.readouterr().err


def test_several_runs_are_judged_by_their_median_and_a_synchronous_one_by_its_period():
    def run(period_s: float, lag: float) -> Comparison:
        return Comparison("r", 9, [PlanFigure("period_s", period_s, 1.0), PlanFigure("token lag", lag, lag)])

    def outcomes(*runs: Comparison) -> dict[str, str | None]:
        return {verdict.row.what: verdict.outcome for verdict in judge(runs)}

    of_period, of_lag = "plan off by, period", "plan off by, token lag"
    assert outcomes(run(1.13, 1.0), run(0.82, 1.0), run(1.08, 1.0)) == {of_period: "open", of_lag: "met"}
    assert outcomes(run(1.16, 0.0), run(0.8, 0.0), run(1.2, 0.0)) == {of_period: "missed"}, "too fast is off as well"


def test_the_command_says_it_in_words_as_json_and_as_the_config_of_a_slurm_job(tmp_path, capsys):
    arguments = ["plan", "system", "--model", "7.6e9,28,3584", "--gpus", "H100x16", "--lengths", "1357,8192"]
    assert main([*arguments, "--algorithm", "grpo"]) == 0
    text = capsys.readouterr().out
    assert "* in flight" in text and "engines.count=" in text
    base, file = tmp_path / "base.toml", tmp_path / "cluster.toml"
    base.write_text('max_steps = 7\n[cluster]\nkind = "slurm"\npartition = "gpu"\n')
    assert main([*arguments, "--json", "--cluster", str(file), "--config", str(base)]) == 0
    said = capsys.readouterr()
    plan = json.loads(said.out)
    assert plan["work"]["generation"] > 0 and len(plan["periods"]) == 5
    assert main(["slurm", str(file), "--run-dir", str(tmp_path / "run")]) == 0
    config = read_config(tmp_path / "run")
    table = config.cluster
    assert isinstance(table, SlurmConfig) and (table.partition, config.max_steps) == ("gpu", 7)
    assert (table.engine_nodes, table.engines_per_node, table.gpus_per_engine, table.head_gpus) == (1, 8, 1, 8)
    assert (config.learner.batch_size, config.learner.num_processes, config.engines.kind) == (1024, 8, "sglang")
    planned = load_config(file).engines
    assert planned.count == 8 and f"8 engines of {planned.slots} slots on 1 node" in said.err
    machine, made = Machine(Gpus("H100", 32), None), job()
    with pytest.raises(ConfigError, match="exists already"):
        write_cluster(file, plan_cluster(made, machine, 4, 8), made, config, "m")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"--gpus": "H100"}, "KINDxN"),
        ({"--gpus": "H900x4"}, "kinds: A100"),
        ({"--gpus": "CPUx2"}, "no data sheet"),
        ({"--lengths": "8192,1357"}, "at most the limit"),
        ({"--lengths": "nowhere.txt"}, "MEAN,MAX"),
        ({"--model": "7e9,x,1"}, "parameters,layers,width"),
        ({"--model": "400e9,100,16384"}, "take more of them"),
        ({"--lengths": "5,inf"}, "finite"),
        ({"--model": "inf,28,3584"}, "numbers above 0"),
        ({"--gpus": "H100x1"}, "N of 2 or more"),
        ({"--prompt": "nan"}, "--prompt at least 0"),
        ({"--pass-rate": "nan"}, "--pass-rate is between 0 and 1"),
        ({"--batch": "4"}, "--batch at least --group"),
        ({"--batch": "1000000000"}, "at most 100,000"),
        ({"--measured": "nowhere.json"}, "ngu plan measure"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_status_2(capsys, changes, says):
    given = {"--model": "7.6e9,28,3584", "--gpus": "H100x8", "--lengths": "1357,8192"} | changes
    assert main(["plan", "system", *(part for pair in given.items() for part in pair)]) == 2
    error = capsys.readouterr().err
    assert says in error and len(error.splitlines()) == 1


def test_the_benchmark_has_a_job_for_every_size():
    for gpus in (8, 64, 128):
        made = job_for(gpus)
        assert made.batch % made.group == 0
        assert rates_for(made).decode_s(64) == pytest.approx(0.011, rel=0.3)
    assert parse_gpus("h100x16") == Gpus("H100", 16)
    assert math.isclose(rates_for(job_for(8)).load_s, 15.24e9 / 35e9, rel_tol=0.01)


def test_nodes_are_whole_and_large_enough(tmp_path):
    big, made = ModelSize("70b", 70e9, 70e9, 80, 8192, 1024), job()
    plan = plan_cluster(job(model=big), Machine(Gpus("H100", 64), None), 4, 32)
    table = cluster_config(plan, made, Config(), "builtin").cluster
    assert isinstance(table, SlurmConfig)
    assert (plan.engine_nodes, table.engines_per_node, table.gpus_per_engine, table.head_gpus) == (1, 8, 4, 32)
    own = plan_cluster(made, Machine(Gpus("H100", 12), None), 4, 8)
    config = cluster_config(own, made, Config(), "builtin")
    assert isinstance(config.cluster, SlurmConfig) and (config.cluster.engine_nodes, config.cluster.head_gpus) == (0, 8)
    assert config.engines.count + config.learner.num_processes == 8, "the rest of a second node is of no use"
    cpus = plan_cluster(made, Machine(Gpus("CPU", 4), RATES), 4, 2)
    config = cluster_config(cpus, made, Config(), "builtin")
    assert isinstance(config.cluster, SlurmConfig) and (config.cluster.head_gpus, config.engines.kind) == (0, "auto")
    ray = Config(cluster=RayConfig("auto", strategy="pack"))
    write_cluster(tmp_path / "ray.toml", plan, made, ray, "builtin")
    planned = load_config(tmp_path / "ray.toml")
    assert planned.cluster == RayConfig("auto", engines=8, gpus_per_engine=4, strategy="pack")
    assert (planned.engines.tp, planned.learner.num_processes) == (4, 32)
    for gpus, node in ((16, 1), (10, 8)):
        with pytest.raises(ConfigError, match="larger"):
            plan_cluster(job(model=big if node == 8 else QWEN_7B), Machine(Gpus("H100", gpus), None), 4, node)


def test_weights_spread_over_simulated_hosts_and_the_plan_knows_when():
    now = 0.0
    fabric = Fabric(["ab", "c", "d", "e", "f"], 1.0, lambda: now)
    for version in (1, 2):
        for name in "abcdef":
            fabric.announce(name, WeightsNotice(version, "", "", 0, "", b"", b""))
        while (now := fabric.due_s()) < math.inf:
            for name, notice in fabric.take(now):
                fabric.loaded(name, notice.policy_version)
        now = 5.0 * version
    assert fabric.delays == [(v, pytest.approx(s)) for v in (1, 2) for s in (3, 3, 3, 5, 5)], "three at a time"
    assert fabric.serving == [2] * 5
    assert fabric.skew(3.0, 10.0) == (2, pytest.approx(2.0)), "some had the first version before the others had any"
    assert fabric.skew(5.0, 10.0) == (1, 0.0)
    assert spread_s(3, 1.0) == 3.0
    assert spread_s(64, 0.435) == pytest.approx(3.56, abs=0.01)
