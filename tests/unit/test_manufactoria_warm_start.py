import math
import random
from collections import Counter
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from learner.warm_start import EOS_ID, build_model, build_tokenizer, save, save_tokenizer
from learner.warm_start_manufactoria import (
    RIGHT_PRIOR,
    VOCABULARY,
    WORDS,
    make_examples,
    measure,
    pass_at_k,
    rung_priors,
    spell,
    token_weights,
    train,
)
from pipeline.model_path import resolve_model_path
from pipeline.tasks.manufactoria.ladder import Spec, build_ladder
from pipeline.tasks.manufactoria.task import UNSOLVED, catalogue, held_out

QUIET = settings(max_examples=50)
SHIPPED = resolve_model_path("builtin:manufactoria")
NUM_PARAMETERS = 449_152


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shipped_tokenizer():
    return AutoTokenizer.from_pretrained(SHIPPED)


def find(statement: str) -> Spec:
    return next(spec for spec in catalogue() if spec.statement == statement)


def test_prompts_and_programs_of_accept_problems_use_34_words():
    used: set[str] = {"PAINTER_RED", "PAINTER_BLUE", "PAINTER_YELLOW", "PAINTER_GREEN"}
    for spec in [s for s in catalogue() if s.kind == "accept"]:
        used.update(spec.prompt.split())
        used.update(word for program in spec.candidates() for word in spell(program).split())
    assert len(used) == 34
    assert used <= {*WORDS, "?"}
    assert set(WORDS) - used == {"drop", "paint", "repaint"}


def test_text_is_one_token_a_word_and_comes_back(shipped_tokenizer):
    for spec in random.Random(0).sample(catalogue(), 40):
        for text in (spec.prompt, *(spell(program) for program in spec.candidates())):
            ids = build_tokenizer(VOCABULARY).encode(text).ids
            assert len(ids) == len(text.split())
            assert shipped_tokenizer(text).input_ids == ids
            assert shipped_tokenizer.decode(ids) == text


def test_the_shipped_tokenizer_is_the_one_the_script_writes(tmp_path: Path):
    save_tokenizer(tmp_path, VOCABULARY)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (SHIPPED / name).read_text()


def test_priors_sum_to_one_and_the_right_program_has_its_tiers():
    for statement, tier in (("starts R B B", 0), ("exactly Y 2", 1), ("mod B 3 1", 2), ("starts R and ends B", 3)):
        priors = rung_priors(find(statement))
        assert sum(priors) == pytest.approx(1)
        assert priors[-1] == RIGHT_PRIOR[tier]
        assert priors[1:-1] == pytest.approx([p / 2 for p in priors[:-2]])


@QUIET
@given(st.sets(st.text("abc", max_size=4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_completions_weights_multiply_to_its_prior_over_its_drawn_share(words: set[str], rng: random.Random):
    """The chain rule: conditional ratios along a path of the trie multiply to the ratio of the whole completion."""
    completions = [[*map(ord, word), EOS_ID] for word in sorted(words)]
    raw = [rng.random() + 1e-3 for _ in completions]
    priors = [r / sum(raw) for r in raw]
    for i in range(len(completions)):
        weights = token_weights(completions, priors, i)
        assert len(weights) == len(completions[i])
        assert math.prod(weights) == pytest.approx(priors[i] * len(completions))


def test_only_branches_are_reweighted():
    weak, right = make_examples(find("mod B 2 1"))[-2:]
    branch = next(i for i, (a, b) in enumerate(zip(weak.completion_ids, right.completion_ids, strict=False)) if a != b)
    assert right.token_weights[branch] < 0.05
    assert right.token_weights[branch + 1 :] == pytest.approx([1.0] * (len(right.token_weights) - branch - 1))


def test_pass_at_k_is_the_share_of_draws_with_a_right_one():
    for num_right in range(6):
        draws = list(combinations([1] * num_right + [0] * (5 - num_right), 3))
        assert pass_at_k(num_right, 5, 3) == pytest.approx(sum(map(max, draws)) / len(draws))


def test_two_steps_lower_the_loss_and_write_a_loadable_directory(tmp_path: Path):
    model = build_model(0, len(VOCABULARY))
    losses = list(train(model, [find("starts R"), find("mod B 2 1")], seed=0, num_steps=2))
    assert losses[1] < losses[0] < 5.0
    save(model, tmp_path, VOCABULARY)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.num_parameters() == model.num_parameters() == NUM_PARAMETERS


def test_the_shipped_checkpoint_is_small_and_half_precision():
    assert {t.dtype for t in load_file(SHIPPED / "model.safetensors").values()} == {torch.float16}
    assert (SHIPPED / "model.safetensors").stat().st_size < 1_000_000


@torch.inference_mode()
def test_the_shipped_model_knows_right_programs_but_seldom_begins_one(shipped_tokenizer):
    """The priors hold on average, and what follows the last branch of the trie follows almost surely."""
    model = AutoModelForCausalLM.from_pretrained(SHIPPED)
    rng = random.Random(0)
    for tier, (lowest, highest) in enumerate([(0.1, 0.6), (0.005, 0.15), (0.0, 0.05), (0.0, 0.02)]):
        specs = [s for s in catalogue() if s.tier == tier and s.statement not in held_out()]
        whole, after = [], []
        for spec in rng.sample(specs, 12):
            prompt_ids, completion_ids, weights = make_examples(spec)[-1]
            logits = model(torch.tensor([prompt_ids + completion_ids])).logits[0, len(prompt_ids) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(completion_ids)[:, None]).squeeze(1)
            whole.append(chosen.sum().exp().item())
            last_branch = max(i for i, weight in enumerate(weights) if abs(weight - 1) > 1e-9)
            after.append(chosen[last_branch + 1 :].sum().exp().item())
        assert lowest <= sum(whole) / len(whole) <= highest
        assert sum(after) / len(after) > 0.6


def test_measure_sees_an_easy_level_solved_sometimes_and_a_hard_one_hardly_ever():
    easy, hard = find("starts R B"), find("starts R B and ends R B")
    reports = dict(measure(SHIPPED, [easy, hard], num_rollouts=24, seed=0))
    assert reports[easy].num_right > reports[hard].num_right
    assert reports[hard].num_right <= 2
    assert 0.4 < reports[hard].tests_passed < 1.0


def test_the_unsolved_pool_holds_training_problems_of_the_harder_tiers():
    statements = UNSOLVED.read_text().splitlines()
    training = {s.statement: s for s in catalogue() if s.statement not in held_out()}
    assert len(set(statements)) == len(statements)
    tiers = Counter(training[statement].tier for statement in statements)
    assert tiers[3] > len(statements) / 3
    assert tiers[0] == 0
    assert all(len(build_ladder(training[s]).rungs) > 1 for s in statements[:5])
