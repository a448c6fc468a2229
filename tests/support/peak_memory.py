"""Prints the bytes that one forward and backward pass adds to this process, and the estimate."""

import re
from pathlib import Path

import numpy as np
import torch
from learner_samples import logprobs_and_kept_bytes
from transformers import Qwen2Config, Qwen2ForCausalLM

from learner.model import peak_bytes
from learner.packing import collate

VOCAB_SIZE, NUM_ROWS, ROW_TOKENS, HIDDEN, LAYERS = 32_768, 32, 128, 32, 1


def status_bytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def backward(model: Qwen2ForCausalLM, num_rows: int) -> int:
    """The bytes that the layers keep for the backward pass: those outside the chunks of the head."""
    rng = np.random.default_rng(0)
    completions = [rng.integers(0, VOCAB_SIZE, ROW_TOKENS) for _ in range(num_rows)]
    logprobs, kept = logprobs_and_kept_bytes(model, collate([np.array([1])] * num_rows, completions), 0.7)
    logprobs.sum().backward()
    model.zero_grad()
    return kept


def main() -> None:
    torch.set_num_threads(1)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": LAYERS}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCAB_SIZE, tie_word_embeddings=True, **sizes, **heads)).eval()
    backward(model, 1)  # what is loaded and allocated once
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident size so far
    before = status_bytes("VmRSS")
    kept = backward(model, NUM_ROWS)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(status_bytes("VmHWM") - before, peak_bytes(num_parameters, kept, NUM_ROWS * ROW_TOKENS, VOCAB_SIZE))


if __name__ == "__main__":
    main()
