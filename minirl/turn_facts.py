"""The stored facts of a turn of an episode, besides its tokens."""

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class TurnFacts:
    """A turn: `num_tokens` sampled tokens, from `start` among those after the prompt of its branch.

    finish_reason: "stop" or "length"; "" until the turn ends. branch: its number. parse_error: why its message could
    not be read in whole; None if it could, or if nobody read it. extra: what its
    function notes for a fork of the script, which finds it in `rollout.episode.turns`.
    inserted: the messages appended before it.
    """

    start: int
    num_tokens: int = 0
    finish_reason: str = ""
    branch: int = 0
    parse_error: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    inserted: list[dict[str, Any]] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Where the turn ends among the branch's tokens after its prompt."""
        return self.start + self.num_tokens

    @property
    def is_answer(self) -> bool:
        """Return whether the turn is its whole answer: only messages were appended before it."""
        return self.start == 0 or bool(self.inserted)

    def to_json(self) -> dict[str, Any]:
        """Return the facts as JSON values, by the names above."""
        return {one.name: getattr(self, one.name) for one in fields(TurnFacts)}
