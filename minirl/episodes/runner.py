"""Run the functions that write rollouts on the engine: the turns that they yield are decoded together.

A function may run in this process or in others (`program.Host`). While it works on its reply, its episode waits in the
engine and the others are decoded.
"""

import itertools
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from torch import Tensor

from minirl.data.answers import parsed_answer
from minirl.data.chat_turns import After, is_messages
from minirl.data.prompts import PromptStream
from minirl.data.stop_strings import StopStrings
from minirl.data.task import Messages
from minirl.data.tokenizer import Tokenizer
from minirl.episodes.episode import REWARD, Branch, Episode, Generate, RolloutFunction, Turn, TurnReader
from minirl.episodes.program import Ended, Failed, Host, InProcess, Reply
from minirl.episodes.view import record_of, sum_of_rewards
from minirl.errors import InputError, RolloutError, refuse
from minirl.files.redaction import escaped
from minirl.generation.engine import Engine
from minirl.ranks.process_group import print_here
from minirl.rollouts import Completion, EpisodeRecord, Request, Rollout, RolloutId, appended, rollout_of

NO_BUDGET = sys.maxsize
# Of a wait for replies while nothing is decoded; rewards are looked after in between.
WAIT_S = 0.05
# With on_error "end", up to this share of the episodes of a phase (at least one) may fail.
MAX_FAILED_FRAC = 0.05
# Where an episode ends without --max-turns: some programs ask for ever.
MAX_TURNS = 1000
# How a tool's result begins that is an error, in TRL and `tool_loop`.
TOOL_ERROR = "{'error': "


@dataclass(frozen=True)
class EpisodeLimits:
    """Where an episode ends that asks for a further turn; 0: no limit; of turns, MAX_TURNS.

    max_turns: it has had. max_sampled_tokens: of all its turns; they cut a turn off too. max_seconds: that its function
    has worked and waited by itself, in a process of its own; those of a function in this process are not counted.
    """

    max_turns: int = 0
    max_sampled_tokens: int = 0
    max_seconds: float = 0.0


NO_LIMITS = EpisodeLimits()


class TurnEnd(NamedTuple):
    """How many tokens there were after the prompt of a branch when a turn of it had ended, and why it ended."""

    num_tokens: int
    finish_reason: str
    branch: int = 0


@dataclass
class RunningBranch:
    """A branch of a running episode. Numbers of tokens are those after its prompt.

    request: with `stop_test` and `turn_start` of its present turn; while the engine does not have it, with all tokens.
    is_held: whether the engine has it, between two turns. turn_limit: how many tokens there are when the present turn
    ends, at the latest. num_before: how many there were when the last turn ended. inserted: the messages that are
    appended before the present turn. answer_start: how many tokens there were when the last of these had been appended.
    part_start: how many there were when the engine took up the present turn, in this phase.
    rollout: as it was at the end of the last turn.
    """

    request: Request
    branch: Branch
    is_held: bool = False
    turn_limit: int = 0
    num_before: int = 0
    inserted: Messages = field(default_factory=list)
    answer_start: int = 0
    part_start: int = 0
    rollout: Rollout | None = None

    @property
    def seen(self) -> Rollout | None:
        """The rollout up to the last turn of `branch`, which has dropped one that nobody saw; None without any."""
        if self.rollout is None or not self.branch.turns:
            return None
        length = self.rollout.num_prompt_tokens + self.branch.num_tokens
        if length == len(self.rollout.tokens):
            return self.rollout
        return replace(
            self.rollout,
            tokens=self.rollout.tokens[:length],
            loss_mask=self.rollout.loss_mask[:length],
            sample_logprobs=self.rollout.sample_logprobs[:length],
            weight_version=self.rollout.weight_version[:length],
        )


