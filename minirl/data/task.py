"""A task: prompts and the functions that reward completions. Tasks hold text, never tensors.

Each task is a module with a `load...` function that returns a `Task`. A new task is a new module, or, without
changing the package, a JSONL file and a reward function (`jsonl`).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

# `rewards.functions` describes the call.
RewardFunction = Callable[..., Any]
# The arguments of every reward function; the others are named after columns of the data.
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
# Reward functions that name these get them too.
EPISODE_ARGUMENTS = ("episodes", "environments", "rollouts")
# Each has "role" and "content", a text. Reward functions also get TRL's further keys, such as `tool_calls`.
Messages = list[dict[str, Any]]
# To append between two turns: text, token ids or messages.
After = str | Sequence[int] | Messages


def is_message(value: Any) -> bool:
    """Return whether `value` is a message: role and content, both text."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def is_messages(after: After) -> TypeGuard[Messages]:
    """Return whether it is a list of messages, valid or not, rather than of token ids."""
    return isinstance(after, list | tuple) and any(isinstance(item, dict) for item in after)


def is_prompt(value: Any) -> bool:
    """Return whether `value` can be a row's prompt: messages, or text that is not empty."""
    if isinstance(value, list):
        return bool(value) and all(map(is_message, value))
    return isinstance(value, str) and bool(value.strip())


def is_token_ids(prompt: str | Sequence[Any]) -> bool:
    """Return whether a prompt is token ids rather than text or messages."""
    return not isinstance(prompt, str) and isinstance(next(iter(prompt), None), int)


def is_stop_string(value: Any) -> bool:
    """Return whether `value` can end a turn: "" is in every text, U+FFFD and half a surrogate pair are in none."""
    is_text = isinstance(value, str) and bool(value)
    return is_text and all(c != "\ufffd" and not "\ud800" <= c <= "\udfff" for c in value)


def check_text(value: Any) -> None:
    r"""Raise ValueError for half a surrogate pair ("\ud800") in a JSON value: text with one cannot be tokenized."""
    json.dumps(value, ensure_ascii=False).encode()


def as_messages(prompt: str | Messages) -> Messages:
    """Return messages unchanged, and text as one user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def add_answer(messages: Messages, said: str | dict[str, Any]) -> None:
    """Add an answer, as text or as a message; one that continues the last message joins it."""
    if isinstance(said, str):
        said = {"role": "assistant", "content": said}
    # Only the message before the episode can be the assistant's too.
    if messages and messages[-1]["role"] == "assistant":
        last = messages.pop()
        said = {**last, **said, "content": last["content"] + said["content"]}
    messages.append(said)


def exact_score(answer_of: Callable[[str], Any]) -> RewardFunction:
    """Return a reward function: 1 where the answer in a completion is that of the column `answer`, else 0."""

    def score(completions: Sequence[str | Messages], answer: Sequence[Any]) -> list[float]:
        # A completion is a list of one message where the prompt is a chat.
        texts = [one if isinstance(one, str) else one[-1]["content"] for one in completions]
        return [float(answer_of(text) == wanted) for text, wanted in zip(texts, answer, strict=True)]

    return score


@dataclass(frozen=True)
class Row:
    """One example of the data."""

    prompt: str | Messages
    # Further fields, which reward functions may take as arguments.
    columns: Mapping[str, Any]
    # The origin, "file:line", for error messages and logs.
    place: str


@dataclass(frozen=True)
class Task:
    """Rows to train on, held-out rows and reward functions by name."""

    name: str
    train_rows: Sequence[Row]
    # Held-out rows by their file; {} without any.
    eval_sets: Mapping[str, Sequence[Row]]
    rewards: Mapping[str, RewardFunction]
    # The default of --max-new-tokens: enough for an answer.
    max_new_tokens: int
    # Functions that are logged but not trained on.
    extra_scores: Mapping[str, RewardFunction] = field(default_factory=dict)
    # The answer in a completion's text, for majority votes: None if it has none. Equal answers get equal rewards.
    answer_of: Callable[[str], Any] | None = None
    # An embedded task's prompts with an "answer", which warm-start the embedded model.
    warm_start_rows: Sequence[Row] = ()
