"""Weights that arrive while the real server generates."""

import numpy as np
import pytest
from tiny_models import kept_cache_logprobs, tiny_model, work

from learner.model import completion_logprobs
from learner.packing import collate

# One process of pytest-xdist for all tests of the real server; it starts within half a minute on a quiet machine.
pytestmark = [pytest.mark.xdist_group("sglang"), pytest.mark.timeout(600)]
LENGTH = 300


def test_16_long_requests_run_through_6_updates(attach):
    bench = attach()
    versions = {v: tiny_model("qwen2", v) for v in range(7)}
    bench.load(0)
    bench.engine.submit([work(i, "abcdefg"[: 1 + i % 7], max_new_tokens=LENGTH) for i in range(16)])
    ended = []
    for version in range(1, 7):
        for _ in range(8):
            ended += bench.engine.step()
        bench.load(version)
    ended += bench.step_until(16 - len(ended))
    assert sorted(r.attempt_id for r in ended) == list(range(16))
    spans = [[s.policy_version for s in r.version_spans] for r in ended]
    assert all(s == sorted(s) for s in spans)
    assert sum(len(s) > 1 for s in spans) == 16
    for rollout in ended:
        rollout.check()
        assert rollout.num_tokens == LENGTH
        np.testing.assert_allclose(
            rollout.logprob_array(), kept_cache_logprobs(versions, rollout, 1.0), atol=1e-4, rtol=0
        )


def test_ratios_stay_one_over_20_updates_with_the_same_weights(attach):
    bench = attach()
    model = tiny_model("qwen2", 0)
    bench.load(0)
    bench.engine.submit([work(i, "abcd"[: 1 + i % 4], max_new_tokens=LENGTH, temperature=0.6) for i in range(16)])
    ended = []
    for version in range(1, 21):
        bench.load(version, seed=0)
        ended += bench.engine.step()
    ended += bench.step_until(16 - len(ended))
    assert max(s.policy_version for r in ended for s in r.version_spans) > 5
    batch = collate([r.prompt_array() for r in ended], [r.completion_array() for r in ended])
    logprobs = completion_logprobs(model, batch, 0.6)[0].detach().numpy()
    engine = np.concatenate([r.logprob_array() for r in ended])
    assert engine.shape == logprobs.shape
    np.testing.assert_allclose(np.exp(logprobs - engine), 1.0, atol=1e-4)