@dataclass
class RunningEpisode:
    """An episode between its beginning and the end of its last turn.

    request: of the row's prompt, as it was given. number: that its function's replies have.
    branches: those that have begun, by number. present: that of the present turn; None before the first one, and where
    a new branch has no room for its prompt.
    turn_ends: of the turns that have ended, in their order.
    budget: how many tokens the episode may sample in this phase from the beginning of the present turn's part on.
    """

    request: Request
    episode: Episode
    number: int
    branches: dict[int, RunningBranch] = field(default_factory=dict)
    present: RunningBranch | None = None
    turn_ends: list[TurnEnd] = field(default_factory=list)
    budget: int = NO_BUDGET

    def part_limit(self, branch: RunningBranch) -> int:
        """How many tokens there are when this phase's part of the branch's turn ends, at the latest."""
        return min(branch.turn_limit, branch.part_start + self.budget)

    def rollout(self, finish_reason: str, ends: Mapping[int, str], record: EpisodeRecord) -> Rollout:
        """What was sampled up to the end of the last turn, of which there is one. ends: of the branches, by number."""
        begun = [(self.branches[number].seen, ends.get(number, "")) for number in sorted(self.branches)]
        *earlier, (last, own_end) = [(seen, end) for seen, end in begun if seen is not None]
        return replace(
            last,
            finish_reason=finish_reason,
            branch_end=own_end,
            episode=record,
            earlier=tuple(replace(branch, finish_reason=end) for branch, end in earlier),
        )


@dataclass(frozen=True)
class RecordedBranch:
    """A branch of a paused episode of an earlier process: the ids of its prompt, and the tokens behind them."""

    prompt_ids: tuple[int, ...]
    sampled: Completion


@dataclass(frozen=True)
class RecordedEpisode:
    """A paused episode of an earlier process.

    request: as for `EpisodeRunner.begin`. branches: by number. turn_ends: as in `RunningEpisode`.
    """

    request: Request
    branches: Mapping[int, RecordedBranch]
    turn_ends: Sequence[TurnEnd]


@dataclass(slots=True)
class _Reader:
    """Reads a turn: the last of these tokens int64 [L], from `first` on; the answer begins at `answer_first`."""

    tokenizer: Tokenizer
    tokens: Tensor
    first: int
    answer_first: int

    def of_turn(self) -> TurnReader:
        return TurnReader(self._text, self._message, self._answer)

    def _text(self) -> str:
        return self.tokenizer.decode(self.tokens[self.first :])

    def _message(self) -> dict[str, Any]:
        return parsed_answer(self.tokenizer, self.tokens[self.first :].tolist(), self.tokens[: self.first])

    def _answer(self) -> str:
        return self.tokenizer.decode(self.tokens[self.answer_first :])


