"""Messages and tools in the form that chat templates expect, validated for rows, scripts, rollouts and agents."""

import contextlib
import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

from minirl.errors import InputError, refuse

# Messages as returned by `read_message`. Reward functions also get TRL's extra keys, such as `tool_calls`.
Messages = list[dict[str, Any]]
# The prompt of an episode's branch: text, messages or token ids.
Prompt = str | Messages | list[int]
# What a rollout appends between two turns: text, token ids or messages.
After = str | Sequence[int] | Messages
# A JSON schema for chat templates, or a function with type hints and a docstring.
Tool = dict[str, Any] | Callable[..., Any]


def read_message(message: Any, origin: str) -> dict[str, Any]:
    """Normalize a message for chat templates: content becomes text, and tool-call arguments become objects.

    Accepts variants that users and clients write: content that is null, missing or a list of text parts, and arguments
    as JSON text. Any other list is valid only as a tool's result, and stays a list. Raises InputError, naming `origin`,
    for an invalid message.
    """
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InputError(f"{origin}: {message!r:.80}: expected a message, an object with role and content")
    content = message.get("content")
    calls = message.get("tool_calls")
    is_tool_message = message["role"] == "tool"
    if isinstance(content, list) and all(map(_is_text_part, content)) and (content or not is_tool_message):
        content = "".join(part["text"] for part in content)
    refuse(
        not isinstance(content, str | list | None if is_tool_message else str | None),
        f"{origin}: content is {content!r:.80}; only text content is supported",
    )
    refuse(message.get("function_call"), f"{origin}: function_call is deprecated; use tool_calls")
    normalized_message = {
        key: value for key, value in message.items() if value is not None and key != "tool_calls"
    }
    normalized_message["content"] = "" if content is None else content
    if calls:
        try:
            normalized_message["tool_calls"] = list(map(_read_call, calls))
        except (TypeError, LookupError):
            raise InputError(f"{origin}: tool_calls: only function calls are supported") from None
    return normalized_message


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _read_call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments parsed into an object if possible. Raises TypeError or LookupError."""
    name = call["function"]["name"]
    if not isinstance(name, str):
        raise TypeError("a function's name must be text")
    arguments: Any = call["function"]["arguments"] or {}
    with contextlib.suppress(TypeError, ValueError, RecursionError):
        parsed_arguments = json.loads(arguments)
        arguments = parsed_arguments if isinstance(parsed_arguments, dict) else arguments
    call_fields = {key: call[key] for key in ("id", "type") if key in call}
    return {**call_fields, "function": {"name": name, "arguments": arguments}}


def read_prompt(prompt: Any, origin: str) -> str | Messages:
    """Return a validated prompt: non-blank text, or messages normalized by `read_message`. Raises InputError."""
    if isinstance(prompt, list) and prompt:
        return [read_message(message, f"{origin}, message {i}") for i, message in enumerate(prompt, 1)]
    refuse(
        not isinstance(prompt, str) or not prompt.strip(),
        f"{origin} is {str(prompt)[:60]!r}; expected text, or messages with role and content",
    )
    return prompt


def is_messages(after: After) -> TypeGuard[Messages]:
    """Whether `after` is a list of messages, valid or not, rather than token ids."""
    return isinstance(after, list | tuple) and any(isinstance(item, dict) for item in after)


def is_token_ids(prompt: Any) -> TypeGuard[list[int]]:
    """Whether a prompt is a list of token ids rather than text or messages."""
    is_list = isinstance(prompt, list | tuple) and bool(prompt)
    return is_list and all(type(i) is int and i >= 0 for i in prompt)


def check_encodable(value: Any) -> None:
    r"""Raise ValueError for a lone surrogate ("\ud800") in a JSON value. Tokenizers cannot encode lone surrogates."""
    json.dumps(value, ensure_ascii=False).encode()


def as_messages(prompt: str | Messages) -> Messages:
    """Return messages unchanged, and text as one user message."""
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    return prompt


def add_answer(messages: Messages, answer: str | dict[str, Any]) -> None:
    """Append an assistant message (text or dict); if the last message is already an assistant message, extend it."""
    if isinstance(answer, str):
        answer = {"role": "assistant", "content": answer}
    # Only a prompt can end with an assistant message, which the completion continues.
    if messages and messages[-1]["role"] == "assistant":
        last_message = messages.pop()
        answer = {**last_message, **answer, "content": last_message["content"] + answer["content"]}
    messages.append(answer)


def tool_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Return the tools' JSON schemas. Raises InputError, naming the tool, for a missing schema or a duplicate name."""
    refuse(not isinstance(tools, list | tuple), f"tools: {tools!r:.80}: expected a list")
    schemas = [_function_schema(tool) if inspect.isroutine(tool) else _checked_schema(tool) for tool in tools]
    names = [schema["function"]["name"] for schema in schemas]
    for name in names:
        refuse(names.count(name) > 1, f"tools: two tools are named {name!r}; rename one")
    return schemas


def _function_schema(function: Callable[..., Any]) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(function)
    except Exception as error:
        # transformers parses the signature and docstring, which may contain anything.
        raise InputError(
            f"tools: {getattr(function, '__name__', function)!r}: not a valid JSON schema: {str(error)[:300]}"
        ) from None


def _checked_schema(tool: Any) -> dict[str, Any]:
    function_schema = tool.get("function") if isinstance(tool, dict) else None
    name = function_schema.get("name") if isinstance(function_schema, dict) else None
    refuse(
        not isinstance(name, str) or not name,
        f"tools: {tool!r:.80}: expected a function, or a schema "
        '{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}',
    )
    return dict(tool)
