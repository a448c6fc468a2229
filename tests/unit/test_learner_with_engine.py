"""The learner on rollouts of the real embedded engine: ratios under weights in flight, and lag 0 as a plain loop."""

import math

import msgspec
import numpy as np
import pytest
import torch
from tiny_models import publish, save_model_dir, tiny_config, tiny_model, work

from learner.learner import Learner
from pipeline.engines.batching import BatchingEngine
from pipeline.engines.embedded.decoder import EmbeddedDecoder
from pipeline.learner_config import EntropyConfig, KlConfig, LearnerConfig
from pipeline.messages import Group, Interruption, Verdict, pack_logprobs
from pipeline.tokenization import PromptCodec
from pipeline.weights import WeightPublisher

torch.set_num_threads(1)
GROUP_SIZE = 4  # as `work` numbers chains
PROMPTS = ("a", "bcd", "efghij")


class Loop:
    """An engine and the directory through which it gets weights."""

    def __init__(self, directory, slots: int = 64):
        self.model_dir = save_model_dir(directory / "model", "qwen2")
        decoder = EmbeddedDecoder(tiny_config("qwen2"), slots)
        self.engine = BatchingEngine(decoder, PromptCodec(self.model_dir), slots, seed=3, engine_id="engine-0")
        self.publisher = WeightPublisher(directory / "weights")
        self.next_attempt = 0

    def load(self, model, version: int) -> None:
        report = self.engine.load_weights(publish(self.publisher, model, version, self.model_dir))
        assert report.canary_error < 1e-4

    def submit(self, num_groups: int, temperature: float = 1.0, tokens: int = 12) -> None:
        for index in range(num_groups):
            first, prompt = self.next_attempt, PROMPTS[index % len(PROMPTS)]
            self.engine.submit([work(first + i, prompt, tokens, temperature) for i in range(GROUP_SIZE)])
            self.next_attempt += GROUP_SIZE

    def drain(self) -> list:
        ended = []
        while self.engine.num_in_flight:
            ended += self.engine.step()
        return ended


def groups_of(rollouts) -> list[Group]:
    """One group a chain; the reward is the parity of the first token, so that a group has both kinds as a rule."""
    chains: dict[int, list] = {}
    for rollout in sorted(rollouts, key=lambda r: r.attempt_id):
        chains.setdefault(rollout.chain_id, []).append(rollout)
    groups = []
    for chain_id, members in chains.items():
        rewards = tuple(float(r.completion_array()[0] % 2) for r in members)
        verdicts = tuple(Verdict("correct" if r else "incorrect", r) for r in rewards)
        draws, problem = tuple(range(len(members))), work(0, "a").problem
        groups.append(Group(chain_id, problem, tuple(members), verdicts, draws, rewards, (len(members),)))
    return groups


def drifted(steps: int, scale: float = 0.02):
    """The base model after `steps` random steps of its weights."""
    model = tiny_model("qwen2", seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(steps):
            for parameter in model.parameters():
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def frozen(model, version: int, temperature: float = 1.0) -> Learner:
    return Learner(model, LearnerConfig(lr=0.0), temperature, policy_version=version)


@pytest.fixture(scope="module")
def in_flight_groups(tmp_path_factory):
    """600 rollouts at temperature 0.8 during which versions 0 to 5 were loaded between tokens."""
    loop, ended = Loop(tmp_path_factory.mktemp("in_flight")), []
    loop.load(drifted(0), 0)
    loop.submit(150, temperature=0.8)
    for version in range(1, 6):
        for _ in range(16):
            ended += loop.engine.step()
        loop.load(drifted(version), version)
    groups = groups_of(ended + loop.drain())
    loop.publisher.close()
    return groups


def test_mean_ratio_is_one_in_every_lag_bucket(in_flight_groups):
    assert max(len(r.version_spans) for g in in_flight_groups for r in g.rollouts) >= 2
    report = frozen(drifted(6), version=6, temperature=0.8).step(in_flight_groups)
    buckets = [name.partition("/")[2] for name in report.metrics if name.startswith("ratio_mean/")]
    assert {"lag_1", "lag_2", "lag_3_4", "lag_5_8"} <= set(buckets)
    for bucket in buckets:
        mean, error = report.metrics[f"ratio_mean/{bucket}"], report.metrics[f"ratio_se/{bucket}"]
        assert 0 < error < 0.1 and abs(mean - 1) < 4 * error, bucket
    assert report.metrics["kl/lag_5_8"] > report.metrics["kl/lag_1"] > 0
    assert report.metrics["ess/lag_5_8"] < report.metrics["ess/lag_1"] < 1
    assert not report.alarm and not report.warning


def renormalised(group: Group) -> Group:
    """As an engine would report it that truncates its support: every logprob higher by the mass left out, a quarter."""
    logprobs = [np.minimum(r.logprob_array() + 0.3, 0.0) for r in group.rollouts]
    rollouts = [
        msgspec.structs.replace(r, engine_logprobs=pack_logprobs(raised))
        for r, raised in zip(group.rollouts, logprobs, strict=True)
    ]
    return msgspec.structs.replace(group, rollouts=tuple(rollouts))


def test_wrong_logprobs_raise_the_alarm_once_whatever_the_lag(in_flight_groups):
    learner = frozen(drifted(6), version=6, temperature=0.8)
    wrong = [renormalised(group) for group in in_flight_groups]
    first, second = learner.step(wrong), learner.step(wrong)
    assert "wrong logprobs, not staleness" in first.alarm and "\n" not in first.alarm
    # Ratios of older tokens scatter more, so that how many standard errors theirs is off depends on the draws.
    assert all(f"at {bucket}" in first.alarm for bucket in ("lag_1", "lag_2", "lag_3_4"))
    assert not second.alarm


def test_with_lr_zero_fifty_versions_change_no_ratio(tmp_path):
    loop, learner = Loop(tmp_path), frozen(drifted(0), version=0)
    loop.load(learner.model, 0)
    loop.submit(16, tokens=50)
    ended = []
    for version in range(1, 51):
        ended += loop.engine.step()
        if len(groups := groups_of(ended)) >= 2:
            metrics = learner.step(groups[:2]).metrics
            assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
            assert metrics["ess"] == pytest.approx(1.0, abs=1e-6)
        loop.load(learner.model, version)
    loop.publisher.close()
    rollouts = ended + loop.drain()
    assert max(len(r.version_spans) for r in rollouts) > 10
    report = learner.step(groups_of(rollouts))
    assert report.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4) and report.metrics["kl"] < 1e-8


