"""Requests of programs in OpenAI's format, and the answers.

A request may ask for the truncation of its turn; other fields that would change how the run samples are refused.
"""

import contextlib
import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from minirl.agents.loopback import Answer, HttpError
from minirl.data.task import check_text
from minirl.data.tools import tool_schemas
from minirl.episodes.episode import Episode
from minirl.episodes.turn import Turn
from minirl.errors import InputError, refuse
from minirl.truncation import Truncation

MODEL = "policy"
# The values that change nothing; others are refused. None counts as absent.
_ONLY: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "parallel_tool_calls": (True,),
    "top_logprobs": (0,),
    "modalities": (["text"],),
    "logprobs": (False, True, 0, 1),
}
# Ignored: the run sets the random keys, and the tokens that end a turn.
_WITHOUT_EFFECT = {
    *("model", "user", "seed", "metadata", "store", "safety_identifier", "prompt_cache_key", "request_id"),
    *("cache_salt", "priority", "stop_token_ids", "skip_special_tokens", "spaces_between_special_tokens"),
}
_READ = {"max_tokens", "max_completion_tokens", "stop", "temperature", "return_token_ids"}
_MESSAGE_KEYS = {"role", "content", "name", "tool_call_id", "tool_calls"}
# Programs send back these fields of answers. Templates do not use them.
_DROPPED_KEYS = {
    "reasoning_content",
    "reasoning",
    "refusal",
    "annotations",
    "audio",
    "function_call",
    "parse_error",
}


@dataclass(frozen=True)
class Asked:
    """A request. prompt: all messages from the first one on.

    stop, max_tokens, truncation: see `Generate`.

    fields: the request as it came, for the form of its answer. tools: those that a prompt of messages shows.
    """

    prompt: list[Any]
    stop: tuple[str, ...]
    max_tokens: int | None
    truncation: dict[str, Any]
    fields: dict[str, Any]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class Sampled:
    """The answer to a request. number: the turn's place in its episode. num_prompt_tokens: all before the turn.

    asked: the request. If a turn ends with one of its stop strings, a program gets neither the string nor the rest of
    the last token.
    """

    turn: Turn
    number: int
    num_prompt_tokens: int
    asked: Asked

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        """The turn as a message for a program, with JSON text as the arguments of calls."""
        said: dict[str, Any] = {"content": self.turn.text}
        if self.asked.fields.get("tool_choice") != "none":
            # Without tools the format of calls need not be known.
            with contextlib.suppress(InputError):
                said = self.turn.message
        message: dict[str, Any] = {"role": "assistant", "content": self._cut(said["content"] or "")}
        for key in ("reasoning_content", "parse_error"):
            if key in said:
                message[key] = said[key]
        calls = said.get("tool_calls", [])
        if calls:
            message["tool_calls"] = [_call(call["function"], self.number, i) for i, call in enumerate(calls)]
        return message

    def _cut(self, text: str) -> str:
        ends = [text.find(string) for string in self.asked.stop if string in text]
        return text[: min(ends, default=len(text))]


def read_request(path: str, body: bytes, episode: Episode) -> Asked:
    """Raises HttpError for a request that cannot be answered, naming the field."""
    if path != "v1/chat/completions":
        raise HttpError(HTTPStatus.NOT_FOUND, f"there is no /{path:.80}; there is /v1/chat/completions")
    try:
        fields = _json_object(body)
        return _read_chat({key: value for key, value in fields.items() if value is not None}, episode)
    except InputError as error:
        raise HttpError(HTTPStatus.BAD_REQUEST, str(error)) from None


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the request is no JSON: {error}") from None
    refuse(not isinstance(fields, dict), "the request is not a JSON object")
    for key, value in fields.items():
        _check_characters(value, ascii(key)[1:-1])
    return fields


def models(episode: Episode) -> Answer:
    """The list of models, which has one."""
    length = len(episode.prompt_ids) + episode.max_tokens
    card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "minirl", "max_model_len": length}
    return Answer.of_json({"object": "list", "data": [card]})


