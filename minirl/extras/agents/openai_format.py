"""Requests for chat completions in OpenAI's format, and their answers."""

import contextlib
import functools
import json
from dataclasses import dataclass
from typing import Any

from minirl.data.messages import Messages, check_text, read_message, tool_schemas
from minirl.episodes.episode import Branch, Episode, Turn
from minirl.errors import InputError, refuse
from minirl.ranks.process_group import print0

# Fields that an agent relies on and that are not supported, with the values that ask for nothing.
_ALLOWED_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "logprobs": (False,),
    "functions": ([],),
}
# All other fields are ignored: the run alone decides how it samples.
_READ_FIELDS = set(
    "messages tools stop max_tokens max_completion_tokens stream stream_options return_token_ids "
    "model user metadata store".split()
)


@dataclass(frozen=True)
class ChatRequest:
    """A request for a chat completion.

    messages: as `read_message` returns them. tools: JSON schemas. stop: strings that end the turn. max_tokens: the most
    tokens to sample. fields: the given fields that are not None. ignored: the names of fields without effect.
    """

    messages: Messages
    tools: list[dict[str, Any]]
    stop: list[str]
    max_tokens: int | None
    fields: dict[str, Any]
    ignored: list[str]


def read_request(given: Any, episode: Episode) -> ChatRequest:
    """Read a request from JSON. Raises InputError naming the field that cannot be honoured or read."""
    refuse(not isinstance(given, dict), "the request is not a JSON object")
    fields = {key: value for key, value in given.items() if value is not None}
    for key, values in _ALLOWED_VALUES.items():
        refuse(
            fields.get(key, values[0]) not in values,
            f"{key}: only {values[0]!r} is possible here; leave it out",
        )
    messages: Any = fields.get("messages")
    refuse(not isinstance(messages, list) or not messages, "messages: expected a list of one or more")
    read = [read_client_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    refuse(
        read[-1]["role"] == "assistant",
        "messages: the last one is the assistant's, whose turn the model samples",
    )
    stop = fields.get("stop", [])
    stop = [stop] if isinstance(stop, str) else stop
    refuse(not isinstance(stop, list), "stop: expected text or a list of texts")
    tools = tool_schemas(fields.get("tools", [])) or episode.tools or []
    try:
        check_text([read, tools])
    except (ValueError, RecursionError):
        raise InputError("messages, tools: half a surrogate pair is not text") from None
    ignored = sorted(fields.keys() - _READ_FIELDS - _ALLOWED_VALUES.keys())
    for key in ignored:
        _note_ignored(key)
    max_tokens = fields.get("max_completion_tokens", fields.get("max_tokens"))
    return ChatRequest(read, tools, stop, max_tokens, fields, ignored)


def read_client_message(message: Any, origin: str) -> dict[str, Any]:
    """Return a message as `read_message` does, without the fields of answers that agents may not send back."""
    read = read_message(message, origin)
    return {
        key: read[key] for key in ("role", "content", "name", "tool_call_id", "tool_calls") if key in read
    }


@functools.cache
def _note_ignored(key: str) -> None:
    """Print once that a field has no effect."""
    print0(f"note: an agent's request sets {key!a:.80}, which has no effect: the run's flags decide")


def _message(turn: Turn, request: ChatRequest) -> dict[str, Any]:
    """Return a turn as a message for its agent, with the arguments of calls as JSON text.

    A stop string, and the rest of the token in which it ends, are left out.
    """
    answer: dict[str, Any] = {"content": turn.text}
    if request.fields.get("tool_choice") != "none":
        # Without tools the format of calls need not be known.
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
        # Some templates take ids of nine letters and digits only.
        calls.append({"id": f"c{turn.number:05}{i:03}", "type": "function", "function": function})
    return {**message, "tool_calls": calls} if calls else message


def chat_completion(turn: Turn, branch: Branch, request: ChatRequest) -> dict[str, Any]:
    """Return the answer to a request, without `stream`."""
    message = _message(turn, request)
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
    """Return a completion as a stream of events: one event with all of it, and the end of the stream."""
    (choice,) = completion["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]
    chunk = {**completion, "object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
