"""Published methods as configs: what `ngu init --recipe NAME` writes.

A recipe sets what its source says about sampling policy, batches, advantage, loss, corrections and staleness. The task,
the model and the end of the run stay as they are: they are the user's; so does the length of a completion, unless
the source makes a rule of it.
"""

from typing import Any, Literal, NamedTuple, get_args

from pipeline.config import Config, parse_config

RecipeName = Literal["scalerl", "dapo", "grpo", "pipelinerl", "ngu", "isocompute-easy", "isocompute-hard"]
OFF = 1e6  # a clip of advantages that the source does not have: none is as large, and JSON cannot hold an infinity


class Recipe(NamedTuple):
    """`about` is the comment at the top of the file, a paragraph a line."""

    about: str
    tables: dict[str, Any]


def load_recipe(name: RecipeName) -> tuple[str, Config]:
    """The recipe's comment and its config."""
    recipe = RECIPES[name]
    about = f"Recipe {name}. {recipe.about}\n{_YOURS}"
    return about, parse_config(recipe.tables, f"recipe {name}")


_YOURS = (
    "Set [task], [model], sampling.max_new_tokens and max_steps or max_rollouts to your own: learning rate and batch "
    "size are those published for models of billions of parameters, not for the built-in job."
)

_SCALERL = Recipe(
    "ScaleRL (arXiv 2510.13786): CISPO, mean over prompts, advantages normalised by the batch, problems without "
    "variance dropped and not replaced, problems of pass rate 0.9 retired, at most 8 steps ahead; 48 problems x 16 "
    "rollouts. Logits are float32 on both sides in every run. A thought still open at a random length of 10k to 12k "
    "tokens is interrupted and has 2k left for its answer; sampling.interruption.max_tokens = 0 switches that off.\n"
    "Not available: Adam's epsilon of 1e-15; it is 1e-8. Rewards may be 0 and 1 instead of -1 and 1: normalising by "
    "the batch makes them equal.",
    {
        "sampling": {
            "max_new_tokens": 14336,
            "interruption": {"min_tokens": 10240, "max_tokens": 12288, "answer_tokens": 2048},
        },
        "sampler": {"kind": "fixed", "num_rollouts": 16, "history": {"retire_at": 0.9, "retire_min_attempts": 16}},
        "learner": {
            "lr": 5e-7,
            "weight_decay": 0.01,
            "warmup_steps": 100,
            "batch_by": "attempts",
            "batch_size": 768,
            "advantage": {"kind": "batch_standardized", "clip": OFF},
            "loss": {"kind": "cispo", "eps_max": 5.0, "aggregation": "prompt"},
        },
        "staleness": {"max_lag": 8, "policy": "correct"},
    },
)

_DAPO = Recipe(
    "DAPO (arXiv 2503.14476): clip-higher, mean over tokens, dynamic sampling (generation goes on until every group of "
    "the batch has variance), 16 rollouts a problem. A step is one of its mini-batches: 512 rollouts, 32 problems.\n"
    "Not available: the soft penalty on overlong completions, and 16 updates on one batch: each batch is used once.",
    {
        "sampler": {"kind": "fixed", "num_rollouts": 16},
        "learner": {
            "lr": 1e-6,
            "weight_decay": 0.1,
            "warmup_steps": 20,
            "batch_by": "groups",
            "batch_size": 32,
            "advantage": {"kind": "standardized", "clip": OFF},
            "loss": {"kind": "grpo", "eps_low": 0.2, "eps_high": 0.28, "aggregation": "token"},
        },
        "staleness": {"max_lag": 1},
    },
)

_GRPO = Recipe(
    "GRPO (DeepSeekMath, arXiv 2402.03300): 16 problems x 64 rollouts, group-normalised advantages, mean over "
    "rollouts, one update a batch, synchronous; groups without variance stay in the mean; the published KL term in the "
    "loss, whose gradient is that of KL(reference || policy).",
    {
        "sampler": {"kind": "fixed", "num_rollouts": 64, "drop_zero_variance": False},
        "learner": {
            "lr": 1e-6,
            "batch_by": "groups",
            "batch_size": 16,
            "advantage": {"kind": "standardized", "clip": OFF},
            "loss": {"kind": "grpo", "eps_low": 0.2, "eps_high": 0.2, "aggregation": "sequence"},
            "kl": {"coef": 0.04, "estimator": "k3"},
        },
        "staleness": {"max_lag": 0},
    },
)

