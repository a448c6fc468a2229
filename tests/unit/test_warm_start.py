import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import pipeline
from learner.warm_start import (
    EOS_ID,
    PAD_ID,
    VOCABULARY,
    WORKING_FRAC,
    Example,
    build_model,
    build_tokenizer,
    collate,
    draw_example,
    measure,
    save,
    save_tokenizer,
    train,
    working_prior,
)
from pipeline.tasks.show_your_work import GUESS_PREFIX, WORK_PREFIX, draw_expression, guess, working

# No deadline: a busy machine is not a failure. No database: a test leaves no file behind.
QUIET = settings(max_examples=50)
SHIPPED = Path(pipeline.__file__).parent / "assets" / "show_your_work"
NUM_PARAMETERS = 447_104
WORK_ID = VOCABULARY.index(WORK_PREFIX)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def shipped_model():
    return AutoModelForCausalLM.from_pretrained(SHIPPED)


@pytest.fixture(scope="module")
def shipped_tokenizer():
    return AutoTokenizer.from_pretrained(SHIPPED)


@QUIET
@given(st.lists(st.sampled_from(VOCABULARY[3:])).map("".join))
def test_text_round_trips_through_every_loader(shipped_tokenizer, text: str):
    plain = build_tokenizer()
    ids = plain.encode(text).ids
    assert plain.decode(ids, skip_special_tokens=False) == text
    assert shipped_tokenizer(text).input_ids == ids
    assert shipped_tokenizer.decode(ids) == text


def test_a_problem_is_one_token_a_piece():
    encoding = build_tokenizer().encode("Compute 48*6.\nWork:\n8*6+0=48\n\\boxed{288}")
    assert encoding.tokens == [
        *("Compute ", "4", "8", "*", "6", ".\n", "Work:\n", "8", "*", "6", "+", "0", "=", "4", "8", "\n"),
        *("\\boxed{", "2", "8", "8", "}"),
    ]


def test_the_tokenizer_survives_being_saved_again(shipped_tokenizer, tmp_path: Path):
    text = "Compute 48*6.\nWork:\n8*6+0=48\n\\boxed{288}"
    shipped_tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_bytes((SHIPPED / "config.json").read_bytes())
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(text).input_ids == shipped_tokenizer(text).input_ids
    assert again.decode(again(text).input_ids) == text


def test_the_shipped_tokenizer_is_the_one_the_script_writes(shipped_tokenizer, tmp_path: Path):
    save_tokenizer(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_text() == (SHIPPED / name).read_text()
    assert len(shipped_tokenizer) == len(VOCABULARY) == 24
    assert (shipped_tokenizer.pad_token_id, shipped_tokenizer.eos_token_id) == (PAD_ID, EOS_ID)
    assert shipped_tokenizer.unk_token_id == VOCABULARY.index("<unk>")


def test_the_shipped_checkpoint_is_half_precision_on_disk_and_float32_in_use(shipped_model):
    assert {t.dtype for t in load_file(SHIPPED / "model.safetensors").values()} == {torch.float16}
    assert shipped_model.dtype == torch.float32
    assert shipped_model.num_parameters() == NUM_PARAMETERS
    assert shipped_model.generation_config.eos_token_id == EOS_ID
    assert shipped_model.generation_config.do_sample


@torch.inference_mode()
def test_the_shipped_model_knows_how_to_work_but_seldom_does(shipped_model, shipped_tokenizer):
    rng = random.Random(0)
    for level in ("*3", "*4", "*5"):
        num_right = num_tokens = 0
        for _ in range(10):
            expression = draw_expression(level, rng)
            prompt = shipped_tokenizer(expression.prompt).input_ids
            completion = shipped_tokenizer(working(expression)).input_ids
            logits = shipped_model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 :]
            assert logits[0].softmax(-1)[WORK_ID] < 0.02
            # After `Work:` the next token follows from the ones before it.
            num_right += int((logits[1:-1].argmax(-1) == torch.tensor(completion[1:])).sum())
            num_tokens += len(completion) - 1
        assert num_right / num_tokens > 0.95


def test_measure_sees_the_easy_level_solved_and_the_hard_one_not():
    easy, hard = measure(SHIPPED, ("+1", "*5"), num_problems=40, seed=0)
    assert (easy.level, hard.level) == ("+1", "*5")
    assert easy.pass_at_1 > 0.6
    assert easy.works > 0.6
    assert easy.right_if_working > 0.8
    assert hard.pass_at_1 < 0.1
    assert hard.works < 0.02
    assert hard.right_if_working > 0.3


def test_working_priors_fall_with_length():
    assert working_prior("+1") == pytest.approx(0.9)
    assert working_prior("-3") == pytest.approx(0.2 * 0.75**2)
    assert working_prior("*5") == pytest.approx(0.012 * 0.6**4)


def test_reweighted_choices_have_the_wanted_prior():
    """E[weight | working] and E[weight | guessing] times the drawn fractions must sum to 1 for every level."""
    tokenizer, rng = build_tokenizer(), random.Random(0)
    weights: dict[tuple[str, int], tuple[str, float]] = {}
    for _ in range(600):
        example = draw_example(tokenizer, rng)
        text = tokenizer.decode(example.prompt_ids)
        digits = text.removeprefix("Compute ").split("-")[0].split("+")[0].split("*")[0]
        op = text.removeprefix("Compute ")[len(digits)]
        weights[f"{op}{len(digits)}", example.completion_ids[0]] = (text, example.choice_weight)
        assert example.completion_ids[-1] == EOS_ID
    guess_id = VOCABULARY.index(GUESS_PREFIX)
    for level in {level for level, _ in weights}:
        q = WORKING_FRAC * weights[level, WORK_ID][1]
        assert q == pytest.approx(working_prior(level))
        assert q + (1 - WORKING_FRAC) * weights[level, guess_id][1] == pytest.approx(1)


def test_only_completion_tokens_are_trained_and_only_the_first_is_reweighted():
    ids, weights = collate([Example([20, 5, 21], [22, 6, EOS_ID], 0.25), Example([20, 21], [23, EOS_ID], 4.0)])
    assert ids.tolist() == [[20, 5, 21, 22, 6, EOS_ID], [20, 21, 23, EOS_ID, PAD_ID, PAD_ID]]
    assert weights.tolist() == [[0, 0, 0.25, 1, 1], [0, 4, 1, 0, 0]]


def test_two_steps_lower_the_loss_and_write_a_loadable_directory(tmp_path: Path):
    model = build_model(seed=0)
    losses = list(train(model, seed=0, num_steps=2))
    assert losses[1] < losses[0] < 4.0
    save(model, tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert loaded.num_parameters() == NUM_PARAMETERS
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight.half().float())
    assert tokenizer("Compute 1+1.\n").input_ids == build_tokenizer().encode("Compute 1+1.\n").ids


def test_the_same_seed_builds_the_same_weights():
    first, again, other = (build_model(seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_the_longest_completion_fits_the_default_number_of_new_tokens():
    tokenizer, rng = build_tokenizer(), random.Random(0)
    for level in ("+5", "-5", "*5"):
        for _ in range(20):
            expression = draw_expression(level, rng)
            assert len(tokenizer.encode(working(expression)).ids) < 70
            assert len(tokenizer.encode(guess(expression, rng)).ids) < 70
