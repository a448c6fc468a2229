"""The schema of a run: defaults, overrides, and one clear line for every mistake."""

import re

import msgspec
import pytest

from pipeline.config import Config, dump_config, load_config, parse_config
from pipeline.errors import ConfigError
from pipeline.learner_config import CispoConfig, PpoConfig
from pipeline.tasks.registry import JsonlConfig
from samplers.fixed import FixedConfig
from samplers.never_give_up import NeverGiveUpConfig


def test_no_file_gives_the_built_in_job():
    config = load_config(None)
    assert config == Config()
    assert isinstance(config.sampler, NeverGiveUpConfig)


def test_a_stored_config_is_read_back_as_it_was(tmp_path):
    config = load_config(None, ["sampler.kind=fixed", "learner.lr=2e-4", "max_steps=7"])
    stored = msgspec.json.decode(msgspec.json.encode(dump_config(config)))
    assert parse_config(stored, "stored") == config


def test_overrides_win_over_the_file_and_take_toml_literals(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('seed = 3\n[learner]\nlr = 1e-3\nbatch_size = 64\n[sampler]\nkind = "fixed"\nnum_rollouts = 4\n')
    config = load_config(path, ["learner.lr=5e-5", "learner.betas=[0.8, 0.9]"])
    assert (config.seed, config.learner.lr, config.learner.batch_size) == (3, 5e-5, 64)
    assert config.learner.betas == (0.8, 0.9)
    assert config.sampler == FixedConfig(num_rollouts=4)


def test_another_kind_drops_the_fields_of_the_first(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[sampler]\nkind = "fixed"\nnum_rollouts = 4\n')
    assert isinstance(load_config(path, ["sampler.kind=never_give_up"]).sampler, NeverGiveUpConfig)


def test_a_table_without_a_kind_means_the_default_one():
    sampler = load_config(None, ["sampler.round_size=2"]).sampler
    assert isinstance(sampler, NeverGiveUpConfig)
    assert sampler.round_size == 2


def test_a_nested_table_has_kinds_too():
    loss = load_config(None, ["learner.loss.kind=ppo", "learner.loss.dual_clip=3.0"]).learner.loss
    assert loss == PpoConfig(dual_clip=3.0)
    assert load_config(None, ["learner.loss.aggregation=prompt"]).learner.loss == CispoConfig(aggregation="prompt")


def test_a_bare_word_is_a_string():
    task = load_config(None, ["task.kind=jsonl", "task.path=data.jsonl"]).task
    assert isinstance(task, JsonlConfig)
    assert task.path == "data.jsonl"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lrr=1", r"\[learner\] unknown key 'lrr'; did you mean 'lr'\?"),
        ("learner.loss.epsmax=1", r"\[learner.loss\] unknown key 'epsmax'; did you mean 'eps_max'\?"),
        ("sampler.roundsize=1", r"\[sampler\] unknown key 'roundsize'; did you mean 'round_size'\?"),
        ("learner.loss.kind=dpo", r"\[learner.loss.kind\] there is no 'dpo'; did you mean 'ppo'\?"),
        ("learner.corrections.masks=[{kind='x'}]", r"masks\[0\].kind\] there is no 'x'; known: .*icepop, .*mis"),
        ("cluster.kind=k8s", r"\[cluster.kind\] there is no 'k8s'; known: ray, slurm$"),
        ("engines.kind=vllm", r"\[engines.kind\] there is no 'vllm'; known: auto, embedded, fake, sglang, tr"),
        ("guards.starvation=['lower_lga']", r"starvation\[0\]\] there is no 'lower_lga'; did you mean 'lower_lag'\?"),
        ("learner.loss=ppo", r"\[learner.loss\] expected a table, got `str`"),
        (
            'learner.corrections.masks=[{kind="icepop", hi=2.0}]',
            r"\[learner.corrections.masks\[0\]\] unknown key 'hi'; did you mean 'high'\?",
        ),
        ('learner.corrections.masks=[{kind="mis"}, {kind="mis"}]', "twice"),
        ("stalness.max_lag=1", "unknown key 'stalness'; did you mean 'staleness'"),
        ("task.kind=jsonl", r"\[task\] the key 'path' is missing"),
        ("sampler.kind=fixd", r"\[sampler.kind\] there is no 'fixd'; did you mean 'fixed'\?"),
        ("learner.lr=fast", r"\[learner.lr\] expected `float`, got `str`"),
        ("engines.slots=0", r"\[engines.slots\]"),
        ("engines.kv=recompute", r"\[engines\] kv, tp, gpus, flags, urls and private_network are for"),
        ('engines={kind="sglang", count=2, gpus=[0]}', r"\[engines\] gpus names 1, and 2 engines of 1"),
        ('engines={kind="sglang", own_cores=true}', "own_cores is for engines that compute on this machine's CPU"),
        ('engines={kind="sglang", hang_s=60.0}', "engines.hang_s must be below daemon.hang_s"),
        ('engines={kind="sglang", urls=["http://[::1]:1", "http://[::1]:2"]}', r"\[engines\] urls names 2 servers and"),
        ("sampling.temperature=0", "temperature must be above 0"),
        ("sampling.temperature=nan", "temperature must be above 0"),
        ("sampling.top_p=0.9", "top_p, top_k and min_p must stay"),
        ("sampling.top_k=5", "top_p, top_k and min_p must stay"),
        ("learner.lr=inf", r"\[learner.lr\] expected a finite number"),
        ("learner.corrections.masks=[{kind='icepop', high=inf}]", r"masks\[0\].high\] expected a finite number"),
        ("seed=99999999999999999999", r"\[seed\] expected a finite number of at most 64 bits"),
        ("max_steps=99999999999999999999", r"\[max_steps\]"),
        ("learner", "section.key=value"),
        ("seed.x=1", None),
        ("sampler={round_size=1, max_retry_frac=0.0}", r"\[sampler\] round_size 1 needs max_retry_frac above 0"),
    ],
)
def test_a_mistake_gets_one_line(override, message):
    with pytest.raises(ConfigError, match=message) as error:
        load_config(None, [override])
    assert "\n" not in error.value.message
    assert error.value.exit_status == 2


