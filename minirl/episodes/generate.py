"""The request for a turn that `Branch.generate` makes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from minirl.data.task import After, Messages, is_messages, is_stop_string
from minirl.errors import refuse


@dataclass(frozen=True)
class Generate:
    """Asks for a turn: tokens are appended, then at most `max_tokens` are sampled.

    after: text, token ids or, between turns of a chat, messages.
    stop: strings that end the turn, as the model's stop tokens do; the token in which one ends is kept whole.
    max_tokens: None for as many as fit.
    branch: the number of the episode's branch.
    contents: reward functions get these as the contents of the messages of `after`, None for their texts.
    """

    after: After = ""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    branch: int = 0
    contents: Sequence[list[Any] | None] = ()

    @property
    def inserted(self) -> Messages:
        """The appended messages, as reward functions get them."""
        if not is_messages(self.after):
            return []
        messages = [dict(message) for message in self.after]
        for message, content in zip(messages, self.contents, strict=False):
            message["content"] = message["content"] if content is None else content
        return messages

    def check(self) -> None:
        """Raise InputError naming the field that is wrong. What is appended is checked where it is tokenized."""
        is_after = isinstance(self.after, str | list | tuple)
        is_limit = self.max_tokens is None or (type(self.max_tokens) is int and self.max_tokens >= 1)
        expected = {
            "after": (is_after, "expected text, a list of token ids, or messages"),
            "stop": (
                all(map(is_stop_string, self.stop)),
                "expected texts; '' is in every text, U+FFFD and surrogates in none",
            ),
            "max_tokens": (is_limit, "must be at least 1"),
        }
        for name, (is_right, what) in expected.items():
            refuse(not is_right, f"generate({name}={getattr(self, name)!r:.80}): {what}")