def same_messages(first: Sequence[dict[str, Any]], second: Sequence[dict[str, Any]]) -> bool:
    """Return whether two conversations say the same."""
    return [_meaning(message) for message in first] == [_meaning(message) for message in second]


def template_form(rest: list[Any]) -> list[Any]:
    """Return messages as chat templates take them, with values as arguments of calls."""
    return [_with_values(message) for message in rest]


def _with_values(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as values."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        called = {"name": function["name"], "arguments": _json_value(function["arguments"])}
        calls.append({**call, "function": called})
    return {**message, "tool_calls": calls}


def _meaning(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the arguments of its calls as values, and without the calls' ids."""
    calls = [call["function"] for call in _with_values(message).get("tool_calls", [])]
    return {**{key: message.get(key) for key in ("role", "content", "name", "tool_call_id")}, "calls": calls}


def _json_value(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return text


def _call(function: dict[str, Any], number: int, i: int) -> dict[str, Any]:
    """A call of a tool. Some templates take ids of nine letters and digits only."""
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    called = {"name": function["name"], "arguments": arguments}
    return {"id": f"c{number % 10**5:05}{i % 10**3:03}", "type": "function", "function": called}


def _read_chat(fields: dict[str, Any], episode: Episode) -> Asked:
    sampling = _read_sampling(fields, episode, "messages", "tools", "stream", "stream_options")
    what = "messages: the run's prompts are text, to which no template is applied; see --chat"
    refuse(not episode.is_chat, what)
    tools = tool_schemas(fields.get("tools", [])) or episode.tools
    messages = fields.get("messages")
    refuse(not isinstance(messages, list) or not messages, "messages: expected a list of one or more")
    assert isinstance(messages, list)
    refuse(type(fields.get("stream", False)) is not bool, "stream: expected true or false")
    prompt = [_read_message(message, i) for i, message in enumerate(messages)]
    return Asked(prompt, *sampling, fields, tools)


def _read_sampling(
    fields: dict[str, Any], episode: Episode, *others: str
) -> tuple[tuple[str, ...], int | None, dict[str, Any]]:
    """Return the stop strings, the limit and the truncation of a turn. others: fields that are read elsewhere."""
    unknown = fields.keys() - {*others, *_READ, *Truncation._fields, *_ONLY, *_WITHOUT_EFFECT}
    refuse(bool(unknown), f"{', '.join(sorted(unknown))!r:.80}: not known here; leave it out")
    # Evaluations may be greedy, which programs do not know.
    is_greedy = episode.temperature == 0
    for key, values in _ONLY.items():
        is_same = any(
            type(fields.get(key)) in (type(value), float) and fields[key] == value for value in values
        )
        refuse(key in fields and not is_same, f"{key}: only {values[0]!r} is possible here; leave it out")
    temperature = fields.get("temperature", episode.temperature)
    is_number = type(temperature) in (int, float)
    is_same = is_number and (temperature == episode.temperature or (is_greedy and temperature >= 0))
    refuse(
        not is_same,
        f"temperature: this run samples with {episode.temperature:g}; leave it out",
    )
    stop = fields.get("stop", [])
    strings = [stop] if isinstance(stop, str) else stop
    is_list = isinstance(strings, list) and all(isinstance(string, str) for string in strings)
    refuse(not is_list, "stop: expected text or a list of texts")
    for string in strings:
        refuse(not string or "\ufffd" in string, "stop: '' and U+FFFD end no text")
    limits = [fields[key] for key in ("max_completion_tokens", "max_tokens") if key in fields]
    for limit in limits:
        refuse(type(limit) is not int or limit < 1, "max_tokens: expected a number from 1 on")
    truncation = {name: fields[name] for name in Truncation._fields if name in fields}
    if truncation.get("top_k") == -1:
        # vLLM's name for all tokens.
        truncation["top_k"] = 0
    episode.truncation._replace(**truncation).checked()
    return tuple(strings), min(limits, default=None), truncation


def _read_message(message: Any, i: int) -> dict[str, Any]:
    """Return a message as chat templates take it, with JSON text as arguments of calls."""
    place = f"messages[{i}]"
    refuse(not isinstance(message, dict), f"{place}: expected an object")
    message = {key: value for key, value in message.items() if value is not None and key not in _DROPPED_KEYS}
    unknown = message.keys() - _MESSAGE_KEYS
    refuse(bool(unknown), f"{place}: {', '.join(sorted(unknown))!r:.80}: not known here; leave it out")
    content = message.get("content", "")
    if isinstance(content, list):
        content = "".join(_part_text(part, place) for part in content)
    message["content"] = content
    for key in message.keys() - {"tool_calls"}:
        refuse(not isinstance(message[key], str), f"{place}: {key}: expected text")
    refuse("role" not in message, f"{place}: has no role")
    calls = message.pop("tool_calls", [])
    refuse(
        not isinstance(calls, list) or not all(map(_is_call, calls)), f"{place}: tool_calls: expected calls"
    )
    for call in calls:
        # It may spell out half a surrogate pair again.
        _check_characters(_json_value(call["function"]["arguments"]), f"{place}: tool_calls")
    if calls:
        message["tool_calls"] = calls
    return message


def _part_text(part: Any, place: str) -> str:
    is_text = isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    refuse(not is_text, f"{place}: content: only text is possible here")
    text: str = part["text"]
    return text


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and all(
        isinstance(function.get(key), str) for key in ("name", "arguments")
    )


def _check_characters(value: Any, place: str) -> None:
    """Refuse text in a JSON value that cannot be tokenized."""
    try:
        check_text(value)
    except UnicodeEncodeError:
        raise InputError(f"{place}: half a surrogate pair is not text") from None
    except RecursionError:
        raise InputError(f"{place}: is nested too deeply") from None


def answer_of(sampled: Sampled) -> Answer:
    """Return the answer to a request, in the form that it asks for."""
    fields = sampled.asked.fields
    turn = sampled.turn
    choice: dict[str, Any] = {"index": 0, "finish_reason": turn.finish_reason, "logprobs": None}
    # Named like vLLM's: a token may be a part of a character.
    tokens = [f"token_id:{i}" for i in turn.ids]
    choice["message"] = sampled.message
    if "tool_calls" in sampled.message and turn.finish_reason == "stop":
        choice["finish_reason"] = "tool_calls"
    if fields.get("logprobs", False) is not False:
        entries = [
            {"token": token, "logprob": x, "bytes": None, "top_logprobs": list[Any]()}
            for token, x in zip(tokens, turn.logprobs, strict=True)
        ]
        choice["logprobs"] = {"content": entries}
    if fields.get("return_token_ids") is True:
        choice["token_ids"] = turn.ids
    before, count = sampled.num_prompt_tokens, len(tokens)
    usage = {"prompt_tokens": before, "completion_tokens": count, "total_tokens": before + count}
    frame = {
        "id": f"turn-{sampled.number}",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
    }
    if fields.get("stream", False):
        return _streamed(fields, frame, choice, usage)
    return Answer.of_json({**frame, "choices": [choice], "usage": usage})


def _streamed(
    fields: dict[str, Any], frame: dict[str, Any], choice: dict[str, Any], usage: dict[str, int]
) -> Answer:
    """Return an answer as a stream of events, with the whole message in one."""
    frame = {**frame, "object": "chat.completion.chunk", "usage": None}
    delta = dict(choice.pop("message"))
    if "tool_calls" in delta:
        delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(delta["tool_calls"])]
    chunks: list[Any] = [{**frame, "choices": [{**choice, "delta": delta}]}]
    options = fields.get("stream_options")
    if isinstance(options, dict) and options.get("include_usage") is True:
        chunks.append({**frame, "choices": [], "usage": usage})
    events = [*map(json.dumps, chunks), "[DONE]"]
    return Answer("".join(f"data: {event}\n\n" for event in events).encode(), "text/event-stream")
