"""TRL's GRPOTrainer on the built-in job: `torchrun … -m bench.peers.grpo DIRECTORY SETTINGS`, SETTINGS a JSON object.

The model, the problems in their order, the reward, the batch, the learning rate and its warm-up, the optimizer's betas
and the clip of gradients are those of `ngu train`; eight rollouts a problem, the whole batch on policy, no divergence
term. Writes DIRECTORY/figures.json and the weights of every few steps to DIRECTORY/models/STEP.
"""

# Installed in the peers' environment only.
# pyright: reportMissingImports=false

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from pipeline.config import Config
from pipeline.model_path import model_for_task, resolve_model_path
from pipeline.tasks.registry import make_task
from pipeline.verifiers.math import MathVerifier
from samplers.base import Problem

GROUP_SIZE = 8


@dataclass(frozen=True)
class Settings:
    """Those of `bench.suite.e2e.trl.TrlConfig`, and of the run: weights are put aside every `save_every` steps."""

    seed: int
    save_every: int
    steps: int
    processes: int
    threads: int
    micro_batch: int
    generate_batch: int
    continuous_batching: bool


@dataclass
class Progress:
    """Clocks and counts since training began."""

    started: float = 0.0
    core_started: float = 0.0
    tokens: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"generate": 0.0, "prepare": 0.0})
    marks: list[dict[str, Any]] = field(default_factory=list)

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started

        return wrapped


class Marks(TrainerCallback):
    """Writes down what each step had cost, and puts weights aside."""

    def __init__(self, progress: Progress, settings: Settings, batch_size: int, directory: Path):
        self._progress, self._settings, self._batch_size = progress, settings, batch_size
        self._models = directory / "models"
        self.trainer: GRPOTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._progress.started = time.perf_counter()
        self._progress.core_started = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step, progress = state.global_step, self._progress
        seconds = time.perf_counter() - progress.started
        spent = torch.tensor([progress.tokens, time.process_time() - progress.core_started], dtype=torch.float64)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(spent)
        tokens, core_s = spent.tolist()
        progress.marks.append(
            {
                "step": step,
                "seconds": seconds,
                "rollouts": step * self._batch_size,
                "tokens": int(tokens),
                "core_s": core_s,
            }
        )
        if step % self._settings.save_every == 0 or step == self._settings.steps:
            assert self.trainer is not None
            self.trainer.save_model(str(self._models / str(step)))


def reward(progress: Progress, max_tokens: int, eos: int) -> Callable[..., list[float]]:
    """The verdict that the run's verifier gives, inline."""
    verifier = MathVerifier()

    def rewards(
        prompts: list[str], completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        found = []
        for prompt, text, ids, gold in zip(prompts, completions, completion_ids, answer, strict=True):
            progress.tokens += len(ids)
            truncated = len(ids) >= max_tokens and ids[-1] != eos
            found.append(verifier.verify(Problem("", "show_your_work", prompt, gold), text, truncated).reward)
        return found

    return rewards


def arguments(settings: Settings, config: Config, directory: Path) -> GRPOConfig:
    learner = config.learner
    return GRPOConfig(
        output_dir=str(directory / "trainer"),
        seed=settings.seed,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=learner.batch_size // (settings.micro_batch * settings.processes),
        generation_batch_size=settings.generate_batch,
        num_generations=GROUP_SIZE,
        max_completion_length=config.sampling.max_new_tokens,
        temperature=config.sampling.temperature,
        top_k=0,
        top_p=1.0,
        shuffle_dataset=False,
        use_transformers_continuous_batching=settings.continuous_batching,
        learning_rate=learner.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=learner.warmup_steps,
        adam_beta1=learner.betas[0],
        adam_beta2=learner.betas[1],
        weight_decay=learner.weight_decay,
        max_grad_norm=learner.max_grad_norm,
        beta=0.0,
        loss_type="dapo",
        use_cpu=True,
        ddp_backend="gloo" if settings.processes > 1 else None,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        save_strategy="no",
        logging_steps=settings.steps,
        report_to="none",
        disable_tqdm=True,
    )


def main(directory: Path, settings: Settings) -> None:
    torch.set_num_threads(settings.threads)
    config = Config(seed=settings.seed)
    path = resolve_model_path(model_for_task(config.model.path, "show_your_work"))
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    task = make_task(config.task, settings.seed)
    num_problems = settings.steps * config.learner.batch_size // GROUP_SIZE
    problems = [p for _ in range(num_problems) if (p := task.next_problem()) is not None]
    progress = Progress()
    marks = Marks(progress, settings, config.learner.batch_size, directory)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=reward(progress, config.sampling.max_new_tokens, tokenizer.eos_token_id),
        args=arguments(settings, config, directory),
        train_dataset=Dataset.from_list([{"prompt": p.prompt, "answer": p.answer} for p in problems]),
        callbacks=[marks],
    )
    marks.trainer = trainer
    trainer._generate = progress.timed("generate", trainer._generate)
    trainer._prepare_inputs = progress.timed("prepare", trainer._prepare_inputs)
    # Computer algebra takes seconds to import, and the first malformed answer of the first step would pay for it.
    MathVerifier().verify(Problem("", "show_your_work", "", "x+1"), r"\boxed{1+x}", False)
    trainer.train()
    learn_s = progress.marks[-1]["seconds"] - progress.seconds["prepare"]
    figures = {"marks": progress.marks, "generate_s": progress.seconds["generate"], "learn_s": learn_s}
    if trainer.accelerator.is_main_process:
        (directory / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Settings(**json.loads(sys.argv[2])))
