"""Episodes that are running, with the tokens that the engine returned for them."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from minirl.data.task import is_messages
from minirl.data.view import as_plain
from minirl.episodes.episode import Branch, Episode
from minirl.episodes.programs import Program
from minirl.episodes.turn import BranchTokens, Turn
from minirl.rollouts import (
    NO_TOKENS,
    Completion,
    EpisodeRecord,
    Request,
    Rollout,
    TurnFacts,
    appended,
    rollout_of,
)

NO_BUDGET = sys.maxsize


@dataclass
class RunningBranch:
    """A branch of a running episode.

    request: that of its present turn, without tokens. is_held: whether it waits in the engine for its next turn.
    tokens: its tokens so far.
    """

    request: Request
    branch: Branch
    is_held: bool = False
    tokens: BranchTokens = field(default_factory=BranchTokens)

    def completion(self, present: Turn | None) -> Completion:
        """Return all tokens after the prompt, with those appended before the present turn if it is in this branch."""
        rollout = self.tokens.rollout
        tokens = NO_TOKENS if rollout is None else rollout.after_prompt
        if present is None or present.branch != self.branch.number or len(tokens) >= present.start:
            return tokens
        return tokens + appended(present.appended)

    @property
    def seen(self) -> Rollout | None:
        """The rollout up to the last turn of `branch`, without one that reached nobody; None without any turn."""
        rollout = self.tokens.rollout
        if rollout is None or not self.branch.turns:
            return None
        if len(rollout.tokens) == rollout.num_prompt_tokens + self.branch.num_tokens:
            return rollout
        prompt = rollout.tokens[: rollout.num_prompt_tokens]
        completion = rollout.after_prompt[: self.branch.num_tokens]
        return rollout_of(
            rollout.rollout_id,
            prompt,
            completion,
            rollout.finish_reason,
            temperature=rollout.temperature,
        )


@dataclass
class RunningEpisode:
    """An episode between its beginning and the end of its last turn.

    request: the original one of the row's prompt. program: its function, which runs.
    branches: those that have begun, by number.
    turn: the one that the function asks for; None before the first. branch: the turn's; None if a new branch has no
    room for its prompt. part_start: the number of tokens after the branch's prompt when the engine took up the turn in
    this round. budget: how many tokens the episode may sample in this round, from part_start on.
    """

    request: Request
    episode: Episode
    program: Program
    branches: dict[int, RunningBranch] = field(default_factory=dict)
    turn: Turn | None = None
    branch: RunningBranch | None = None
    part_start: int = 0
    budget: int = NO_BUDGET

    @property
    def present(self) -> tuple[RunningBranch, Turn]:
        """The turn that the function asks for, and its branch."""
        assert self.branch is not None, "there is no room for it"
        assert self.turn is not None, "there is no room for it"
        return self.branch, self.turn

    def rollout(
        self, finish_reason: str, ends: Mapping[int, str], rewards: Mapping[str, float | None]
    ) -> Rollout:
        """Return the rollout up to the end of the last turn; it must have one.

        ends: the branches' finish reasons, by number. rewards: all rewards by name.
        """
        begun = [(self.branches[number].seen, ends.get(number, "")) for number in sorted(self.branches)]
        *earlier, (last, own_end) = [(seen, end) for seen, end in begun if seen is not None]
        return replace(
            last,
            finish_reason=finish_reason,
            branch_end=own_end,
            episode=self._record(last.rollout_id.branch, rewards),
            earlier=tuple(replace(branch, finish_reason=end) for branch, end in earlier),
        )

    def _record(self, last: int, rewards: Mapping[str, float | None]) -> EpisodeRecord:
        """Return the facts to store about the episode. last: the number of its last branch."""
        turns = sorted(map(plain_facts, self.episode.all_turns), key=lambda turn: turn.branch)
        record = EpisodeRecord(turns, rewards, self.episode.environment)
        if last == 0:
            # It begins with the row's prompt and the run's tools.
            return record
        branch = self.branches[last].branch
        prompt = as_plain(branch.prompt) if is_messages(branch.prompt) else branch.prompt
        return replace(record, prompt=prompt, tools=branch.tools)


def plain_facts(turn: Turn) -> TurnFacts:
    """Return what is stored of a turn: of messages what JSON holds."""
    return TurnFacts(**{**turn.to_json(), "inserted": as_plain(turn.inserted)})
