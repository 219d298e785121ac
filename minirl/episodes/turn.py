"""A turn of an episode, as its function sees it. Standard library only."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from minirl.turn_facts import TurnFacts


class TurnReader(Protocol):
    """Makes the parts of a turn on demand, see `Turn`."""

    @property
    def ids(self) -> list[int]:
        """Its token ids, including the stop token."""

    @property
    def logprobs(self) -> list[float]:
        """The logprobs of these tokens."""

    @property
    def versions(self) -> list[int]:
        """Of the weights that sampled them."""

    @property
    def text(self) -> str:
        """The text of its ids."""

    @property
    def message(self) -> dict[str, Any]:
        """The message that its text encodes."""

    @property
    def answer(self) -> str:
        """The text of its message, up to the end of the turn."""


@dataclass(eq=False)
class Turn(TurnFacts):
    """A turn that a function asked for: appended tokens, then sampled ones. Its parts are made on demand.

    appended: the token ids that were appended before it.
    """

    appended: list[int] = field(default_factory=list)
    reader: TurnReader = field(init=False, repr=False)

    def finish(self, num_tokens: int, finish_reason: str, reader: TurnReader) -> None:
        """End the turn. For the code that runs the episode."""
        self.num_tokens = num_tokens
        self.finish_reason = finish_reason
        self.reader = reader

    @staticmethod
    def read(facts: Mapping[str, Any], appended: list[int], reader: TurnReader) -> "Turn":
        """Return the turn of `to_json`, without rewards."""
        turn = Turn(**{**facts, "rewards": {}}, appended=appended)
        turn.reader = reader
        return turn

    @functools.cached_property
    def ids(self) -> list[int]:
        """The token ids, including the stop token."""
        return self.reader.ids

    @functools.cached_property
    def logprobs(self) -> list[float]:
        """The logprobs of these tokens when they were sampled."""
        return self.reader.logprobs

    @functools.cached_property
    def versions(self) -> list[int]:
        """Of the weights that sampled them."""
        return self.reader.versions

    @functools.cached_property
    def text(self) -> str:
        """The text of its ids, without special tokens."""
        return self.reader.text

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        """The message of its text: content, and reasoning and calls of tools, if any; see `data.answers`.

        Raises InputError if the form of the model's calls is unknown.
        """
        message = self.reader.message
        self.parse_error = message.get("parse_error")
        return message

    @functools.cached_property
    def answer(self) -> str:
        """The text of the turn's message, up to the end of the turn, without special tokens.

        It holds everything sampled, or appended as text or ids, since the last messages.
        """
        return self.reader.answer