_PIPELINERL = Recipe(
    "PipelineRL (arXiv 2509.19128): weights in flight, REINFORCE with the group's mean as baseline and token ratios "
    "truncated at 5, 1024 completions a step, a sum over tokens divided by the rollouts.\n"
    "Not available: the pause of updates while the ESS is under a bound; staleness.min_ess pauses launches instead. "
    "The rollouts a problem are not given in the paper; 8 is ours.",
    {
        "sampler": {"kind": "fixed", "num_rollouts": 8},
        "learner": {
            "lr": 1e-6,
            "batch_by": "attempts",
            "batch_size": 1024,
            "advantage": {"kind": "centered", "clip": OFF},
            "loss": {"kind": "reinforce_tis", "aggregation": "launched"},
            "corrections": {"level": "token", "cap": 5.0},
        },
        "staleness": {"max_lag": 8, "policy": "correct"},
    },
)

_NGU = Recipe(
    "Never Give Up (arXiv 2609.13443), the setting for DeepScaler: 8 groups of rounds of 16, retried with probability "
    "0.875 while all wrong, rounds older than 4 versions left out, baseline over the whole chain, positives anchored, "
    "surrogate at ratio 1 under token weights truncated at 2.\n"
    "A completion cut off by its length can be resumed at the next retry: sampler.seq_multiplier, off here.",
    {
        "sampler": {
            "kind": "never_give_up",
            "round_size": 16,
            "retry": "probability",
            "p_ngu": 0.875,
            "max_attempts": 0,
            "accept": "better",
            "keep_failures": 0,
            "keep_versions": 4,
            "max_retry_frac": 1.0,
            "history": {"cool_down": 0},
        },
        "learner": {
            "lr": 1e-6,
            "max_grad_norm": 1.0,
            "batch_by": "groups",
            "batch_size": 8,
            "advantage": {"kind": "centered", "rescale": "anchor", "clip": OFF},
            "loss": {"kind": "grpo", "eps_low": 0.2, "eps_high": 0.272, "proximal": "current"},
            "corrections": {"level": "token", "cap": 2.0},
        },
        "staleness": {"max_lag": 4, "policy": "correct"},
    },
)


def _isocompute(about: str, log2_largest: float) -> Recipe:
    return Recipe(
        "IsoCompute (arXiv 2603.12151): GRPO under truncated importance weights at temperature 0.6, the rollouts a "
        "problem growing with the compute spent, lr = 1e-6 sqrt(batch_size / 1024) (learner.reference_batch). " + about,
        {
            "sampling": {"temperature": 0.6},
            "sampler": {"kind": "isocompute", "a": 3.0, "b": log2_largest},
            "learner": {
                "lr": 1e-6,
                "warmup_steps": 10,
                "batch_by": "attempts",
                "batch_size": 1024,
                "reference_batch": 1024,
                "advantage": {"kind": "standardized", "clip": OFF},
                "loss": {"kind": "grpo", "proximal": "current", "aggregation": "token"},
                "corrections": {"level": "token", "cap": 2.0},
            },
        },
    )


RECIPES: dict[RecipeName, Recipe] = {
    "scalerl": _SCALERL,
    "dapo": _DAPO,
    "grpo": _GRPO,
    "pipelinerl": _PIPELINERL,
    "ngu": _NGU,
    "isocompute-easy": _isocompute(
        "Easy problems (pass rate 0.3 to 0.6): up to 512 rollouts a problem paid off.\n"
        "Add its KL and entropy terms by learner.kl.coef and learner.entropy.coef: their sizes are not published, nor "
        "are the curve's midpoint and steepness, which are ours. Not available: groups without variance in these "
        "terms, because this sampler drops them.",
        log2_largest=9.0,
    ),
    "isocompute-hard": _isocompute(
        "Hard problems (pass rate up to 0.06): no KL and no entropy term; gains end well below 512 rollouts a "
        "problem, and 128 as the largest is ours, as are the curve's midpoint and steepness.",
        log2_largest=7.0,
    ),
}
assert tuple(RECIPES) == get_args(RecipeName)
