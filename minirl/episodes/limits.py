"""Limits at which episodes end."""

import sys
from dataclasses import dataclass

from minirl.episodes.episode import Episode

# The limit without --max-turns: some programs would never stop.
MAX_TURNS = 1000


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits: an episode that has reached one and asks for a further turn ends. 0: no limit; for turns, MAX_TURNS.

    max_turns: its turns. max_sampled_tokens: the tokens sampled in all its turns; this limit also cuts a turn off.
    max_seconds: the time that its function worked and waited, without the time of its turns.
    """

    max_turns: int = 0
    max_sampled_tokens: int = 0
    max_seconds: float = 0.0

    def room_to_sample(self, episode: Episode) -> int:
        """Return how many more tokens the episode may sample."""
        if self.max_sampled_tokens == 0:
            return sys.maxsize
        return self.max_sampled_tokens - sum(turn.num_tokens for turn in episode.all_turns)

    def reached(self, episode: Episode, seconds: float) -> str | None:
        """Return the finish reason of an episode that may not have the turn it asks for; None if it may.

        seconds: how long its function has worked and waited.
        """
        num_turns = len(episode.all_turns)
        if num_turns >= (self.max_turns or MAX_TURNS):
            return "max_turns"
        if self.room_to_sample(episode) < 1:
            return "max_tokens"
        if num_turns and 0 < self.max_seconds < seconds:
            return "timeout"
        return None

    def ends(self, episode: Episode) -> dict[int, str]:
        """Return the finish reasons of an episode's branches, by number, if they end with their last turns."""
        branches = episode.branches
        ends = {}
        for turn in episode.all_turns:
            is_own_limit = turn.finish_reason == "length" and turn.end < branches[turn.branch].max_tokens
            ends[turn.branch] = "turn_length" if is_own_limit else turn.finish_reason
        if turn.finish_reason == "length" and self.room_to_sample(episode) < 1:
            ends[turn.branch] = "max_tokens"
        return ends


NO_LIMITS = EpisodeLimits()