class EpisodeRunner:
    """Runs episodes, phase by phase. One that has used up its budget is paused until it is run again.

    Not collective.
    """

    def __init__(
        self,
        engine: Engine,
        rollout: RolloutFunction | Host,
        prompts: PromptStream,
        *,
        limits: EpisodeLimits = NO_LIMITS,
        reward_names: Collection[str] = (),
        shows_environment: bool = False,
    ):
        """rollout: a generator function, see `episode`, or what runs it in other processes.

        reward_names: of the rewards that an episode has to give. One that ends at a limit before it has given them gets
        0, and one whose function fails None. shows_environment: whether reward functions ask for `environments`.
        """
        self._engine = engine
        self._host: Host = InProcess(rollout) if callable(rollout) else rollout
        self._name = self._host.name
        self._prompts = prompts
        self._limits = limits
        self._reward_names = reward_names
        self._shows_environment = shows_environment
        self._stop_tests: dict[tuple[str, ...], StopStrings] = {}
        self._num_sampled = 0
        self._num_failed = 0
        self._num_tool_results: Counter[bool] = Counter()
        self._num_restarted = 0
        # Of episodes that are not running yet.
        self._kept_replies: list[tuple[int, Reply]] = []
        self._running: dict[int, RunningEpisode] = {}
        # Of all branches of the running episodes that have begun.
        self._number_of: dict[RolloutId, int] = {}
        self._ended: list[Rollout] = []
        # Of branches of episodes that have ended, which the engine still has.
        self._over: list[RolloutId] = []
        self._paused: list[RunningEpisode] = []
        # Of this phase. By prompt: how many of its episodes have not begun their first turn, and those that could.
        self._weight_version = 0
        self._num_unbegun: Counter[int] = Counter()
        self._begun: dict[int, list[RunningEpisode]] = {}
        self._num_failed_in_phase = 0
        self._max_failed = 0

    def begin(self, request: Request) -> RunningEpisode:
        """A new episode, whose function is asked for its first turn. Raises InputError if it is no such function."""
        row = self._prompts.row(request.rollout_id.prompt_ordinal)
        tokenizer = self._prompts.tokenizer
        episode = Episode(
            row,
            seed=request.key,
            max_tokens=request.max_new_tokens,
            tools=tokenizer.tools,
            prompt_ids=list(request.prompt_ids),
            is_chat=tokenizer.is_chat(row.prompt),
            temperature=request.temperature,
            environment={} if self._shows_environment else None,
        )
        return RunningEpisode(request, episode, self._host.begin(episode))

    def submit(self, episodes: Sequence[RunningEpisode], *, weight_version: int) -> None:
        """Run new and paused episodes, each with its `budget`. Raises InputError as `Engine.submit`."""
        self._weight_version = weight_version
        self._num_failed_in_phase = 0
        self._max_failed = max(1, int(MAX_FAILED_FRAC * len(episodes)))
        for running in episodes:
            self._running[running.number] = running
            if running.present is None:
                self._num_unbegun[running.request.rollout_id.prompt_ordinal] += 1
        self._start([running for running in episodes if running.present is not None])
        self._take_replies(0.0)

    @property
    def is_busy(self) -> bool:
        """Whether there are episodes that neither have ended nor are paused."""
        return bool(self._running)

    def step(self) -> list[Rollout]:
        """Decode one more token of each episode that has a turn; returns the rollouts of those that have ended.

        If none has a turn, wait a moment for replies. Raises RolloutError for what the function may not ask for, and
        for a failure in its own process, naming function, row and turn.
        """
        for rollout in self._engine.step():
            running = self._running[self._number_of[rollout.rollout_id]]
            present = running.branches[rollout.rollout_id.branch]
            num_tokens = len(rollout.tokens) - rollout.num_prompt_tokens
            num_sampled = num_tokens - present.part_start
            running.budget -= num_sampled
            self._num_sampled += num_sampled
            present.is_held = True
            if rollout.finish_reason == "length" and num_tokens < present.turn_limit:
                self._pause(running)
            else:
                self._give_turn(running, rollout)
        self._take_replies(0.0 if self._engine.is_decoding else WAIT_S)
        ended, self._ended = self._ended, []
        return ended

    def is_waiting(self) -> bool:
        """Whether `step` would only wait for replies: no episode has a turn to be decoded, and no reply is there."""
        self._take_replies(0.0)
        return self.is_busy and not self._engine.is_decoding

    def take_paused(self) -> list[RunningEpisode]:
        """The episodes that have been paused since the last call."""
        paused, self._paused = self._paused, []
        return paused

    def take_num_sampled(self) -> int:
        """How many tokens all episodes have sampled since the last call."""
        num_sampled, self._num_sampled = self._num_sampled, 0
        return num_sampled

    def take_num_failed(self) -> int:
        """How many episodes have ended by a failure of the function since the last call."""
        num_failed, self._num_failed = self._num_failed, 0
        return num_failed

    def take_num_restarted(self) -> int:
        """How many paused episodes have begun anew since the last call."""
        num_restarted, self._num_restarted = self._num_restarted, 0
        return num_restarted

    def take_num_tool_results(self) -> tuple[int, int]:
        """How many results of tools were appended since the last call, and how many of them are errors, as TRL's."""
        results, self._num_tool_results = self._num_tool_results, Counter()
        return results.total(), results[True]

    def restore(self, recorded: Sequence[RecordedEpisode]) -> list[RunningEpisode]:
        """Paused episodes of an earlier process: their function runs again, and gets the turns that it got then.

        One that then does something else than it did begins anew, and is counted. Raises RolloutError if it fails or
        asks for what it may not ask for.
        """
        restored = [self.begin(one.request) for one in recorded]
        left = {running.number: i for i, running in enumerate(restored)}
        anew: set[int] = set()
        while left:
            for number, reply in self._host.replies(WAIT_S):
                i = left[number]
                if i in anew:
                    self._kept_replies.append((number, reply))
                    del left[number]
                    continue
                if isinstance(reply, Failed):
                    raise RolloutError(self._failure(restored[i], reply.why))
                try:
                    replay = self._replay_turn(restored[i], recorded[i], reply)
                except InputError as error:
                    raise RolloutError(self._failure(restored[i], str(error))) from None
                if replay == "goes on":
                    continue
                del left[number]
                if replay == "differs":
                    if not isinstance(reply, Ended):
                        self._host.close(number)
                    self._note_restart(restored[i])
                    restored[i] = self.begin(recorded[i].request)
                    left[restored[i].number] = i
                    anew.add(i)
        self.take_num_tool_results()  # they were counted then
        return restored

    def _note_restart(self, running: RunningEpisode) -> None:
        """Count an episode that begins anew; say so of the first one."""
        self._num_restarted += 1
        if self._num_restarted == 1:
            print_here(
                f"note: {self._place(running.episode)}: given the same turns as in the run that is resumed, it does "
                "something else, and begins anew, see count/restarted; make it a function of its turns and of "
                "episode.seed"
            )

    def _replay_turn(
        self, running: RunningEpisode, recorded: RecordedEpisode, reply: Reply
    ) -> Literal["goes on", "restored", "differs"]:
        """Give the next turn that was recorded to its function, unless there is none left, or it asks for another."""
        new_ids = self._begin_turn(running, reply)
        present = running.present
        if new_ids is None or present is None:
            return "differs"
        before = recorded.branches.get(present.branch.number)
        if before is None or before.prompt_ids != present.request.prompt_ids:
            return "differs"
        appended_before = before.sampled[present.num_before : present.request.turn_start]
        if appended_before.is_sampled.any() or appended_before.tokens.tolist() != new_ids:
            return "differs"
        num_ended = len(running.turn_ends)
        if num_ended == len(recorded.turn_ends):
            for number, branch in running.branches.items():
                branch.request = replace(branch.request, sampled=recorded.branches[number].sampled)
            return "restored"
        num_tokens, finish_reason, number = recorded.turn_ends[num_ended]
        if number != present.branch.number:
            return "differs"
        so_far = replace(present.request, sampled=before.sampled[:num_tokens])
        self._give_turn(running, rollout_of(so_far, finish_reason))
        return "goes on"

    def _take_replies(self, timeout_s: float) -> None:
        """Let the episodes go on whose functions have replied."""
        kept, self._kept_replies = self._kept_replies, []
        for number, reply in [*kept, *self._host.replies(0.0 if kept else timeout_s)]:
            self._go_on(self._running[number], reply)
        if self._over:
            self._engine.release(*self._over)
            self._over = []

    def _go_on(self, running: RunningEpisode, reply: Reply) -> None:
        """Begin the turn of an episode that its function asks for, or end the episode."""
        if isinstance(reply, Failed):
            self._fail(running, reply.why)
            return
        try:
            new_ids = self._begin_turn(running, reply)
        except InputError as error:
            if not isinstance(reply, Ended):
                self._host.close(running.number)
            self._fail(running, str(error))
            return
        if isinstance(reply, Ended):
            self._end(running, reply.reason, reply.returned)
        elif new_ids is None:  # there was no room for what it asked for
            self._cut_off(running, "length")
        elif limit := self._reached_limit(running):
            self._cut_off(running, limit)
        elif not running.turn_ends:
            self._begin_first_turn(running, new_ids)
        elif running.budget == 0:
            self._pause(running, new_ids)
        else:
            self._begin_further_turn(running, new_ids)

    def _begin_first_turn(self, running: RunningEpisode, new_ids: Sequence[int]) -> None:
        """Submit an episode, with the others of its prompt: they share one prefill."""
        self._append(running, new_ids)
        ordinal = running.request.rollout_id.prompt_ordinal
        begun = self._begun.setdefault(ordinal, [])
        begun.append(running)
        self._num_unbegun[ordinal] -= 1
        if self._num_unbegun[ordinal] == 0:
            self._start(sorted(begun, key=lambda running: running.request.rollout_id.sample))
            del self._begun[ordinal]

    def _begin_further_turn(self, running: RunningEpisode, new_ids: Sequence[int]) -> None:
        present = running.present
        assert present is not None
        if not present.is_held:
            self._append(running, new_ids)
            self._start([running])
            return
        present.is_held = False
        present.part_start = present.request.turn_start
        self._engine.resume(
            present.request.rollout_id,
            new_ids,
            max_new_tokens=running.part_limit(present) - present.part_start,
            stop_test=present.request.stop_test,
        )

    def _append(self, running: RunningEpisode, new_ids: Sequence[int]) -> None:
        """Append tokens to the present branch, which the engine does not have."""
        assert running.present is not None
        request = running.present.request
        if new_ids:
            running.present.request = replace(request, sampled=request.sampled + appended(new_ids))

    def _start(self, episodes: Sequence[RunningEpisode]) -> None:
        """Let the engine take up the present turns of these episodes, in branches that it does not have."""
        requests = []
        for running in episodes:
            present = running.present
            assert present is not None
            present.part_start = len(present.request.sampled)
            limit = running.part_limit(present)
            requests.append(replace(present.request, max_new_tokens=limit, holds=True))
            self._number_of[present.request.rollout_id] = running.number
        self._engine.submit(requests, weight_version=self._weight_version)

    def _reached_limit(self, running: RunningEpisode) -> str | None:
        """The finish reason of an episode that may not have the turn it asks for; None if it may."""
        limits = self._limits
        if len(running.turn_ends) >= (limits.max_turns or MAX_TURNS):
            return "max_turns"
        if self._room_to_sample(running) < 1:
            return "max_tokens"
        if running.turn_ends and 0 < limits.max_seconds < self._host.seconds(running.number):
            return "timeout"
        return None

    def _room_to_sample(self, running: RunningEpisode) -> int:
        """How many more tokens may be sampled, whatever is appended."""
        limit = self._limits.max_sampled_tokens
        if limit == 0:
            return sys.maxsize
        return limit - sum(turn.num_tokens for turn in running.episode.all_turns)

    def _ends(self, running: RunningEpisode) -> dict[int, str]:
        """The finish reasons of the branches, by number, if they end with their last turns."""
        ends = {}
        for turn in running.episode.all_turns:
            is_own_limit = turn.finish_reason == "length" and turn.end < turn.limit
            ends[turn.branch] = "turn_length" if is_own_limit else turn.finish_reason
        if turn.finish_reason == "length" and self._room_to_sample(running) < 1:
            ends[turn.branch] = "max_tokens"
        return ends

    def _cut_off(self, running: RunningEpisode, limit: str) -> None:
        """End an episode whose function goes on."""
        self._host.close(running.number)
        self._end(running, limit)

    def _end(
        self,
        running: RunningEpisode,
        finish_reason: str | None,
        returned: Mapping[str, float | None] | None = None,
    ) -> None:
        """End an episode behind its last turn. returned: by its function, if that has ended.

        finish_reason: None for that of the last turn. Raises RolloutError if nobody saw any turn.
        """
        running.episode.drop_unseen()
        if not running.episode.all_turns:
            raise RolloutError(self._failure(running, "ended, and hung up before it got any of its turns"))
        missing = None if finish_reason == "error" else 0.0
        rewards = dict.fromkeys(self._reward_names, missing) | sum_of_rewards(running.episode, returned or {})
        record = record_of(running.episode, rewards, self._prompts.tokenizer)
        # An episode's end is that of the branch which had its last turn, or asked for a further one.
        ends = self._ends(running)
        if finish_reason is None:
            finish_reason = ends[running.episode.all_turns[-1].branch]
        elif running.present is not None:
            ends[running.present.branch.number] = finish_reason
        self._ended.append(running.rollout(finish_reason, ends, record))
        for branch in running.branches.values():
            if branch.is_held:
                self._over.append(branch.request.rollout_id)
        self._forget(running)

    def _forget(self, running: RunningEpisode) -> None:
        del self._running[running.number]
        for branch in running.branches.values():
            self._number_of.pop(branch.request.rollout_id, None)

    def _fail(self, running: RunningEpisode, why: str) -> None:
        """End an episode whose function has failed. Raises RolloutError if that is not forgiven."""
        failure = self._failure(running, why)
        self._num_failed_in_phase += 1
        is_forgiven = self._host.on_error == "end" and self._num_failed_in_phase <= self._max_failed
        if not is_forgiven or not running.turn_ends:
            raise RolloutError(failure)
        if self._num_failed_in_phase == 1:
            print_here(f"note: {failure}\nThe episode ends there, see count/rollout_errors.")
        self._num_failed += 1
        self._end(running, "error")

    def _failure(self, running: RunningEpisode, why: str) -> str:
        num_turns = len(running.turn_ends)
        when = f"after turn {num_turns}" if num_turns else "before its first turn"
        return escaped(f"rollout {self._name} for the row at {running.episode.row.place}, {when}: {why}")

    def _give_turn(self, running: RunningEpisode, rollout: Rollout) -> None:
        """Give the turn with which a branch ends to the function, which is to reply."""
        present = running.present
        assert present is not None
        start = present.request.turn_start
        num_prompt_tokens = rollout.num_prompt_tokens
        first = num_prompt_tokens + start  # of the turn, among the tokens of the prompt and the branch
        if present.inserted:
            present.answer_start = start
        turn = Turn(
            rollout.tokens[first:],
            rollout.sample_logprobs[first:],
            rollout.weight_version[first:],
            rollout.finish_reason,
            branch=present.branch.number,
            start=start,
            limit=present.branch.max_tokens,
            prompt_ids=[] if present.branch.turns else list(present.request.prompt_ids),
            appended=rollout.tokens[num_prompt_tokens + present.num_before : first].tolist() if start else [],
            inserted=present.inserted,
            reader=_Reader(
                self._prompts.tokenizer.with_tools(present.branch.tools),
                rollout.tokens,
                first,
                num_prompt_tokens + present.answer_start,
            ).of_turn(),
        )
        present.rollout = rollout
        present.num_before = turn.end
        running.turn_ends.append(TurnEnd(present.num_before, rollout.finish_reason, present.branch.number))
        running.episode.take(turn)
        self._host.send(running.number, turn)

    def _begin_turn(self, running: RunningEpisode, asked: Reply) -> list[int] | None:
        """Note what the turn is that a function asks for.

        Returns the token ids to append, None if there is no room for a turn or the function has ended.
        """
        if isinstance(asked, Ended):
            refuse(not running.turn_ends, f"{self._name}(episode): ended without a turn; it must yield one")
            self._check_rewards(running.episode, asked.returned)
            return None
        assert isinstance(asked, Generate)
        running.present = present = self._branch(running, asked)
        if present is None:
            return None
        new_ids = self._appended_ids(running.episode, present.branch, asked.after)
        turn_start = present.num_before + len(new_ids)
        room = present.branch.max_tokens - turn_start
        if room < 1:
            refuse(
                not running.turn_ends,
                f"{self._name}(episode): the first turn's `after` leaves no room for a turn",
            )
            return None
        messages = asked.after if is_messages(asked.after) else []
        for message in messages:
            if message["role"] == "tool":
                self._num_tool_results[message["content"].startswith(TOOL_ERROR)] += 1
        present.inserted = [dict(message) for message in messages]
        for message, content in zip(present.inserted, asked.contents, strict=False):
            message["content"] = message["content"] if content is None else content
        # Where nothing more may be sampled the episode ends, unless the turn is one that it has had.
        room_to_sample = max(1, self._room_to_sample(running))
        present.turn_limit = turn_start + min(room, room_to_sample, asked.max_tokens or room)
        stop_test = self._stop_test(asked.stop) if asked.stop else None
        if (present.request.turn_start, present.request.stop_test) != (turn_start, stop_test):
            present.request = replace(present.request, turn_start=turn_start, stop_test=stop_test)
        return new_ids

    def _branch(self, running: RunningEpisode, asked: Generate) -> RunningBranch | None:
        """The branch that a turn is asked for; None for a new one whose prompt leaves no room for a turn."""
        number = asked.branch
        if number in running.branches:
            return running.branches[number]
        request = running.request
        if number != 0:
            place = self._place(running.episode)
            prompt_ids = self._prompts.branch_ids(asked.prompt, place, tools=asked.tools)
            rollout_id = request.rollout_id._replace(branch=number)
            request = self._prompts.request(rollout_id, prompt_ids, request.temperature)
            if request.max_new_tokens < 1:
                refuse(not running.turn_ends, f"{place}: the prompt of its first turn leaves no room for it")
                return None
        branch = running.episode.branch_of(asked)
        branch.max_tokens = request.max_new_tokens
        running.branches[number] = RunningBranch(request, branch)
        return running.branches[number]

    def _check_rewards(self, episode: Episode, returned: Mapping[str, float | None]) -> None:
        """Refuse rewards that nothing is done with, and those that are to be given and are not."""
        given = sorted({*returned, *itertools.chain(*episode.rewards)})
        if not given and not self._reward_names:
            return
        listed = ", ".join(map(repr, given)) or "none"
        place = self._place(episode)
        flags = " ".join("episode" if name == REWARD else f"episode:{name}" for name in given)
        refuse(
            given and not self._reward_names,
            f"{place}: gives rewards ({listed}) that the run does not have: add --reward {flags}",
        )
        for name in self._reward_names:
            refuse(
                name not in given,
                f"{place}: has ended without the reward {name!r} (given: {listed}); give it in every episode, at "
                f"least `episode.reward(0.0, {name!r})`, or return {{{name!r}: None}} where it does not apply",
            )

    def _appended_ids(self, episode: Episode, branch: Branch, after: After) -> list[int]:
        """The token ids of what a function appends behind the turns so far.

        Raises InputError naming function and row.
        """
        place = self._place(episode)
        if not is_messages(after):
            return self._prompts.appended_ids(after, place)
        refuse(
            not branch.turns,
            f"{place}: messages before the first turn; see episode.branch, or write them into the row's prompt",
        )
        is_chat = self._prompts.tokenizer.is_chat(branch.prompt)
        refuse(not is_chat, f"{place}: messages behind a text prompt; see --chat, or append text")
        last = branch.turns[-1]
        end_id = last.ids[-1] if last.finish_reason == "stop" else None
        return self._prompts.appended_ids(after, place, end_id=end_id, tools=branch.tools)

    def _place(self, episode: Episode) -> str:
        return f"{self._name}(episode), for the row at {episode.row.place}"

    def _stop_test(self, strings: tuple[str, ...]) -> StopStrings:
        """The test for these strings, made once for all turns that have them."""
        if strings not in self._stop_tests:
            self._stop_tests[strings] = StopStrings(self._prompts.tokenizer, strings)
        return self._stop_tests[strings]

    def _pause(self, running: RunningEpisode, new_ids: Sequence[int] = ()) -> None:
        """Take an episode out of the engine, with tokens to be appended before its next turn."""
        for branch in running.branches.values():
            if branch.is_held:
                tokens = self._engine.withdraw(branch.request.rollout_id).sampled
                branch.request = replace(branch.request, sampled=tokens)
                branch.is_held = False
        self._append(running, new_ids)
        self._forget(running)
        self._paused.append(running)
