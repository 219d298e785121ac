"""An episode as texts: what reward functions, rollouts.jsonl and `minirl.extras.show` see of its turns.

They are made from the tokens on demand: most are needed once or never.
"""

import functools
from typing import Any, cast

from minirl.data import answers
from minirl.data.task import Messages, as_messages, conversation, is_token_ids
from minirl.data.tokenizer import Tokenizer
from minirl.errors import InputError
from minirl.rollouts import Rollout

# The fields of a turn in rollouts.jsonl.
TURN_FACTS = ("start", "num_tokens", "finish_reason", "branch", "parse_error", "extra")


def view_of(rollout: Rollout, prompt: str | Messages, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the messages, segments and turns of a rollout, as JSON values. prompt: the row's.

    messages: the conversation, of the last branch; [] if that begins with token ids. segments: all tokens after the
    row's prompt, branch by branch, with special tokens spelt out; the sampled ones are the turns. {} for an episode
    that was one answer to the prompt, and could not call tools.
    """
    turns = rollout.episode.turns
    is_one_answer = len(turns) <= 1 and all(
        turn.start == turn.branch == 0 and turn.parse_error is None for turn in turns
    )
    if is_one_answer and not (turns and tokenizer.tools):
        return {}
    return {
        "messages": messages_of(rollout, prompt, tokenizer),
        "segments": [
            segment for branch in rollout.branches for segment in _segments(rollout, branch, tokenizer)
        ],
        "turns": [{name: getattr(turn, name) for name in TURN_FACTS} for turn in turns],
    }


def messages_of(rollout: Rollout, prompt: str | Messages, tokenizer: Tokenizer) -> Messages:
    """Return the conversation of a rollout's last branch as TRL has it; [] if the branch begins with token ids.

    prompt: the row's. Answers have no special tokens; if the model may call tools, they have its calls.
    """
    begun = prompt if rollout.episode.prompt is None else rollout.episode.prompt
    if is_token_ids(begun):
        return []
    tools = tokenizer.tools if rollout.episode.tools is None else rollout.episode.tools
    tokenizer = tokenizer.with_tools(tools)
    number = rollout.rollout_id.branch
    answer_start = 0
    turns = []
    for turn in rollout.episode.turns:
        if turn.branch != number:
            continue
        if turn.inserted:
            answer_start = turn.start
        reads_calls = turn.is_answer and bool(tools)
        answer = functools.partial(_answer, tokenizer, rollout, answer_start, turn.end, reads_calls)
        turns.append((turn.inserted, answer))
    return as_plain(conversation(as_messages(cast(str | Messages, begun)), turns))


def as_plain(messages: Messages) -> Messages:
    """Return messages with the fields that JSON surely holds."""
    plain = []
    for message in messages:
        structures = {key: message[key] for key in ("content", "tool_calls") if key in message}
        plain.append({key: value for key, value in message.items() if isinstance(value, str)} | structures)
    return plain


def _answer(
    tokenizer: Tokenizer, rollout: Rollout, start: int, end: int, reads_calls: bool
) -> str | dict[str, Any]:
    """Return the answer from `start` to `end` among a branch's tokens after its prompt: text, or with its calls."""
    first = rollout.num_prompt_tokens + start
    ids = rollout.tokens[first : rollout.num_prompt_tokens + end]
    text = tokenizer.decode(ids)
    if not reads_calls:
        return text
    try:
        message = dict(answers.parsed_answer(tokenizer, ids.tolist(), rollout.tokens[:first]))
    except InputError:  # nothing says how the model writes calls
        return text
    # The text shows what could not be read.
    return message if message.pop("parse_error", None) is None else message | {"content": text}


def _segments(rollout: Rollout, branch: Rollout, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return a branch's tokens turn by turn, with the tokens appended before each, and its prompt if not the row's."""
    number = branch.rollout_id.branch

    def segment(kind: str, first: int, last: int) -> dict[str, Any]:
        text = tokenizer.decode(branch.tokens[first:last], skip_special_tokens=False)
        return {"kind": kind, "text": text, "num_tokens": last - first, "branch": number}

    num_prompt_tokens = last = branch.num_prompt_tokens
    segments = [segment("prompt", 0, last)] if number > 0 else []
    for turn in rollout.episode.turns:
        if turn.branch == number:
            first = num_prompt_tokens + turn.start
            if first > last:
                segments.append(segment("environment", last, first))
            last = num_prompt_tokens + turn.end
            segments.append(segment("sampled", first, last))
    return segments
