"""Requests and rewards that a rollout function may make. Others are refused, naming function, row and field.

Standard library only: a process that runs such a function starts quickly.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from minirl.data.task import After, Messages, is_messages
from minirl.errors import InputError, refuse
from minirl.rewards.values import MAX_REWARD, validate_number
from minirl.workers.user_code import shown

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
# The name of a reward that is given without one.
REWARD = "reward"
# Characters of a reward's name.
MAX_NAME = 80
# Characters of the request of a function in another process, as JSON.
MAX_ASKED = 1 << 22
# Made once: `json.dumps` with an option makes one each time.
_ENCODER = json.JSONEncoder(default=repr)


@dataclass(frozen=True)
class Generate:
    """Asks for a turn: tokens are appended, then at most `max_tokens` are sampled.

    after: text, token ids or, between turns of a chat, messages.
    stop: strings that end the turn, as the model's stop tokens do; the token in which one ends is kept whole.
    max_tokens: None for as many as there is room for.
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
        """The messages that are appended, as reward functions get them."""
        if not is_messages(self.after):
            return []
        messages = [dict(message) for message in self.after]
        for message, content in zip(messages, self.contents, strict=False):
            message["content"] = message["content"] if content is None else content
        return messages

    @property
    def digest(self) -> str:
        """The same for the same request in any process: a replay checks that a turn is asked for as before."""
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


def checked_turn(yielded: Any) -> Generate:
    """Return the request for a turn that a function yielded. Raises InputError naming the field that is wrong."""
    if not isinstance(yielded, Generate):
        raise InputError(f"yields {yielded!r:.80}; expected `yield episode.generate()`")
    limit, branch, contents = yielded.max_tokens, yielded.branch, yielded.contents
    is_after = isinstance(yielded.after, str | list | tuple)
    is_stop = isinstance(yielded.stop, tuple) and all(isinstance(string, str) for string in yielded.stop)
    is_each = is_after and isinstance(contents, list | tuple) and len(contents) in (0, len(yielded.after))
    expected = {
        "after": (is_after, "expected text, a list of token ids, or messages"),
        "stop": (is_stop, "expected a tuple of texts"),
        "max_tokens": (limit is None or (type(limit) is int and limit >= 1), "must be at least 1"),
        "branch": (type(branch) is int and branch >= 0, "write `episode.branch(messages).generate()`"),
        # Checked where the prompt is tokenized.
        "prompt": (True, ""),
        "tools": (True, ""),
        "contents": (is_each, "expected one for each message of `after`"),
    }
    for name, value in vars(yielded).items():
        is_right, what = expected.get(name, (False, "there is no such field"))
        if not is_right:
            raise InputError(f"generate({name}={value!r:.80}): {what}")
    return yielded


def check_rewards(given: Collection[str], wanted: Collection[str], place: str) -> None:
    """Raise InputError for rewards that the run has no use for, and for one that it wants and nobody gave.

    given: the names of the rewards that an episode gave or returned. wanted: the names of the run's rewards.
    """
    if not given and not wanted:
        return
    listed = ", ".join(map(repr, sorted(given))) or "none"
    flags = " ".join("episode" if name == REWARD else f"episode:{name}" for name in sorted(given))
    refuse(
        bool(given) and not wanted,
        f"{place}: gives rewards ({listed}) that the run does not have: add --reward {flags}",
    )
    for name in wanted:
        refuse(
            name not in given,
            f"{place}: ended without the reward {name!r} (given: {listed}); give it in every episode, at "
            f"least `episode.reward(0.0, {name!r})`, or return {{{name!r}: None}} where it does not apply",
        )


def returned_rewards(returned: Any) -> dict[str, float | None]:
    """Return the rewards, by name, that a function returned: a number is the one named "reward", None means none.

    Raises InputError with the reason if it cannot be one.
    """
    if returned is None:
        return {}
    if not isinstance(returned, dict):
        return {REWARD: checked_reward(returned, "returns")}
    rewards: dict[str, float | None] = {}
    for name, value in returned.items():
        check_name(name, "returns")
        rewards[name] = None if value is None else checked_reward(value, f"returns {name!r}:")
    return rewards


def check_name(name: Any, what: str) -> None:
    """Raise InputError, beginning with `what`, unless a reward can have this name."""
    is_name = isinstance(name, str) and 0 < len(name) <= MAX_NAME
    refuse(not is_name, f"{what} a reward named {name!r:.80}; expected text of at most {MAX_NAME} characters")


def checked_reward(value: Any, what: str) -> float:
    """Return a reward as a float. Raises InputError, beginning with `what`, unless it is a finite number."""
    checked = validate_number(value)
    # A comparison that was meant to be something else is easily taken for a number.
    is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")) in ("bool", "torch.bool")
    if is_bool or not isinstance(checked, float):
        raise InputError(f"{what} {shown(value)}; a reward is a finite number of at most {MAX_REWARD:g}")
    return checked
