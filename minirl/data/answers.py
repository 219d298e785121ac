"""Parse an answer into reasoning, content and tool calls: a message with Hugging Face's keys.

The model wrote the answer, so any text must parse: `parse_error` says what is wrong with a call.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.messages import check_text
from minirl.errors import refuse

# The most tokens before a turn in which reasoning may begin. The turn's own message begins after a special token.
TAIL_TOKENS = 64
_HERMES_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# {"name": ..., "arguments": {...}} between tags, as Hermes, Qwen2.5 and Qwen3 write a call.
_HERMES_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# Such a call in a chat template, perhaps with the template's quotes and line ends in between. In other formats a tag or
# a name follows <tool_call>.
_SHOWN_HERMES_CALL = re.compile(r'<tool_call>[^<]{0,40}\{\s*\\?"(name|arguments)')


def parse_answer(tokenizer: ChatTokenizer, ids: Sequence[int], before: NDArray[np.int64]) -> dict[str, Any]:
    """Return the message of a turn's ids: "role", "content", and, if present, "reasoning_content" and "tool_calls".

    "tool_calls" is a list of {"type": "function", "function": {"name": ..., "arguments": {...}}}; "parse_error" says
    why the answer, or the first unreadable call in it, cannot be read.

    before: the ids before the turn, int64 [L], where the reasoning may begin. Raises InputError naming the tokenizer's
    folder if nothing says how the model writes calls.
    """
    if not uses_hermes_format(tokenizer):
        prefix = tokenizer.decode(before, skip_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return _parse_with_template(tokenizer, text, prefix)
    # The tags are special tokens in some vocabularies.
    hidden = {i for i, token in tokenizer.special_tokens.items() if token not in _HERMES_TAGS}
    text = tokenizer.decode([i for i in ids if i not in hidden], skip_special_tokens=False)
    # Otherwise each turn of a long episode would decode everything before it.
    tail = before[-TAIL_TOKENS:].tolist()
    start = max((i for i, token in enumerate(tail, 1) if token in hidden), default=0)
    reasoning_tail = tokenizer.decode(tail[start:], skip_special_tokens=False)
    return _hermes_message(
        text, has_begun_thinking=reasoning_tail.rfind("<think>") > reasoning_tail.rfind("</think>")
    )


def check_calls_parsable(tokenizer: ChatTokenizer) -> None:
    """Raise InputError if answers cannot be parsed: not Hermes' calls, and no usable response template."""
    if not uses_hermes_format(tokenizer):
        why = _parse_with_template(tokenizer, "", "").get("parse_error")
        refuse(
            why is not None,
            f"{tokenizer.folder}: the response template of its tokenizer cannot be used: {why}",
        )


def uses_hermes_format(tokenizer: ChatTokenizer) -> bool:
    """Whether the model writes calls as Hermes does: the chat template shows one, and there is no response template."""
    is_shown = _SHOWN_HERMES_CALL.search(str(tokenizer.backend.chat_template)) is not None
    return is_shown and getattr(tokenizer.backend, "response_template", None) is None


def _parse_with_template(tokenizer: ChatTokenizer, text: str, prefix: str) -> dict[str, Any]:
    """Return the message of a text behind a prefix, as the tokenizer's response template parses it."""
    backend = tokenizer.backend
    refuse(
        getattr(backend, "response_template", None) is None,
        f"{tokenizer.folder}: its tokenizer has no response template, which would say how the model writes calls of "
        "tools; take the text",
    )
    try:
        message: dict[str, Any] = backend.parse_response(text, prefix=prefix, tools=tokenizer.tools or None)
        check_text(message)
    except Exception as error:
        # The template is a program from the model's folder, and the model wrote the text: it may raise anything.
        return {"role": "assistant", "content": text, "parse_error": str(error)[:300]}
    return {"role": "assistant", "content": ""} | message


def _hermes_message(text: str, *, has_begun_thinking: bool) -> dict[str, Any]:
    """Return the message of a text. has_begun_thinking: whether its reasoning began before the text."""
    message: dict[str, Any] = {"role": "assistant"}
    if has_begun_thinking or text.lstrip().startswith("<think>"):
        reasoning, _, text = text.partition("</think>")
        message["reasoning_content"] = reasoning.strip().removeprefix("<think>").strip()
    message["content"] = _HERMES_CALL.sub("", text).strip()
    calls = []
    for number, match in enumerate(_HERMES_CALL.finditer(text), 1):
        try:
            calls.append({"type": "function", "function": _hermes_call(match)})
        except (ValueError, RecursionError) as error:
            message.setdefault("parse_error", f"call {number}: {str(error)[:300]}")
    if calls:
        message["tool_calls"] = calls
    return message


def _hermes_call(match: re.Match[str]) -> dict[str, Any]:
    """Return the name and arguments of a call. Raises ValueError or RecursionError."""
    content, end = match.groups()
    if not end:
        raise ValueError("has no </tool_call>")
    call = json.loads(content.strip())
    if not isinstance(call, dict) or [type(call.get(key)) for key in ("name", "arguments")] != [str, dict]:
        raise ValueError('expected {"name": text, "arguments": {...}}')
    check_text(call)
    return call
