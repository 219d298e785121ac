"""Parse a completion into reasoning, content and tool calls: a message in Hugging Face's format.

Parsing never fails, because a model may write anything; `parse_error` describes a malformed call.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.messages import check_encodable
from minirl.errors import refuse

# How many tokens before a turn are searched for an unclosed <think>. Tokens up to and including the last special token
# are ignored, because the assistant message begins after that token.
TAIL_TOKENS = 64
_HERMES_TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# A tool call in the format of Hermes, Qwen2.5 and Qwen3: {"name": ..., "arguments": {...}} between tags.
_HERMES_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
# A Hermes call in a chat template, where quotes and newlines may follow the tag. In other formats, another tag or a
# name follows <tool_call>.
_SHOWN_HERMES_CALL = re.compile(r'<tool_call>[^<]{0,40}\{\s*\\?"(name|arguments)')


def parse_assistant_message(
    tokenizer: ChatTokenizer, ids: Sequence[int], before: NDArray[np.int64]
) -> dict[str, Any]:
    """Parse a turn's token ids into a message: "role", "content" and, if present, "reasoning_content" and "tool_calls".

    "tool_calls" is a list of {"type": "function", "function": {"name": ..., "arguments": {...}}}; "parse_error" says
    why the turn, or its first malformed call, cannot be parsed.

    before: the token ids before the turn, int64 [L], which may end inside the reasoning. Raises InputError, naming
    the tokenizer's folder, if the model's tool-call format is unknown.
    """
    if not uses_hermes_format(tokenizer):
        text_before = tokenizer.decode(before, skip_special_tokens=False)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return _parse_with_response_template(tokenizer, text, text_before)
    # In some vocabularies the tags are special tokens.
    special_ids = {i for i, token in tokenizer.special_tokens.items() if token not in _HERMES_TAGS}
    text = tokenizer.decode([i for i in ids if i not in special_ids], skip_special_tokens=False)
    # Decode only the tail: a long episode would otherwise decode its whole history in every turn.
    tail = before[-TAIL_TOKENS:].tolist()
    start_after_special_token = max((i for i, token in enumerate(tail, 1) if token in special_ids), default=0)
    reasoning_tail = tokenizer.decode(tail[start_after_special_token:], skip_special_tokens=False)
    return _hermes_message(
        text, has_begun_thinking=reasoning_tail.rfind("<think>") > reasoning_tail.rfind("</think>")
    )


def check_calls_parsable(tokenizer: ChatTokenizer) -> None:
    """Raise InputError if tool calls are not in Hermes format and no response template can parse them."""
    if not uses_hermes_format(tokenizer):
        reason = _parse_with_response_template(tokenizer, "", "").get("parse_error")
        refuse(
            reason is not None,
            f"{tokenizer.folder}: cannot use the tokenizer's response template: {reason}",
        )


def uses_hermes_format(tokenizer: ChatTokenizer) -> bool:
    """Whether tool calls are in Hermes format: the chat template shows such calls, and no response template exists."""
    template_shows_call = _SHOWN_HERMES_CALL.search(str(tokenizer.backend.chat_template)) is not None
    return template_shows_call and getattr(tokenizer.backend, "response_template", None) is None


def _parse_with_response_template(tokenizer: ChatTokenizer, text: str, prefix: str) -> dict[str, Any]:
    """Parse the text after `prefix` into a message with the tokenizer's response template."""
    hf_tokenizer = tokenizer.backend
    refuse(
        getattr(hf_tokenizer, "response_template", None) is None,
        f"{tokenizer.folder}: its tokenizer has no response template, so its tool-call format is unknown; "
        "use the turn's text instead",
    )
    try:
        message: dict[str, Any] = hf_tokenizer.parse_response(
            text, prefix=prefix, tools=tokenizer.tools or None
        )
        check_encodable(message)
    except Exception as error:
        # The template comes from the model folder and the text from the model, so parsing may raise anything.
        return {"role": "assistant", "content": text, "parse_error": str(error)[:300]}
    return {"role": "assistant", "content": ""} | message


def _hermes_message(text: str, *, has_begun_thinking: bool) -> dict[str, Any]:
    """Parse text that contains Hermes tags into a message.

    has_begun_thinking: whether the reasoning began before this text.
    """
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
    """Parse the name and arguments of a Hermes call. Raises ValueError or RecursionError."""
    content, end = match.groups()
    if not end:
        raise ValueError("has no </tool_call>")
    call = json.loads(content.strip())
    if not isinstance(call, dict) or [type(call.get(key)) for key in ("name", "arguments")] != [str, dict]:
        raise ValueError('expected {"name": text, "arguments": {...}}')
    check_encodable(call)
    return call
