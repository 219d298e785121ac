"""A turn of an episode, as its function sees it. Standard library only."""

from collections.abc import Sequence
from typing import Any

from minirl.turn_facts import TurnFacts


class Turn(TurnFacts):
    """A turn that a function asked for: appended tokens, then sampled ones.

    appended: the token ids that were appended before it.
    ids: the sampled ones, including the stop token. logprobs: theirs when they were sampled. versions: of the weights
    that sampled them.
    text: that of the ids, without special tokens.
    message: content, and reasoning and calls of tools, if any; see `data.answers`. Raises InputError if the form of the
    model's calls is unknown.
    answer: the text of the turn's message, up to the end of the turn, without special tokens. It holds everything
    sampled, or appended as text or ids, since the last messages.
    begun: if it is the first turn of its branch, in another process than the engine's: `prompt_ids` and `max_tokens`
    of the branch.
    """

    appended: list[int]
    ids: list[int]
    logprobs: list[float]
    versions: list[int]
    text: str
    message: dict[str, Any]
    answer: str
    begun: Sequence[Any] | None = None
