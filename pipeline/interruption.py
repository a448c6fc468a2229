"""Where a long thought is cut short (forced length interruption, ScaleRL, arXiv 2510.13786)."""

from pipeline.config import InterruptionConfig
from pipeline.messages import Interruption
from samplers.coin import uniform


def draw_interruption(config: InterruptionConfig, seed: int, attempt_id: int) -> Interruption | None:
    """The interruption of an attempt, at a length uniform in the configured range; the same whenever it is drawn."""
    if not config.max_tokens:
        return None
    width = config.max_tokens - config.min_tokens + 1
    position = config.min_tokens + int(width * uniform(seed, attempt_id))
    return Interruption(position, config.phrase, config.thought_end, config.answer_tokens)
