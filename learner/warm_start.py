"""Builds the model that ships with the built-in task: `python -m learner.warm_start --out DIR [--seed N]`.

The policy must know how to work a problem out and yet rarely choose to, or reinforcement learning has nothing to find.
Working and guessing are therefore drawn in fixed proportions, so that the skill is learnt from many examples, and only
the loss of the first completion token, which chooses between them, is reweighted by the importance ratio of the wanted
prior to the proportion drawn.
"""

import argparse
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from pipeline.tasks.show_your_work import (
    GUESS_PREFIX,
    LEVELS,
    WORK_PREFIX,
    draw_expression,
    guess,
    working,
)

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
VOCABULARY = (
    PAD,
    EOS,
    UNK,
    "\n",
    *"0123456789",
    *"+-*=",
    "\\boxed{",
    "}",
    "Compute ",
    ".\n",
    WORK_PREFIX,
    GUESS_PREFIX,
)
PAD_ID, EOS_ID = VOCABULARY.index(PAD), VOCABULARY.index(EOS)
MAX_POSITIONS = 512

NUM_STEPS = 260
BATCH_SIZE = 128
MICRO_BATCH_SIZE = 32
WARMUP_STEPS = 10
FINAL_LR_FRAC = 0.05
MAX_GRAD_NORM = 1.0
WORKING_FRAC = 0.8
# Prior of working by operator: (at one digit, factor for each further digit).
WORKING_PRIOR = {"+": (0.9, 0.9), "-": (0.2, 0.75), "*": (0.012, 0.6)}
MAX_NEW_TOKENS = 70


class WeightedExample(Protocol):
    """Token ids of a prompt and its completion (with the end token), and the loss weight of each completion token."""

    @property
    def prompt_ids(self) -> list[int]: ...

    @property
    def completion_ids(self) -> list[int]: ...

    @property
    def token_weights(self) -> list[float]: ...


class Example(NamedTuple):
    """A `WeightedExample` whose first token weighs `choice_weight` and whose other tokens weigh 1."""

    prompt_ids: list[int]
    completion_ids: list[int]
    choice_weight: float

    @property
    def token_weights(self) -> list[float]:
        return [self.choice_weight, *[1.0] * (len(self.completion_ids) - 1)]


class LevelReport(NamedTuple):
    """Fractions of one level: right at temperature 1, choosing to work, and right once made to work."""

    level: str
    pass_at_1: float
    works: float
    right_if_working: float


def build_tokenizer(vocabulary: Sequence[str] = VOCABULARY) -> Tokenizer:
    """Word-level over `vocabulary`; decode(encode(text)) == text for any text made of its pieces.

    A vocabulary begins with `PAD`, `EOS` and `UNK`.

    Every piece is an added token: transformers 5 loads any tokenizer beside a qwen2 model as a `Qwen2Tokenizer` with a
    byte-level pre-tokenizer of its own, and added tokens are the one way of splitting text that survives that.
    """
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNK))
    tokenizer.add_special_tokens([PAD, EOS, UNK])
    tokenizer.add_tokens([AddedToken(piece, normalized=False) for piece in vocabulary[3:]])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def save_tokenizer(directory: Path, vocabulary: Sequence[str] = VOCABULARY) -> None:
    """Write the two files `AutoTokenizer` needs, in the form that transformers 4 and 5 both read."""
    build_tokenizer(vocabulary).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNK,
        "model_max_length": MAX_POSITIONS,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def build_model(seed: int, vocab_size: int = len(VOCABULARY)) -> Qwen2ForCausalLM:
    """The untrained model: Qwen2 architecture, 447,104 parameters (with 24 tokens), float32."""
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen2ForCausalLM(config)


def working_prior(level: str) -> float:
    base, decay = WORKING_PRIOR[level[0]]
    return base * decay ** (int(level[1:]) - 1)


def draw_example(tokenizer: Tokenizer, rng: random.Random) -> Example:
    """One warm-start example: a level uniformly, working with probability `WORKING_FRAC`."""
    level = rng.choice(LEVELS)
    expression = draw_expression(level, rng)
    prior = working_prior(level)
    if rng.random() < WORKING_FRAC:
        text, choice_weight = working(expression), prior / WORKING_FRAC
    else:
        text, choice_weight = guess(expression, rng), (1 - prior) / (1 - WORKING_FRAC)
    return Example(tokenizer.encode(expression.prompt).ids, [*tokenizer.encode(text).ids, EOS_ID], choice_weight)


