"""What the engine counts of its own work."""

from dataclasses import dataclass


@dataclass
class EngineStats:
    """Work done since `take_stats`, in tokens; `decode_steps` and `preemptions` are counts.

    For nothing were computed: `padding_tokens`, in decode steps of few rows (`numerics.pad_rows`), and `discarded_tokens`, of
    requests whose end was noticed when the next step was under way.
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_tokens: int = 0
    discarded_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0

    @property
    def wasted_tokens(self) -> int:
        """Rows that decode steps computed for nothing."""
        return self.padding_tokens + self.discarded_tokens

    @property
    def computed_tokens(self) -> int:
        """Rows that decode steps computed, those for nothing too."""
        return self.decode_tokens + self.wasted_tokens
