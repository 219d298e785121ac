"""What there is to tell of an episode that has ended: its turns, its rewards, and its tokens as texts."""

from collections.abc import Mapping, Sequence
from typing import Literal

from minirl.collect.episode import Branch, Episode
from minirl.data.tokenizer import Tokenizer
from minirl.rollouts import EpisodeRecord, Segment, TurnRecord


def record_of(episode: Episode, rewards: Mapping[str, float | None], tokenizer: Tokenizer) -> EpisodeRecord:
    """The record of an episode. rewards: by name, all of them."""
    turns = []
    for turn, given in zip(episode.all_turns, episode.rewards[1:], strict=True):
        record_of_turn = TurnRecord(
            start=turn.start,
            num_tokens=len(turn.ids),
            finish_reason=turn.finish_reason,
            branch=turn.branch,
            parse_error=turn.parse_error,
            rewards=given,
        )
        turns.append(record_of_turn)
    turns.sort(key=lambda turn: turn.branch)
    record = EpisodeRecord(turns=turns, rewards=rewards)
    if record.is_one_answer:
        return record
    # In order of their numbers: a process of its own tells of a branch when its first turn is asked for.
    begun = [branch for _, branch in sorted(episode.branches.items()) if branch.turns]
    segments = []
    for branch in begun:
        segments += _segments(branch, tokenizer)
    return EpisodeRecord(turns, rewards, _messages(begun[-1]), segments)


def sum_of_rewards(episode: Episode, returned: Mapping[str, float | None]) -> dict[str, float | None]:
    """The rewards that were given and returned; one that was returned as None stays None."""
    rewards = dict(returned)
    for given in episode.rewards:
        for name, value in given.items():
            so_far = rewards.get(name, 0.0)
            rewards[name] = None if so_far is None else so_far + value
    return rewards


def _messages(branch: Branch) -> list[dict[str, str]]:
    """A branch's messages, of each what is text; none of a branch that begins with token ids."""
    if not branch.has_messages:
        return []
    messages = []
    for message in branch.messages:
        messages.append({key: value for key, value in message.items() if isinstance(value, str)})
    return messages


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