def collate(examples: Sequence[WeightedExample]) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids [B, T] and the loss weight of each next token [B, T-1]; prompt and padding weigh 0."""
    length = max(len(e.prompt_ids) + len(e.completion_ids) for e in examples)
    ids = torch.full((len(examples), length), PAD_ID)
    weights = torch.zeros(len(examples), length - 1)
    for row, example in enumerate(examples):
        start, end = len(example.prompt_ids), len(example.prompt_ids) + len(example.completion_ids)
        ids[row, :end] = torch.tensor(example.prompt_ids + example.completion_ids)
        weights[row, start - 1 : end - 1] = torch.tensor(example.token_weights)
    return ids, weights


def train(model: Qwen2ForCausalLM, seed: int, num_steps: int) -> Iterator[float]:
    """Warm-start `model` in place; yields the weighted loss per completion token of each step."""
    tokenizer, rng = build_tokenizer(), random.Random(f"warm_start/{seed}")
    yield from fit(model, lambda: draw_example(tokenizer, rng), num_steps)


def fit(model: Qwen2ForCausalLM, draw: Callable[[], WeightedExample], num_steps: int) -> Iterator[float]:
    """`num_steps` optimizer steps on `BATCH_SIZE` drawn examples each; yields the loss of each step as `train` does."""
    optimizers = _make_optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: _lr_frac(step, num_steps)) for o in optimizers]
    model.train()
    for _ in range(num_steps):
        batch = [draw() for _ in range(BATCH_SIZE)]
        loss = _backward(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        yield loss


def save(model: Qwen2ForCausalLM, directory: Path, vocabulary: Sequence[str] = VOCABULARY) -> None:
    """Write a model directory with float16 weights.

    config.json says float32, so a loader that takes its dtype from there computes in float32, as a CPU needs.
    """
    directory.mkdir(parents=True, exist_ok=True)
    generation = model.generation_config
    assert generation is not None
    generation.do_sample, generation.temperature, generation.top_k, generation.top_p = True, 1.0, 0, 1.0
    generation.max_new_tokens = MAX_NEW_TOKENS
    # The tied output head is left out: halving would turn it into a second tensor of its own.
    weights = {k: v.half() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    model.save_pretrained(directory, state_dict=weights)
    (directory / "model.safetensors").chmod(0o644)  # written as 0600, which an installed package must not be
    save_tokenizer(directory, vocabulary)


@torch.inference_mode()
def measure(directory: Path, levels: Sequence[str], num_problems: int, seed: int) -> Iterator[LevelReport]:
    """Sample one completion at temperature 1 for `num_problems` random problems of each level, twice.

    The second time every completion is made to start with `Work:`. `works` is exact: the probability of that token.
    """
    model = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    rng = random.Random(f"measure/{seed}")
    torch.manual_seed(seed)
    work_id = VOCABULARY.index(WORK_PREFIX)
    for level in levels:
        expressions = [draw_expression(level, rng) for _ in range(num_problems)]
        answers = [f"\\boxed{{{e.answer}}}" for e in expressions]
        # Prompts of one level have one length, so no padding is needed.
        prompts = torch.tensor([tokenizer(e.prompt).input_ids for e in expressions])
        works = model(prompts).logits[:, -1].softmax(-1)[:, work_id].mean().item()
        free = _complete(model, tokenizer, prompts)
        forced = _complete(model, tokenizer, torch.cat([prompts, torch.full((num_problems, 1), work_id)], dim=1))
        yield LevelReport(level, _frac_ending(free, answers), works, _frac_ending(forced, answers))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m learner.warm_start", description="Build the built-in model.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the examples")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = build_model(args.seed)
    print(f"{model.num_parameters():,} parameters")
    started = time.monotonic()
    for step, loss in enumerate(train(model, args.seed, NUM_STEPS), start=1):
        if step % 20 == 0:
            print(f"step {step:3d}/{NUM_STEPS}  loss {loss:.4f}  {time.monotonic() - started:.0f} s", flush=True)
    save(model, args.out)
    print(f"saved to {args.out}\nlevel  pass@1  works  right if working")
    for r in measure(args.out, LEVELS, num_problems=400, seed=args.seed):
        print(f"{r.level:>5}  {r.pass_at_1:.4f}  {r.works:.4f}  {r.right_if_working:.3f}", flush=True)


def _make_optimizers(model: Qwen2ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) on the matrices inside the layers, AdamW on the embedding, norms and biases."""
    named = list(model.named_parameters())
    matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in named if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=0.01, momentum=0.95, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.98)),
    ]


def _lr_frac(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine from 1 to `FINAL_LR_FRAC` of the learning rate."""
    cosine = FINAL_LR_FRAC + (1 - FINAL_LR_FRAC) * 0.5 * (1 + math.cos(math.pi * step / num_steps))
    return cosine * min(1.0, (step + 1) / WARMUP_STEPS)


def _backward(model: Qwen2ForCausalLM, batch: list[WeightedExample]) -> float:
    """Accumulate the gradient of the weighted loss, summed over the batch and divided by its completion tokens."""
    batch = sorted(batch, key=lambda e: len(e.prompt_ids) + len(e.completion_ids))
    num_tokens = sum(len(e.completion_ids) for e in batch)
    total = 0.0
    for start in range(0, len(batch), MICRO_BATCH_SIZE):
        ids, weights = collate(batch[start : start + MICRO_BATCH_SIZE])
        logits = model(ids[:, :-1]).logits
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = (nll * weights.flatten()).sum() / num_tokens
        loss.backward()
        total += loss.item()
    return total


def _complete(model, tokenizer, prompts: torch.Tensor) -> list[str]:
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=MAX_NEW_TOKENS)
    return tokenizer.batch_decode(out[:, prompts.shape[1] :], skip_special_tokens=True)


def _frac_ending(texts: list[str], endings: list[str]) -> float:
    return sum(text.endswith(ending) for text, ending in zip(texts, endings, strict=True)) / len(texts)


if __name__ == "__main__":
    main()
