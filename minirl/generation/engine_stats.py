"""Counters of the engine's work."""

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Work since the last `Engine.take_stats`. Tokens, except `decode_steps`, `preemptions`, `evictions`,
    `peak_running`.

    `decode_tokens`: those that decode steps sampled. Of these, `discarded_tokens` come from an asynchronous step
    that was launched before the host knew that the request had finished.
    `padding_tokens`: the padding of decode steps in CUDA graphs (`padding.graph_batch_size`).
    `preemptions` (within a turn) and `evictions` (between two turns) count requests that lost their blocks to others;
    if they continued, they were prefilled again.
    `peak_running`: requests in the largest decode step.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    discarded_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    evictions: int = 0
    peak_running: int = 0

    @property
    def wasted_tokens(self) -> int:
        """Tokens that decode steps computed for nothing."""
        return self.padding_tokens + self.discarded_tokens

    @property
    def computed_tokens(self) -> int:
        """All tokens that decode steps computed, including the wasted ones."""
        return self.decode_tokens + self.padding_tokens
