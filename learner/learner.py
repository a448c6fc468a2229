"""The one mutable object of the learner: a model, its optimizer and how many steps they have taken."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.adapters import adapter_tensors, merged
from learner.advantages import Chain, batch_advantages, has_zero_variance
from learner.corrections import k3_divergence, log_ratios, second_moment_bound
from learner.critic import Critic
from learner.losses import Tokens, batch_loss, rollout_normalizers
from learner.model import canary_batch, completion_hidden, completion_logprobs, share_prompts
from learner.packing import TokenBatch, collate, micro_batches, shares
from learner.ranks import Ranks, alone
from learner.regularizers import entropy_loss, kl_loss
from learner.report import StepReport, group_metrics, lost_engines, token_metrics
from learner.sharding import gathered, gathered_state, scattered
from learner.shared_prompts import shares_prompts
from learner.staleness import TrainedTokens, wrong_logprobs
from learner.subset import train_subsets
from pipeline.errors import RunFailed, WireError
from pipeline.learner_config import LearnerConfig, M2poConfig, mask_name
from pipeline.messages import Group, Rollout

ADAM_EPS = 1e-8
# A diverged model refuses every batch: better an end with a reason than a run that learns nothing for hours.
MAX_SKIPPED_IN_A_ROW = 8


@dataclass(frozen=True, slots=True)
class _Row:
    """One rollout with what its tokens are multiplied by; `has_variance`: its group's rewards are not all equal.

    Only `sampled` tokens, [T] bool, are trained: forced ones are read by the model and are in no sum or mean. So
    `advantages` has one for each of these.
    """

    rollout: Rollout
    prompt_ids: np.ndarray
    completion_ids: np.ndarray
    sampled: np.ndarray
    reward: float
    advantages: np.ndarray
    normalizer: float
    has_variance: bool

    @property
    def num_inputs(self) -> int:
        return self.prompt_ids.size + self.completion_ids.size - 1


class Learner:
    """Takes batches of groups, one optimizer step each.

    Every call of `step` makes `policy_version` one higher, also when the update is refused: the version counts
    consumed batches, so lag and the number of remaining steps mean the same on both sides of the wire, and a refused
    step simply publishes the same weights again.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: LearnerConfig,
        temperature: float,
        policy_version: int = 0,
        reference: PreTrainedModel | None = None,
        ranks: Ranks | None = None,
    ):
        """`reference` is what [learner.kl] needs when its coefficient is above 0; it is whole on every rank. With
        several `ranks` every method is for all of them to call, with the same arguments.
        """
        assert reference is not None or not config.kl.coef
        self.model = model
        self.reference = reference
        self.ranks = ranks or alone()
        self.config = config
        self.temperature = temperature
        self.policy_version = policy_version
        self.num_skipped = 0
        self.num_skipped_in_a_row = 0
        self._alarmed = False
        if not self.ranks.shards:  # else it was tried while it was whole
            share_prompts(model)
        if reference is not None:
            share_prompts(reference)
        self.critic = None
        if config.critic is not None:
            weight: Tensor = model.get_input_embeddings().weight  # pyright: ignore[reportAssignmentType, reportOptionalMemberAccess]
            dtype = torch.promote_types(weight.dtype, torch.float32)
            self.critic = Critic(weight.shape[1], config.critic, model.device, dtype)
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=config.betas, eps=ADAM_EPS, weight_decay=config.weight_decay
        )

    def step(
        self,
        groups: Sequence[Group],
        num_attempts: int | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> StepReport:
        """Train on `groups`; `on_progress` is called after every micro-batch (a step of a large model takes minutes).

        `num_attempts` rollouts were launched to obtain the groups; without it, those of the groups' chains.
        The update is refused, and the report carries a warning, when loss or gradient is not finite or when an
        engine's tokens are not from this policy's recent past. Raises WireError for a rollout without a prompt,
        ConfigError for rewards that the advantage cannot take and RunFailed after 8 refusals in a row. On ranks other
        than the first the metrics are those of its own rollouts.
        """
        started = time.perf_counter()
        lr = self._set_lr()
        if num_attempts is None:
            num_attempts = sum(group.num_attempts for group in groups)
        advantages = batch_advantages([_chain(group) for group in groups], self.config.advantage)
        groups, advantages, num_attempts = train_subsets(groups, advantages, num_attempts, self.config.subset)
        rows = self._rows(groups, advantages, num_attempts)
        rows, critic_metrics = self._criticized(rows, on_progress)
        engine_ids = sorted({row.rollout.engine_id for row in rows})
        loss, tokens = self._accumulate(rows, engine_ids, on_progress)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        self.ranks.add_gradients(parameters)
        grad_norm = float(gathered(torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)))
        # Only the first rank has seen every token; a step that some take and others refuse would split the policy.
        refusal = self._refusal(loss, grad_norm, tokens, engine_ids) if self.ranks.is_first else ""
        warning = self.ranks.share(refusal.encode() if self.ranks.is_first else None).decode()
        # Without a gradient (no tokens, no advantage) Adam's momentum alone would move the policy: no data asks for it.
        if not warning and grad_norm > 0:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.policy_version += 1
        self._count_skipped(warning)
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr,
            **token_metrics(tokens, [mask_name(mask) for mask in self.config.corrections.masks]),
            **group_metrics(groups, advantages),
            **critic_metrics,
            "skipped": float(bool(warning)),
            "num_skipped": float(self.num_skipped),
            "step_s": time.perf_counter() - started,
        }
        return StepReport(self.policy_version, metrics, warning, self._alarm(tokens))

    @torch.no_grad()
    def canary(self) -> tuple[Tensor, Tensor]:
        """Fixed token ids, [T], and this policy's logprobs of all but the first, [T-1], at temperature 1."""
        ids, batch = canary_batch(self.model)
        logprobs, _ = completion_logprobs(self.model, batch, temperature=1.0)
        return ids.cpu(), logprobs.cpu()

    def state_dict(self) -> dict[str, Tensor]:
        """The whole weights by the model's own names, as engines and checkpoints take them; on the first rank only."""
        return merged(gathered_state(self.model, self.ranks), self.config.lora)

    def adapter_tensors(self) -> dict[str, Tensor]:
        """The adapters of [learner.lora] by name, none without it; whole, on the first rank only."""
        return adapter_tensors(gathered_state(self.model, self.ranks))

    def load_adapter_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `adapter_tensors` gave; raises KeyError for one that this model does not have."""
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, tensor in tensors.items():
                parameters[name].copy_(scattered(tensor, parameters[name]))

    def optimizer_tensors(self) -> dict[str, Tensor]:
        """Adam's state as `parameter name/field`; empty before the first update."""
        return {
            f"{name}/{field}": gathered(value)
            for name, parameter in self.model.named_parameters()
            for field, value in self.optimizer.state.get(parameter, {}).items()
        }

    def load_optimizer_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Take over what `optimizer_tensors` gave; learning rate and betas stay those of the config."""
        parameters = dict(self.model.named_parameters())
        for key, value in tensors.items():
            name, _, field = key.rpartition("/")
            parameter = parameters[name]
            self.optimizer.state[parameter][field] = value if field == "step" else scattered(value, parameter)

    def _set_lr(self) -> float:
        waits = self.config.critic.warmup_steps if self.config.critic is not None else 0
        warmup = min(1.0, max(0, self.policy_version + 1 - waits) / max(self.config.warmup_steps, 1))
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.config.scaled_lr * warmup
        return self.config.scaled_lr * warmup

    def _rows(self, groups: Sequence[Group], advantages: Sequence[np.ndarray], num_attempts: int) -> list[_Row]:
        """Every rollout that has a token to train; those without still count in the normalisers."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        group_index = np.repeat(np.arange(len(groups)), [len(group.rollouts) for group in groups])
        num_tokens = np.array([rollout.num_sampled for rollout in rollouts], dtype=np.int64)
        normalizers = rollout_normalizers(num_tokens, group_index, self.config.loss.aggregation, num_attempts)
        flat_advantages = np.concatenate([np.zeros(0), *advantages])
        rewards = [group.chain_rewards[draw] for group in groups for draw in group.draw_indices]
        mixed = [not has_zero_variance(np.asarray(g.chain_rewards)) for g in groups for _ in g.rollouts]
        rows = [
            _Row(
                rollout=rollout,
                prompt_ids=rollout.prompt_array(),
                completion_ids=rollout.completion_array(),
                sampled=rollout.sampled_array(),
                reward=reward,
                advantages=np.full(rollout.num_sampled, advantage),
                normalizer=float(normalizer),
                has_variance=mix,
            )
            for rollout, reward, advantage, normalizer, mix in zip(
                rollouts, rewards, flat_advantages, normalizers, mixed, strict=True
            )
            if rollout.num_sampled
        ]
        for row in rows:
            if not row.prompt_ids.size:
                raise WireError(
                    f"attempt {row.rollout.attempt_id}: nothing predicts its first token; the prompt is empty"
                )
        return rows

    @torch.no_grad()
    def _hidden_states(self, rows: Sequence[_Row], on_progress: Callable[[], None]) -> list[Tensor]:
        """[T, H] of every row's trained tokens, in float32 or above."""
        found: dict[int, Tensor] = {}
        for indices in self._cut(rows):
            own = [rows[i] for i in indices]
            hidden = completion_hidden(self.model, self._collate(own), getattr(torch, self.config.dtype))
            hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
            found |= zip(indices, hidden.split([row.advantages.size for row in own]), strict=True)
            on_progress()
        return [found[i] for i in range(len(rows))]

    def _criticized(self, rows: list[_Row], on_progress: Callable[[], None]) -> tuple[list[_Row], dict[str, float]]:
        """The rows with advantages by the critic, which then learns from them, and its figures; without one, as is."""
        if self.critic is None or not rows:
            return rows, {}
        lengths = np.array([row.advantages.size for row in rows])
        hidden = torch.cat(self._hidden_states(rows, on_progress))
        advantages, figures = self.critic.judge(hidden, np.array([row.reward for row in rows]), lengths)
        clip = self.config.advantage.clip
        by_row = np.split(np.clip(advantages, -clip, clip), np.cumsum(lengths)[:-1])
        return [replace(row, advantages=own) for row, own in zip(rows, by_row, strict=True)], figures

    def _accumulate(
        self, rows: Sequence[_Row], engine_ids: Sequence[str], on_progress: Callable[[], None]
    ) -> tuple[float, TrainedTokens]:
        """Add the batch's gradient to the parameters, one micro-batch after the other."""
        batches = self._micro_batches(rows)
        bound = self._moment_bound(batches)
        loss, parts = 0.0, []
        for batch in batches:
            if batch:
                part_loss, tokens = self._forward_backward(batch, engine_ids, bound)
                loss += part_loss
                parts.append(tokens)
            else:
                self._forward_backward_nothing()
            on_progress()
        num_masks = len(self.config.corrections.masks)
        own = TrainedTokens.joined(parts, num_masks)
        every = [TrainedTokens(**part) for part in self.ranks.collect(own.tensors())]
        return self.ranks.total(loss), TrainedTokens.joined([t for t in every if t.lags.numel()], num_masks)

    def _micro_batches(self, rows: Sequence[_Row]) -> list[list[_Row]]:
        """This rank's share of the rows, cut by the token budget.

        Where the model is sharded every rank takes part in every pass of every other, so the shorter lists are filled
        up with empty micro-batches.
        """
        cut = []
        lengths = [row.num_inputs for row in rows]
        for share in shares(lengths, [row.prompt_ids for row in rows], self.ranks.size):
            own = [rows[i] for i in share]
            cut.append([[own[i] for i in chosen] for chosen in self._cut(own)])
        missing = max(map(len, cut)) - len(cut[self.ranks.rank]) if self.ranks.shards else 0
        return cut[self.ranks.rank] + [[] for _ in range(missing)]

    def _cut(self, rows: Sequence[_Row]) -> list[list[int]]:
        """Indices of the rows of each micro-batch; padding counts if one of the models that read it pads."""
        models = [self.model] if self.reference is None else [self.model, self.reference]
        prompts = [row.prompt_ids for row in rows] if all(map(shares_prompts, models)) else None
        return micro_batches([row.num_inputs for row in rows], self.config.micro_batch_tokens, prompts)

    @torch.no_grad()
    def _moment_bound(self, batches: Sequence[Sequence[_Row]]) -> float:
        """M2PO's bound over the whole batch, for which every ratio must be known before the first gradient."""
        if not isinstance(self.config.loss, M2poConfig):
            return math.inf
        log_rho, advantages = [torch.zeros(0)], [torch.zeros(0)]
        for batch in batches:
            if not batch:
                self.canary()
                continue
            tokens, _ = self._score(batch)
            log_rho.append(log_ratios(tokens.logprobs, tokens.engine_logprobs).cpu())
            advantages.append(tokens.advantages.cpu())
        every = self.ranks.collect({"log_rho": torch.cat(log_rho), "advantages": torch.cat(advantages)})
        log_rho, advantages = (torch.cat([part[name] for part in every]) for name in ("log_rho", "advantages"))
        bound = second_moment_bound(log_rho, advantages, self.config.loss.max_moment)
        return float(self.ranks.share(repr(bound).encode() if self.ranks.is_first else None))

    def _forward_backward_nothing(self) -> None:
        _, batch = canary_batch(self.model)
        logprobs, _ = completion_logprobs(self.model, batch, temperature=1.0)
        (logprobs.sum() * 0.0).backward()

    def _score(self, rows: Sequence[_Row]) -> tuple[Tokens, Tensor]:
        """The rows' tokens under the current policy and the entropies of the distributions they are from."""
        device = self.model.device
        logprobs, entropies = completion_logprobs(
            self.model,
            self._collate(rows),
            self.temperature,
            entropy_gradient=bool(self.config.entropy.coef),
            dtype=getattr(torch, self.config.dtype),
        )
        counts = torch.tensor([row.rollout.num_sampled for row in rows])

        def per_token(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).repeat_interleave(counts).to(device, logprobs.dtype)

        engine_logprobs = torch.from_numpy(np.concatenate([r.rollout.logprob_array()[r.sampled] for r in rows]))
        versions = torch.from_numpy(np.concatenate([r.rollout.version_array()[r.sampled] for r in rows]))
        tokens = Tokens(
            logprobs=logprobs,
            engine_logprobs=engine_logprobs.to(device, logprobs.dtype),
            advantages=torch.from_numpy(np.concatenate([r.advantages for r in rows])).to(device, logprobs.dtype),
            normalizers=per_token([row.normalizer for row in rows]),
            rows=torch.arange(len(rows)).repeat_interleave(counts).to(device),
            lags=(self.policy_version - versions).to(device),
        )
        return tokens, entropies

    def _collate(self, rows: Sequence[_Row]) -> TokenBatch:
        batch = collate([r.prompt_ids for r in rows], [r.completion_ids for r in rows], [r.sampled for r in rows])
        return batch.to(self.model.device)

    def _forward_backward(
        self, rows: Sequence[_Row], engine_ids: Sequence[str], moment_bound: float
    ) -> tuple[float, TrainedTokens]:
        tokens, entropies = self._score(rows)
        objective = batch_loss(tokens, self.config.loss, self.config.corrections, moment_bound)
        regularization, ref_kl = self._regularization(rows, tokens, entropies, ~objective.masked.any(1))
        loss = objective.loss + regularization
        loss.backward()
        engine_index = torch.tensor([engine_ids.index(row.rollout.engine_id) for row in rows])
        return float(loss.detach()), TrainedTokens(
            learner_logprobs=tokens.logprobs.detach().cpu(),
            engine_logprobs=tokens.engine_logprobs.cpu(),
            entropies=entropies.detach().cpu(),
            ref_kl=ref_kl.cpu(),
            lags=tokens.lags.cpu(),
            engine_index=engine_index[tokens.rows.cpu()],
            weights=objective.weights.cpu(),
            applied=objective.applied.cpu(),
            masked=objective.masked.cpu(),
        )

    def _regularization(
        self, rows: Sequence[_Row], tokens: Tokens, entropies: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The KL and entropy terms of tokens that no mask leaves out, and every token's divergence from the reference,
        [N], 0 without one.
        """
        kl, entropy = self.config.kl, self.config.entropy
        has_variance = torch.tensor([row.has_variance for row in rows], device=kept.device)[tokens.rows]
        loss, ref_kl = tokens.logprobs.new_zeros(()), torch.zeros_like(entropies)
        if self.reference is not None and kl.coef:
            with torch.no_grad():
                ref_logprobs, _ = completion_logprobs(self.reference, self._collate(rows), self.temperature)
            takes_part = kept & (has_variance | kl.zero_variance)
            loss = loss + kl_loss(tokens, ref_logprobs, takes_part, kl, self.config.corrections)
            ref_kl = k3_divergence(ref_logprobs, tokens.logprobs.detach())
        if entropy.coef:
            loss = loss + entropy_loss(tokens, entropies, kept & (has_variance | entropy.zero_variance), entropy)
        return loss, ref_kl

    def _refusal(self, loss: float, grad_norm: float, tokens: TrainedTokens, engine_ids: Sequence[str]) -> str:
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return f"step {self.policy_version + 1} skipped: loss {loss:.4g} and gradient norm {grad_norm:.4g}"
        if lost := lost_engines(tokens, engine_ids):
            return (
                f"step {self.policy_version + 1} skipped: the policy would hardly have sampled the tokens of {lost}; "
                "that engine serves other weights, or its logprobs are wrong"
            )
        return ""

    def _alarm(self, tokens: TrainedTokens) -> str:
        """Told once, when it begins: a whole run of identical warnings would hide every other."""
        wrong = wrong_logprobs(tokens)
        is_new, self._alarmed = bool(wrong) and not self._alarmed, bool(wrong)
        return f"step {self.policy_version}: {wrong}" if is_new else ""

    def _count_skipped(self, warning: str) -> None:
        self.num_skipped_in_a_row = self.num_skipped_in_a_row + 1 if warning else 0
        self.num_skipped += bool(warning)
        if self.num_skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RunFailed(f"{self.num_skipped_in_a_row} optimizer steps in a row were refused; the last: {warning}")


def _chain(group: Group) -> Chain:
    rewards = np.asarray(group.chain_rewards, dtype=np.float64)
    return Chain(rewards, np.asarray(group.draw_indices, dtype=np.int64), group.round_sizes)
