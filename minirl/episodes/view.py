"""What there is to tell of an episode that has ended: its turns, its rewards, and its tokens as texts."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

from minirl.data.task import Messages, as_messages, conversation
from minirl.data.tokenizer import Tokenizer
from minirl.episodes.episode import Branch, Episode, Turn
from minirl.errors import InputError
from minirl.rollouts import EpisodeRecord, Segment, TurnRecord


def record_of(episode: Episode, rewards: Mapping[str, float | None], tokenizer: Tokenizer) -> EpisodeRecord:
    """The record of an episode. rewards: by name, all of them."""
    turns = []
    for turn, given in zip(episode.all_turns, episode.rewards[1:], strict=True):
        record_of_turn = TurnRecord(
            start=turn.start,
            num_tokens=turn.num_tokens,
            finish_reason=turn.finish_reason,
            branch=turn.branch,
            parse_error=turn.parse_error,
            rewards=given,
        )
        turns.append(record_of_turn)
    turns.sort(key=lambda turn: turn.branch)
    record = EpisodeRecord(turns=turns, rewards=rewards, environment=episode.environment)
    if record.is_one_answer and not tokenizer.tools:
        return record
    # In order of their numbers: another process tells of a branch when its first turn is asked for.
    begun = [branch for _, branch in sorted(episode.branches.items()) if branch.turns]
    segments = []
    for branch in begun:
        segments += _segments(branch, tokenizer)
    return replace(record, messages=_messages(begun[-1], tokenizer), segments=segments)


def sum_of_rewards(episode: Episode, returned: Mapping[str, float | None]) -> dict[str, float | None]:
    """The rewards that were given and returned; one that was returned as None stays None."""
    rewards = dict(returned)
    for given in episode.rewards:
        for name, value in given.items():
            so_far = rewards.get(name, 0.0)
            rewards[name] = None if so_far is None else so_far + value
    return rewards


def _messages(branch: Branch, tokenizer: Tokenizer) -> Messages:
    """A branch's messages as TRL has them; none of a branch that begins with token ids."""
    if not branch.has_messages:
        return []
    tools = tokenizer.tools if branch.tools is None else branch.tools
    answers = [
        (turn.inserted, functools.partial(_answer, turn, has_tools=bool(tools))) for turn in branch.turns
    ]
    return as_plain(conversation(as_messages(cast(str | Messages, branch.prompt)), answers))


def as_plain(messages: Messages) -> Messages:
    """Return messages with those of their fields that JSON is known to hold."""
    plain = []
    for message in messages:
        structures = {key: message[key] for key in ("content", "tool_calls") if key in message}
        plain.append({key: value for key, value in message.items() if isinstance(value, str)} | structures)
    return plain


def _answer(turn: Turn, *, has_tools: bool) -> str | dict[str, Any]:
    """The answer that a turn belongs to; where the model may call tools, and the turn is all of it, with its calls."""
    if not turn.is_whole_answer or not has_tools:
        return turn.answer
    try:
        message = dict(turn.message)
    except InputError:  # it is not known how the model writes calls
        return turn.answer
    # What cannot be read is seen in the text.
    return message if message.pop("parse_error", None) is None else message | {"content": turn.text}


def _segments(branch: Branch, tokenizer: Tokenizer) -> list[Segment]:
    """A branch's tokens as texts, turn by turn with what was appended before it; its prompt, if not the row's."""

    def segment(kind: Literal["sampled", "environment", "prompt"], ids: Sequence[int]) -> Segment:
        return Segment(kind, tokenizer.decode(ids, skip_special_tokens=False), len(ids), branch.number)

    segments = []
    if branch.number > 0:
        segments.append(segment("prompt", branch.prompt_ids))
    for turn in branch.turns:
        if turn.appended:
            segments.append(segment("environment", turn.appended))
        segments.append(segment("sampled", turn.ids))
    return segments
