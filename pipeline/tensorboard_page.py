"""What TensorBoard shows of a run beside plain curves: one page of charts, the lag histogram, warnings as text."""

import importlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from tensorboard.plugins.custom_scalar import metadata as page_metadata
from tensorboard.plugins.histogram import metadata as histogram_metadata
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.util import tensor_util

# Their classes are made at import, where no type checker sees them.
summary_pb2: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
layout_pb2: Any = importlib.import_module("tensorboard.plugins.custom_scalar.layout_pb2")

# Charts of the page (the tab "Custom Scalars") and the names of their curves, as regular expressions.
CHARTS = {
    "effective sample size": ["ess$"],
    "lag: trained tokens by versions of lag": ["num_tokens/lag_.*$"],
    "lag: mean and largest": ["lag_mean$", "lag_max$"],
    "queue depths": ["queue/.*$"],
    "solve rate by difficulty, training": ["solve_rate/.*$"],
    "pass@1 by difficulty, held out": ["eval/pass_at_1/.*$"],
    "verifier: milliseconds of an answer in a child process": ["verifier/child_.*_ms$"],
    "guards: shares that starve a run": ["guard/.*_frac$"],
    "guards: signs of starvation, warnings": ["guard/starvation_signs$", "guard/warnings$"],
}
_LAG_BUCKET = re.compile(r"num_tokens/lag_(\d+)(?:_(\d+|up))?$")


def page() -> Any:
    """A summary with the layout of the page; TensorBoard takes it from the events."""
    charts = [
        layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
        for title, tags in CHARTS.items()
    ]
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title="Never Give Up", chart=charts)])
    tensor = tensor_util.make_tensor_proto(layout.SerializeToString(), dtype=np.object_)
    value = summary_pb2.Summary.Value(
        tag=page_metadata.CONFIG_SUMMARY_TAG, metadata=page_metadata.create_summary_metadata(), tensor=tensor
    )
    return summary_pb2.Summary(value=[value])


def text(tag: str, words: str) -> Any:
    """A summary with a line of text."""
    return text_pb(tag, words)


def lag_histogram(metrics: Mapping[str, Any]) -> Any | None:
    """A summary value: trained tokens by lag from the learner's buckets, rows (from, to, tokens); None without one."""
    rows = []
    for name, tokens in metrics.items():
        if (bucket := _LAG_BUCKET.match(name)) and tokens is not None:
            first, last = int(bucket[1]), bucket[2]
            end = 2 * first if last == "up" else int(last or first) + 1
            rows.append((first, end, tokens))
    if not rows:
        return None
    tensor = tensor_util.make_tensor_proto(np.array(sorted(rows), dtype=np.float64))
    metadata = histogram_metadata.create_summary_metadata(display_name=None, description="trained tokens by lag")
    return summary_pb2.Summary.Value(tag="lag", metadata=metadata, tensor=tensor)