def plain_step(model, optimizer, groups, reference=None) -> None:
    """On-policy policy gradient with group-normalised rewards, as a textbook has it: no ratio, no engine logprob.

    With a reference also half the squared log ratio to it, times 0.1, and 0.05 times the entropy as a bonus.
    """
    num_tokens = sum(r.num_tokens for g in groups for r in g.rollouts)
    loss = torch.zeros(())
    for group in groups:
        rewards = np.array(group.chain_rewards)
        for rollout, reward in zip(group.rollouts, rewards, strict=True):
            advantage = (reward - rewards.mean()) / rewards.std() if rewards.std() > 0 else 0.0
            prompt, completion = torch.tensor(rollout.prompt_array()), torch.tensor(rollout.completion_array()).long()
            ids = torch.cat([prompt, completion])
            every, *others = (
                torch.log_softmax(m(input_ids=ids[None].long(), use_cache=False).logits[0, len(prompt) - 1 : -1], -1)
                for m in (model, reference)
                if m is not None
            )
            logprobs = every.gather(1, completion[:, None])
            loss = loss - advantage * logprobs.sum() / num_tokens
            for other in others:
                distances = (logprobs - other.detach().gather(1, completion[:, None])).square() / 2
                loss = loss + (0.1 * distances.sum() + 0.05 * (every.exp() * every).sum()) / num_tokens
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


TERMS = {"kl": KlConfig(coef=0.1), "entropy": EntropyConfig(coef=0.05)}


@pytest.mark.parametrize("terms", [{}, TERMS], ids=["plain", "kl and entropy"])
def test_lag_zero_is_a_plain_synchronous_loop(tmp_path, terms):
    """Ten rounds of generate, train, publish give the weights of a loop that never heard of engines or versions."""
    loop, plain, reference = Loop(tmp_path), drifted(0), drifted(3) if terms else None
    learner = Learner(drifted(0), LearnerConfig(lr=1e-4, warmup_steps=0, **terms), 1.0, reference=reference)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-4, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.0)
    start = torch.nn.utils.parameters_to_vector(plain.parameters()).detach().clone()
    for version in range(10):
        loop.load(learner.model, version)
        loop.submit(6)
        groups = groups_of(loop.drain())
        metrics = learner.step(groups).metrics
        assert metrics["lag_max"] == 0 and metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
        plain_step(plain, optimizer, groups, reference)
    loop.publisher.close()
    ours, theirs = (torch.nn.utils.parameters_to_vector(m.parameters()).detach() for m in (learner.model, plain))
    assert (theirs - start).abs().max() > 5e-4 and math.isfinite(float(ours.sum()))
    # Next to a gradient of 0 Adam makes a step out of its rounding: of ten thousand numbers one or two may be off.
    apart = (ours - theirs).abs()
    assert apart.quantile(0.999) < 1e-6 and apart.max() < 5e-5


def test_interrupted_and_continued_rollouts_have_ratio_one_under_the_weights_that_sampled_them(tmp_path):
    """A forced token in any mean, or a prefix whose logprobs moved, would show as a ratio far from 1."""
    loop, model = Loop(tmp_path), tiny_model("qwen2", seed=0)
    cut = Interruption(position=3, phrase="abc", thought_end="}", answer_tokens=3)
    loop.load(model, 0)
    loop.engine.submit([work(i, PROMPTS[i // 4 % 3], 12, interruption=cut) for i in range(32)])
    loop.engine.submit([work(i, PROMPTS[i // 4 % 3], 4) for i in range(32, 64)])
    first = loop.drain()
    unfinished = [r for r in first if r.attempt_id >= 32 and r.finish_reason == "length"]
    loop.engine.submit(
        [work(r.attempt_id, PROMPTS[r.attempt_id // 4 % 3], 9, prefix=r.as_prefix()) for r in unfinished]
    )
    continued = loop.drain()
    kept = [r for r in first if r.attempt_id not in {u.attempt_id for u in unfinished}]
    assert len(continued) > 8 and sum(bool(r.forced_spans) for r in kept) > 8
    metrics = frozen(model, version=0).step(groups_of(kept + continued)).metrics
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["num_tokens"] == sum(int(r.sampled_array().sum()) for r in kept + continued)
    assert metrics["interrupted_frac"] > 0 and metrics["grad_norm"] > 0
    loop.publisher.close()
