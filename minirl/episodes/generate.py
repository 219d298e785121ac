"""The values that a rollout function yields: a request for a turn, or the end of its episode.

Standard library only: a process that runs such a function starts quickly.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minirl.data.task import After, Messages, is_messages
from minirl.errors import InputError, refuse

# Finish reasons for `Episode.end`.
END_REASONS = (
    "stop",
    "length",
    "max_turns",
    "max_tokens",
    "tool_error",
    "parse_error",
    "timeout",
    "env_done",
)
# The most characters of a request from another process, as JSON.
MAX_ASKED = 1 << 22
# Made once: `json.dumps` with options would make one each time.
_ENCODER = json.JSONEncoder(default=repr)


@dataclass(frozen=True)
class Generate:
    """Asks for a turn: tokens are appended, then at most `max_tokens` are sampled.

    after: text, token ids or, between turns of a chat, messages.
    stop: strings that end the turn, as the model's stop tokens do; the token in which one ends is kept whole.
    max_tokens: None for as many as fit.
    branch: the number of the episode's branch. prompt: the start of that branch; not read for 0, the row's prompt.
    contents: reward functions get these as the contents of the messages of `after`, None for their texts.
    tools: JSON schemas of the tools that this prompt shows; None: the run's.
    """

    after: After = ""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    branch: int = 0
    prompt: str | Messages | list[int] = ""
    contents: Sequence[list[Any] | None] = ()
    tools: list[dict[str, Any]] | None = None

    @property
    def inserted(self) -> Messages:
        """The appended messages, as reward functions get them."""
        if not is_messages(self.after):
            return []
        messages = [dict(message) for message in self.after]
        for message, content in zip(messages, self.contents, strict=False):
            message["content"] = message["content"] if content is None else content
        return messages

    @property
    def digest(self) -> str:
        """A digest, equal for equal requests in any process: a replay checks that a request is the same as before."""
        try:
            text = _ENCODER.encode(vars(self))
        except (
            TypeError,
            ValueError,
            RecursionError,
        ):  # in this process messages may hold what JSON does not
            text = repr(self)
        return hashlib.blake2b(text.encode(errors="backslashreplace"), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Return the fields for another process. Raises InputError if JSON cannot hold them, or they are too long."""
        after = self.after if isinstance(self.after, str) else list(self.after)
        fields = {**vars(self), "after": after}
        try:
            text = json.dumps(fields)
        except (TypeError, ValueError, RecursionError):
            raise InputError(f"yields {self!r:.80}; expected text, numbers and lists of them") from None
        refuse(len(text) > MAX_ASKED, f"asks for a turn with {len(text)} characters; at most {MAX_ASKED}")
        return fields

    @staticmethod
    def read(fields: dict[str, Any]) -> "Generate":
        """Return what `to_json` wrote."""
        return Generate(**{**fields, "stop": tuple(fields["stop"])})


@dataclass(frozen=True)
class End:
    """Ends the episode instead of asking for a turn. See `Episode.end`."""

    reason: str
