"""Statistics about the engine's work."""

from dataclasses import dataclass


@dataclass
class EngineStats:
    """The engine's statistics since the last call to `Engine.take_stats`. Counts are in tokens unless noted otherwise.

    `decode_tokens`: number of tokens sampled by decode steps, including `discarded_tokens`. A request's tokens from an
    asynchronous step are discarded if the step was launched before the host knew that the request had finished.
    `padding_tokens`: number of padding tokens in CUDA-graph decode steps (`padding.graph_batch_size`).
    `decode_steps`: number of decode steps.
    `preemptions` (within a turn) and `evictions` (between turns): number of requests that lost their blocks to other
    requests and, if they continued, were prefilled again.
    `peak_running`: number of requests in the largest decode step.
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
        """The number of padding and discarded tokens in decode steps."""
        return self.padding_tokens + self.discarded_tokens

    @property
    def computed_tokens(self) -> int:
        """The number of tokens that decode steps computed, including wasted tokens."""
        return self.decode_tokens + self.padding_tokens
