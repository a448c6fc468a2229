"""What one device does in a second: from data sheets, until somebody has measured it.

All rates are of one device; an engine may be `tp` of them, which share the weights and the rows.
"""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from bench.files import read_report
from bench.planner.shape import ModelSize
from pipeline.errors import ConfigError

# What real kernels reach of a data sheet's figure. In training Llama 3 405B reached 430, 400 and 380 TFLOP/s of an H100
# in bfloat16, by number of GPUs and length: 38 to 43% of its peak (arXiv 2407.21783, table 4).
TRAIN_SHARE = 0.4
# Assumed: of the memory bandwidth in decoding, of the peak in reading prompts, of the link in sending weights.
DECODE_SHARE, PREFILL_SHARE, LINK_SHARE = 0.6, 0.5, 0.7
STEP_OVERHEAD_S = 1e-3  # launching the kernels of one decode step and sampling; assumed
TRAIN_STEP_S = 0.5  # of an optimizer step beside its FLOPs; assumed
BYTES = 2  # of a weight or a cached number, bfloat16


class Kind(NamedTuple):
    """A data sheet: dense bfloat16 FLOP/s (data sheets print those with sparsity, twice as many), bytes/s and bytes of
    memory. A100 (80 GB), H100 and H200 are SXM, B200 is of an HGX board at 1,000 W.

    `link`, bytes/s between two nodes, is of the network card that such machines usually have for each device, which no
    data sheet of a GPU says: 200 Gbit/s beside an A100 or L40S, 400 beside the others.
    """

    flops: float
    bandwidth: float
    memory: float
    link: float


KINDS = {
    "A100": Kind(312e12, 2.039e12, 80e9, 25e9),
    "H100": Kind(989e12, 3.35e12, 80e9, 50e9),
    "H200": Kind(989e12, 4.8e12, 141e9, 50e9),
    "B200": Kind(2250e12, 8.0e12, 180e9, 50e9),
    "L40S": Kind(362e12, 0.864e12, 48e9, 25e9),
    "MI300X": Kind(1307e12, 5.3e12, 192e9, 50e9),
}


class Rates(msgspec.Struct, frozen=True):
    """Seconds. A decode step of H rows takes `decode_step_s + H * decode_row_s`; an optimizer step takes
    `train_step_s` and, on one device, `train_token_s` for each token of a completion, its share of the prompt included;
    an update takes `publish_s` of the learner's time and `load_s` of every engine's. `host_rollout_s`: processor time
    of coordinator and verifier a rollout, which matters where they share cores with the rest. `prefill_s`: of an engine
    for each prompt that it reads; next to nothing on a GPU. `source` says where the figures are from.
    """

    decode_step_s: float
    decode_row_s: float
    train_step_s: float
    train_token_s: float
    publish_s: float
    load_s: float
    source: str
    host_rollout_s: float = 0.0
    shares_cores: bool = False
    prefill_s: float = 0.0

    def decode_s(self, rows: float) -> float:
        return self.decode_step_s + rows * self.decode_row_s


class Gpus(NamedTuple):
    kind: str
    num: int


def parse_gpus(text: str) -> Gpus:
    """`H100x16`; raises ConfigError naming the known kinds."""
    match = re.fullmatch(r"([A-Za-z0-9]+)x(\d+)", text)
    if match is None or match[1].upper() not in (*KINDS, "CPU") or int(match[2]) < 2:
        known = ", ".join((*KINDS, "CPU"))
        raise ConfigError(f"--gpus {text}: expected KINDxN with N of 2 or more, as in H100x16; kinds: {known}")
    return Gpus(match[1].upper(), int(match[2]))


def data_sheet_rates(kind: str, model: ModelSize, context: float, train_token_flops: float, tp: int) -> Rates:
    """Of an engine of `tp` devices and of a learner's device. A running row looks at `context` tokens in the mean.
    `train_token_flops`: what the learner does for a token of a completion, its share of the prompt included.

    Decoding reads all weights once a step and every row's cache, unless the arithmetic of the rows takes longer:
    max(bytes / bandwidth, 2 P H / FLOP/s), here as the sum of a fixed part and a part for each row.
    """
    sheet = KINDS[kind]
    bandwidth = sheet.bandwidth * DECODE_SHARE * tp
    row_s = max(
        context * model.kv_bytes(BYTES) / bandwidth,
        2 * model.active / (sheet.flops * PREFILL_SHARE * tp),
    )
    sync_s = model.weight_bytes(BYTES) / (sheet.link * LINK_SHARE)
    return Rates(
        decode_step_s=STEP_OVERHEAD_S + model.weight_bytes(BYTES) / bandwidth,
        decode_row_s=row_s,
        train_step_s=TRAIN_STEP_S,
        train_token_s=train_token_flops / (sheet.flops * TRAIN_SHARE),
        publish_s=0.0,  # in flight the learner goes on while the engines receive
        load_s=sync_s,
        source=f"data sheet of the {kind}, {TRAIN_SHARE:.0%} of its FLOP/s in training, "
        f"{DECODE_SHARE:.0%} of its bandwidth in decoding",
    )


def read_rates(path: Path) -> Rates:
    """What `ngu plan measure` wrote; raises ConfigError for anything else."""
    what, remedy = "rates that `ngu plan measure` wrote", f"`ngu plan measure --out {path}` writes it"
    return read_report(path, Rates, what, remedy)
