"""Whatever arrives, ends, is interrupted or reloaded when: rollouts are those of a plain loop, a token at a time."""

import random
from collections.abc import Collection, Sequence

import numpy as np
import pytest
import torch

from pipeline.engines.batching import BatchingEngine
from pipeline.messages import (
    Interruption,
    Prefix,
    Rollout,
    SamplingParams,
    WeightsNotice,
    Work,
    pack_ids,
    pack_logprobs,
)
from samplers.base import Problem

VOCAB = 512
SLOTS = 5
EOS = (7, 11)  # seeds have none, one or both
PHRASES = {"short": (20, 7, 21), "long": tuple(100 + i % 40 for i in range(70)), "end": (30, 11)}
THOUGHT_END = "<13>"


class LetterCodec:
    """Prompts are names of lengths, texts are lists of ids."""

    def __init__(self, eos_ids: Collection[int]):
        self.eos_ids = frozenset(eos_ids)

    def encode(self, prompt: str) -> list[int]:
        return [40 + ord(letter) for letter in prompt]

    def encode_phrase(self, phrase: str) -> tuple[int, ...]:
        return PHRASES[phrase]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(f"<{i}>" for i in ids)


def choice(context: Sequence[int], version: int) -> tuple[int, float]:
    """The token that follows for certain, and a number that stands for its logprob at temperature 1."""
    rng = random.Random(hash((version, *context)))
    return rng.choice([*EOS, 13]) if rng.random() < 0.03 else rng.randrange(20, VOCAB), -rng.randrange(1, 4096) / 256


class ScriptedDecoder:
    """Knows what each row has read; leaves its rows in any order when some retire."""

    device = torch.device("cpu")
    max_tokens = 10_000
    min_admit = 1

    def __init__(self, rng: random.Random):
        self._rng = rng
        self._version = -1
        self._rows: list[list[int]] = []  # read, the last token of a new row excepted
        self._expected: list[int] = []  # what a new row is to read first

    def load(self, notice: WeightsNotice) -> None:
        self._version = notice.policy_version

    def score(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(ids) - 1)

    def admit(self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]) -> None:
        self._rows += [list(prompt[:-1]) for prompt in prompts]

    def decode(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = torch.full((len(self._rows), VOCAB), -1e9)
        for row, (context, token) in enumerate(zip(self._rows, tokens.tolist(), strict=True)):
            context.append(token)
            chosen, logprob = choice(context, self._version)
            logits[row, chosen] = logprob
        return logits

    def retire(self, rows: Collection[int]) -> list[int]:
        order = [row for row in range(len(self._rows)) if row not in rows]
        self._rng.shuffle(order)
        self._rows = [self._rows[row] for row in order]
        return order


def plain(work: Work, codec: LetterCodec, versions: Sequence[int]) -> tuple[list[int], list[float], list[bool], str]:
    """Ids, logprobs, which of them were forced, and why it ended, if token i was decoded under `versions[i]`."""
    ids, logprobs, forced = [], [], []
    if work.prefix is not None:
        ids = np.frombuffer(work.prefix.completion_ids, "<i4").tolist()
        logprobs = np.frombuffer(work.prefix.engine_logprobs, "<f4").tolist()
        forced = [any(s.start <= i < s.end for s in work.prefix.forced_spans) for i in range(len(ids))]
    due = None if any(forced) else work.interruption
    limit, pending, prompt = work.sampling.max_new_tokens, [], codec.encode(work.problem.prompt)
    while True:
        token, logprob = choice(prompt + ids, versions[len(ids)])
        forced.append(bool(pending))
        ids.append(pending.pop(0) if pending else token)
        logprobs.append(0.0 if forced[-1] else logprob / work.sampling.temperature)
        if pending or forced[-1]:
            continue
        num_sampled = forced.count(False)
        if ids[-1] in codec.eos_ids or num_sampled == limit:
            return ids, logprobs, forced, "stop" if ids[-1] in codec.eos_ids else "length"
        if due is not None and len(ids) >= due.position:
            if due.thought_end not in codec.decode(ids):
                pending = list(codec.encode_phrase(due.phrase))
                limit = min(limit, num_sampled + due.answer_tokens)
            due = None


def any_work(rng: random.Random, attempt_id: int, earlier: Sequence[tuple[Work, Rollout]]) -> Work:
    position, answer = rng.choice([1, 2, 63, 64, 65, 90]), rng.choice([1, 2, 64, 80])
    interruption = Interruption(position, rng.choice([*PHRASES]), THOUGHT_END, answer) if rng.random() < 0.5 else None
    sampling = SamplingParams(rng.choice([0.5, 1.0, 2.0]), rng.choice([1, 2, 63, 64, 65, 128, 129, 300]))
    prompt, prefix = "abcdefg"[: rng.randint(1, 7)], None
    if earlier and rng.random() < 0.3:
        before, rollout = rng.choice(earlier)
        if rollout.num_sampled < sampling.max_new_tokens:
            prompt, prefix = before.problem.prompt, rollout.as_prefix()
    return Work(attempt_id, attempt_id, 0, Problem("", "", prompt, ""), sampling, "train", prefix, interruption)


def notice(version: int) -> WeightsNotice:
    return WeightsNotice(version, "", "", 0, "", canary_ids=pack_ids([0, 1]), canary_logprobs=pack_logprobs([0.0]))


@pytest.mark.parametrize("seed", range(3))
def test_rollouts_are_those_of_a_plain_loop(seed, monkeypatch):
    def most_likely(logits, temperatures, generator):
        best = logits.max(dim=-1)
        return best.indices, best.values / temperatures.squeeze(1)

    monkeypatch.setattr("pipeline.engines.batching.sample", most_likely)
    rng = random.Random(seed)
    codec = LetterCodec(EOS[:seed])
    engine = BatchingEngine(ScriptedDecoder(rng), codec, SLOTS, 0, "e")
    engine.load_weights(notice(0))
    reload_chance = (0.02, 1.0, 0.0)[seed]
    work: dict[int, Work] = {}
    earlier: list[tuple[Work, Rollout]] = []
    cancelled: set[int] = set()
    version = step = 0
    while engine.num_in_flight or step < 500:
        if step < 500 and rng.random() < 0.15:
            new = [any_work(rng, len(work) + i, earlier) for i in range(rng.randint(1, 4))]
            work |= {w.attempt_id: w for w in new}
            engine.submit(new)
        if work and rng.random() < 0.02:
            victim = rng.choice([*work])
            engine.cancel([victim])
            cancelled.add(victim)
        if rng.random() < reload_chance:
            version += 1
            engine.load_weights(notice(version))
        for rollout in engine.step():
            assert isinstance(rollout, Rollout)
            earlier.append((work[rollout.attempt_id], rollout))
        step += 1
    ended = {rollout.attempt_id for _, rollout in earlier}
    assert len(earlier) == len(ended) > 30 and ended | cancelled == work.keys()
    for item, rollout in earlier:
        rollout.check()
        ids, logprobs, forced, reason = plain(item, codec, rollout.version_array().tolist())
        assert rollout.completion_array().tolist() == ids
        assert rollout.logprob_array().tolist() == logprobs
        assert (~rollout.sampled_array()).tolist() == forced
        assert (rollout.finish_reason, rollout.text) == (reason, codec.decode(ids))
    lengths = [rollout.num_tokens for _, rollout in earlier]
    assert max(lengths) > 128 and any(isinstance(w.prefix, Prefix) and w.interruption for w, _ in earlier)