def test_a_run_without_an_end_is_refused():
    raw = {"max_steps": 0, "max_rollouts": 0}
    with pytest.raises(ConfigError, match="would never end"):
        parse_config(raw, "test")


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="no such file; `ngu init`"):
        load_config(tmp_path / "nope.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("learner = [")
    with pytest.raises(ConfigError, match="not a readable TOML file"):
        load_config(bad)
    bad.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a readable TOML file"):
        load_config(bad)
    with pytest.raises(ConfigError, match="not a readable TOML file"):
        load_config(tmp_path)


def test_gpus_are_handed_out_to_engines_in_order():
    engines = load_config(None, ['engines={kind="sglang", count=2, tp=2, gpus=[4, 5, 6, 7]}']).engines
    assert [engines.gpus_of(i) for i in (0, 1)] == [(4, 5), (6, 7)]
    engines = load_config(None, ['engines={kind="sglang", count=3}']).engines
    assert engines.gpus_of(2) == (2,)


NEAR = ("http://127.0.0.1:30000", "http://127.8.8.8", "http://[::1]:1", "HTTP://LOCALHOST")
FAR = (
    "http://gpu7:1",
    "http://10.0.0.7",
    "http://[fe80::1]:1",
    "http://localhost.org",
    "http://0.0.0.0",
    "http://::1@gpu7",
)


@pytest.mark.parametrize(
    ("url", "push", "said"),
    [
        *((url, "auto", None) for url in NEAR),
        *((url, "disk", "is plain HTTP to another machine") for url in FAR),
        ("https://gpu7", "disk", None),
        *(("https://gpu7", push, "only push = disk") for push in ("auto", "gloo", "nccl")),
    ],
)
def test_nothing_goes_to_another_machine_in_the_clear_unless_the_network_is_private(url, push, said):
    engines = {"kind": "sglang", "urls": [url], "push": push}
    parse_config({"engines": engines | {"private_network": True}}, "test")
    if said is None:
        parse_config({"engines": engines}, "test")
    else:
        with pytest.raises(ConfigError, match=rf"urls: {re.escape(url)} .*{said}.*private_network if nobody"):
            parse_config({"engines": engines}, "test")


@pytest.mark.parametrize(
    "url", ["", "gpu7:1", "tcp://gpu7:1", "http://", "http://a:x", "http://a:99999", "http://[::1"]
)
def test_an_address_that_is_none_is_refused_on_a_private_network_too(url):
    with pytest.raises(ConfigError, match=r"\[engines\] urls: .* is no address of a server; write it as in"):
        parse_config({"engines": {"kind": "sglang", "urls": [url], "private_network": True}}, "test")
