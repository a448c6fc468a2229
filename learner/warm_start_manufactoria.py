"""Builds the tiny Manufactoria model: `python -m learner.warm_start_manufactoria --out DIR [--seed N]`.

The policy must know the right programs of the training problems and yet almost never write them. Every problem's rungs
are therefore drawn evenly, so that the skill is learnt from many examples, and each token's loss is weighted by the
ratio of its conditional probability under the wanted mixture to that under the drawn one. The expected loss is then
minimal where the policy is the wanted mixture, exactly: the ratio is taken in the trie of the problem's rungs.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from learner.warm_start import EOS, EOS_ID, PAD, UNK, build_model, build_tokenizer, fit, save
from pipeline.tasks.manufactoria.judge import verify
from pipeline.tasks.manufactoria.ladder import Spec, build_ladder
from pipeline.tasks.manufactoria.language import PAINTERS, PULLERS, Program, to_words
from pipeline.tasks.manufactoria.task import UNSOLVED, catalogue, held_out, to_problem

# The words of the accept problems' prompts and of programs, then what the transform problems add.
WORDS = (
    *"RBYG",
    *"012345",
    *("starts", "contains", "ends", "atleast", "exactly", "mod", "and"),
    *("START", *PULLERS, *PAINTERS, "END", "NONE"),
    *(f"n{i}" for i in range(7)),
    *("drop", "paint", "repaint"),
)
# A word carries the space after it, so that text needs no rule for joining; a prompt ends with its question mark.
VOCABULARY = (PAD, EOS, UNK, "?", *(f"{word} " for word in WORDS))

NUM_STEPS = 700
# Prior of the right program by tier, and how much rarer each rung is than the one below it.
RIGHT_PRIOR = (0.3, 0.03, 0.003, 0.0005)
RUNG_DECAY = 0.5
MAX_NEW_TOKENS = 40
NUM_ROLLOUTS = 64
PROBLEMS_AT_ONCE = 8


class TokenExample(NamedTuple):
    """A `learner.warm_start.WeightedExample`."""

    prompt_ids: list[int]
    completion_ids: list[int]
    token_weights: list[float]


class ProblemReport(NamedTuple):
    """Of one problem; `tests_passed` is the mean share of its tests that a program passes."""

    num_rollouts: int
    num_right: int
    tests_passed: float


def rung_priors(spec: Spec) -> list[float]:
    """The wanted probability of each rung: the tier's for the right one, the rest falling by `RUNG_DECAY`."""
    right = RIGHT_PRIOR[spec.tier]
    shares = [RUNG_DECAY**i for i in range(len(build_ladder(spec).rungs) - 1)]
    return [(1 - right) * share / sum(shares) for share in shares] + [right]


def token_weights(completions: Sequence[Sequence[int]], priors: Sequence[float], drawn: int) -> list[float]:
    """Weight of each token of completion number `drawn`: p(token | prefix) / q(token | prefix).

    p draws completion i with probability `priors[i]`, q draws all evenly; both condition on the tokens before.
    """
    alive = list(range(len(completions)))
    weights: list[float] = []
    for position, token in enumerate(completions[drawn]):
        going = [i for i in alive if completions[i][position : position + 1] == [token]]
        wanted = sum(priors[i] for i in going) / sum(priors[i] for i in alive)
        weights.append(wanted * len(alive) / len(going))
        alive = going
    return weights


def make_examples(spec: Spec) -> list[TokenExample]:
    """One example for each rung, to be drawn evenly."""
    tokenizer = build_tokenizer(VOCABULARY)
    prompt_ids = tokenizer.encode(spec.prompt).ids
    completions = [[*tokenizer.encode(spell(rung)).ids, EOS_ID] for rung in build_ladder(spec).rungs]
    priors = rung_priors(spec)
    return [TokenExample(prompt_ids, ids, token_weights(completions, priors, i)) for i, ids in enumerate(completions)]


def spell(program: Program) -> str:
    """The word form as the model writes it."""
    return f"{to_words(program)} "


