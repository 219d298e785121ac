"""Counters of the engine's work."""

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Work since the last `Engine.take_stats`. Tokens, except `decode_steps`, `preemptions`, `drops`, `most_running`.

    `decode_tokens` are the tokens that decode steps sampled and that were kept. Two fields count wasted work:
    `padding_tokens`, the padding of decode steps (`padding.num_padded` and `padding.graph_batch_size`), and
    `discarded_tokens`, from an asynchronous decode step launched before the host knew that the request had finished.
    `preemptions` (within a turn) and `drops` (between two turns) count requests that lost their blocks to others; if
    they continued, they were prefilled again.
    `most_running`: requests in the largest decode step.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    discarded_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    drops: int = 0
    most_running: int = 0

    @property
    def wasted_tokens(self) -> int:
        """Tokens that decode steps computed for nothing."""
        return self.padding_tokens + self.discarded_tokens

    @property
    def computed_tokens(self) -> int:
        """All tokens that decode steps computed, including the wasted ones."""
        return self.decode_tokens + self.wasted_tokens
