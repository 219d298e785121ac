"""A task: prompts and the functions that reward completions. Tasks hold text, never tensors.

Each task is a module with a `load...` function that returns a `Task`. A new task is a new module, or, without
changing the package, a JSONL file and a reward function (`jsonl`).
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from minirl.errors import InputError, refuse

# `rewards.functions` describes the call.
RewardFunction = Callable[..., Any]
# The arguments of every reward function; the others are named after columns of the data.
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids")
# Reward functions that name these get them too. No column of the data may have one of these six names.
EPISODE_ARGUMENTS = ("episodes", "environments", "rollouts")
# As `read_message` returns them. Reward functions also get TRL's further keys, such as `tool_calls`.
Messages = list[dict[str, Any]]
# To append between two turns: text, token ids or messages.
After = str | Sequence[int] | Messages


def read_message(message: Any, place: str) -> dict[str, Any]:
    """Return a message as chat templates take it: text as content, and objects as arguments of tool calls.

    Accepts what users and clients write: content that is null, missing or a list of text parts, and arguments as JSON
    text. A tool's result may be another list, which stays one. Raises InputError, naming `place`, for anything else.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"{place}: {message!r:.80}: expected a message, an object with role and content")
    content = message.get("content")
    calls = message.get("tool_calls")
    is_tool = message["role"] == "tool"
    if isinstance(content, list) and all(map(_is_text_part, content)) and (content or not is_tool):
        content = "".join(part["text"] for part in content)
    refuse(
        not isinstance(content, str | list | None if is_tool else str | None),
        f"{place}: content is {content!r:.80}; only text content is supported",
    )
    refuse(
        message.get("function_call"), f"{place}: function_call is an older form of tool_calls; write these"
    )
    read = {key: value for key, value in message.items() if value is not None and key != "tool_calls"}
    read["content"] = "" if content is None else content
    if calls:
        try:
            read["tool_calls"] = list(map(_read_call, calls))
        except (TypeError, LookupError):
            raise InputError(f"{place}: tool_calls: only function calls are supported") from None
    return read


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _read_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, if they are one. Raises TypeError and LookupError."""
    name = call["function"]["name"]
    if not isinstance(name, str):
        raise TypeError("a function's name is text")
    arguments: Any = call["function"]["arguments"] or {}
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        read = json.loads(arguments)
        arguments = read if isinstance(read, dict) else arguments
    kept = {key: call[key] for key in ("id", "type") if key in call}
    return {**kept, "function": {"name": name, "arguments": arguments}}


def read_prompt(prompt: Any, place: str) -> "str | Messages":
    """Return a prompt: text that is not blank, or messages as `read_message` returns them. Raises InputError."""
    if isinstance(prompt, list) and prompt:
        return [read_message(message, f"{place}, message {i}") for i, message in enumerate(prompt, 1)]
    refuse(
        not isinstance(prompt, str) or not prompt.strip(),
        f"{place} is {str(prompt)[:60]!r}; expected text, or messages with role and content",
    )
    return prompt


def is_messages(after: After) -> TypeGuard[Messages]:
    """Return whether it is a list of messages, valid or not, rather than of token ids."""
    return isinstance(after, list | tuple) and any(isinstance(item, dict) for item in after)


def is_token_ids(prompt: Any) -> TypeGuard[list[int]]:
    """Return whether a prompt is token ids rather than text or messages."""
    is_list = isinstance(prompt, list | tuple) and bool(prompt)
    return is_list and all(type(i) is int and i >= 0 for i in prompt)


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
    # JSON schemas of the tools that a prompt of messages shows; None: the run's.
    tools: list[dict[str, Any]] | None = None


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