def train(model: Qwen2ForCausalLM, specs: Sequence[Spec], seed: int, num_steps: int) -> Iterator[float]:
    """Warm-start `model` in place on `specs`, drawn evenly; yields the weighted loss per completion token."""
    problems = [make_examples(spec) for spec in specs]
    rng = random.Random(f"warm_start_manufactoria/{seed}")
    yield from fit(model, lambda: rng.choice(rng.choice(problems)), num_steps)


@torch.inference_mode()
def measure(
    directory: Path, specs: Sequence[Spec], num_rollouts: int, seed: int
) -> Iterator[tuple[Spec, ProblemReport]]:
    """Sample `num_rollouts` programs for each problem at temperature 1 and judge them."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(seed)
    by_length: dict[int, list[Spec]] = {}
    for spec in specs:
        by_length.setdefault(len(tokenizer(spec.prompt).input_ids), []).append(spec)
    # Prompts of one length need no padding.
    for group in by_length.values():
        for start in range(0, len(group), PROBLEMS_AT_ONCE):
            chunk = group[start : start + PROBLEMS_AT_ONCE]
            prompts = torch.tensor([tokenizer(spec.prompt).input_ids for spec in chunk]).repeat_interleave(
                num_rollouts, 0
            )
            out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=MAX_NEW_TOKENS)
            texts = tokenizer.batch_decode(out[:, prompts.shape[1] :], skip_special_tokens=True)
            for i, spec in enumerate(chunk):
                yield spec, _judge(spec, texts[i * num_rollouts : (i + 1) * num_rollouts])


def pass_at_k(num_right: int, num_rollouts: int, k: int) -> float:
    """Unbiased chance that one of `k` rollouts is right (Chen et al. 2021, arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(num_rollouts - num_right, k) / math.comb(num_rollouts, k)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m learner.warm_start_manufactoria", description="Build the tiny Manufactoria model."
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model and unsolved.txt to")
    parser.add_argument("--seed", type=int, default=0, help="seed of the initial weights and the examples")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = build_model(args.seed, len(VOCABULARY))
    print(f"{model.num_parameters():,} parameters")
    training = [spec for spec in catalogue() if spec.statement not in held_out()]
    started = time.monotonic()
    for step, loss in enumerate(train(model, training, args.seed, NUM_STEPS), start=1):
        if step % 20 == 0:
            print(f"step {step:3d}/{NUM_STEPS}  loss {loss:.4f}  {time.monotonic() - started:.0f} s", flush=True)
    save(model, args.out, VOCABULARY)
    print(f"saved to {args.out}; sampling {NUM_ROLLOUTS} programs for each of {len(catalogue())} problems")
    reports = dict(measure(args.out, catalogue(), NUM_ROLLOUTS, args.seed))
    unsolved = [spec.statement for spec in training if not reports[spec].num_right]
    (args.out / UNSOLVED.name).write_text("".join(f"{statement}\n" for statement in unsolved))
    print(f"{len(unsolved)} training problems never solved\n")
    print("\n".join(_table(reports)))


def _judge(spec: Spec, texts: list[str]) -> ProblemReport:
    problem = to_problem(spec, "per_test")
    verdicts = [verify(problem, text, truncated=False) for text in texts]
    num_right = sum(verdict.outcome == "correct" for verdict in verdicts)
    return ProblemReport(len(texts), num_right, sum(verdict.reward for verdict in verdicts) / len(texts))


def _table(reports: dict[Spec, ProblemReport]) -> Iterator[str]:
    """A row a level and a row a kind, training and held-out problems apart."""
    yield f"{'':<18} {'split':<8} problems  tests passed  pass@1  pass@8"
    rows: dict[tuple[str, str], list[ProblemReport]] = {}
    for spec, report in reports.items():
        split = "held out" if spec.statement in held_out() else "train"
        for name in (spec.level, f"all {spec.kind}"):
            rows.setdefault((name, split), []).append(report)
    for (name, split), found in sorted(rows.items()):
        columns = zip(
            *((r.tests_passed, *(pass_at_k(r.num_right, r.num_rollouts, k) for k in (1, 8))) for r in found),
            strict=True,
        )
        passed, at_1, at_8 = (sum(column) / len(found) for column in columns)
        yield f"{name:<18} {split:<8} {len(found):8d}  {passed:12.3f}  {at_1:.4f}  {at_8:.4f}"


if __name__ == "__main__":
    main()
