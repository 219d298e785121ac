"""Parse chat completion requests in OpenAI's format, and format the responses."""

import contextlib
import functools
import json
from dataclasses import dataclass
from typing import Any

from minirl.data.messages import Messages, check_encodable, read_message, tool_schemas
from minirl.episodes.episode import Branch, Episode, Turn
from minirl.errors import InputError, refuse
from minirl.ranks.process_group import print0

# Unsupported fields that agents would rely on, mapped to the values that are accepted because they make the field a
# no-op.
_ACCEPTED_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "logprobs": (False,),
    "functions": ([],),
}
# Fields in neither collection are ignored, because only the run's flags control sampling.
_SUPPORTED_FIELDS = set(
    "messages tools stop max_tokens max_completion_tokens stream stream_options return_token_ids "
    "model user metadata store".split()
)


@dataclass(frozen=True)
class ChatRequest:
    """A chat completion request.

    messages: messages normalized by `read_message`. tools: JSON schemas. stop: strings that end the turn. max_tokens:
    maximum number of tokens to sample. fields: all fields of the request that are not null. ignored: names of the
    ignored fields.
    """

    messages: Messages
    tools: list[dict[str, Any]]
    stop: list[str]
    max_tokens: int | None
    fields: dict[str, Any]
    ignored: list[str]


def read_request(given: Any, episode: Episode) -> ChatRequest:
    """Parse a request from JSON. Raises InputError, naming an invalid or unsupported field."""
    refuse(not isinstance(given, dict), "the request is not a JSON object")
    fields = {key: value for key, value in given.items() if value is not None}
    for key, values in _ACCEPTED_VALUES.items():
        refuse(
            fields.get(key, values[0]) not in values,
            f"{key}: only {values[0]!r} is supported; remove this field",
        )
    messages: Any = fields.get("messages")
    refuse(not isinstance(messages, list) or not messages, "messages: expected a non-empty list")
    read = [read_client_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    refuse(
        read[-1]["role"] == "assistant",
        "messages: the last message is an assistant message; end with a user or tool message",
    )
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    refuse(not isinstance(stop, list), "stop: expected a string or a list of strings")
    tools = tool_schemas(fields.get("tools", [])) or episode.tools or []
    try:
        check_encodable([read, tools])
    except (ValueError, RecursionError):
        raise InputError("messages, tools: a lone surrogate is not valid text") from None
    ignored = sorted(fields.keys() - _SUPPORTED_FIELDS - _ACCEPTED_VALUES.keys())
    for key in ignored:
        _note_ignored(key)
    max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens"))
    return ChatRequest(read, tools, stop, max_tokens, fields, ignored)


def read_client_message(message: Any, origin: str) -> dict[str, Any]:
    """Normalize a message with `read_message`, and drop response fields that agents might not send back."""
    read = read_message(message, origin)
    return {
        key: read[key] for key in ("role", "content", "name", "tool_call_id", "tool_calls") if key in read
    }


@functools.cache
def _note_ignored(key: str) -> None:
    """Print a note that a field is ignored, once per field."""
    print0(
        f"note: an agent's request sets {key!a:.80}, which has no effect: the run's flags control sampling"
    )


def _assistant_message(turn: Turn, request: ChatRequest) -> dict[str, Any]:
    """Return a turn as a message for the agent, with tool-call arguments as JSON text.

    The content ends before the stop string.
    """
    answer: dict[str, Any] = {"content": turn.text}
    if request.fields.get("tool_choice") != "none":
        # Without tools, the model's tool-call format may be unknown; the message is then plain text.
        with contextlib.suppress(InputError):
            answer = turn.message
    content = answer["content"] or ""
    for stop in request.stop:
        content = content.partition(stop)[0]
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {key: answer[key] for key in ("reasoning_content", "parse_error") if key in answer}
    calls = []
    for i, call in enumerate(answer.get("tool_calls", ())):
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        function = {"name": call["function"]["name"], "arguments": arguments}
        # Some templates accept only ids of exactly nine alphanumeric characters.
        calls.append({"id": f"c{turn.number:05}{i:03}", "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def chat_completion(turn: Turn, branch: Branch, request: ChatRequest) -> dict[str, Any]:
    """Return the response to a request, in the non-streaming format."""
    message = _assistant_message(turn, request)
    is_call = "tool_calls" in message and turn.finish_reason == "stop"
    finish_reason = "tool_calls" if is_call else turn.finish_reason
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    num_before = len(branch.prompt_ids) + turn.start
    completion = {
        "id": f"turn-{turn.number}",
        "object": "chat.completion",
        "created": 0,
        "model": "policy",
        "choices": [choice],
        "usage": {
            "prompt_tokens": num_before,
            "completion_tokens": turn.num_tokens,
            "total_tokens": num_before + turn.num_tokens,
        },
    }
    if request.fields.get("return_token_ids"):
        choice["token_ids"] = turn.ids
        completion["prompt_token_ids"] = [*branch.prompt_ids, *branch.tokens][:num_before]
    return completion


def stream_response(completion: dict[str, Any]) -> str:
    """Return a completion as a server-sent event stream: one event with all the content, then the end marker."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]
    chunk = {**completion, "object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
