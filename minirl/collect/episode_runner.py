"""Run the functions that write rollouts on the engine: the turns that they yield are decoded together.

A function may run in this process or in others (`hosts`). While it works on its reply, its episode waits in the engine
and the others are decoded.
"""

import functools
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minirl.collect.episode import Episode, Generate, RolloutFunction, Turn, TurnReader
from minirl.collect.hosts import Ended, Failed, Host, InProcess, Reply
from minirl.collect.rollout_workers import RolloutWorkers
from minirl.data.answers import parsed_answer
from minirl.data.chat_turns import After, is_messages
from minirl.data.prompts import PromptStream
from minirl.data.stop_strings import StopStrings
from minirl.data.task import Messages
from minirl.errors import InputError, RolloutError, refuse
from minirl.generation.engine import Engine
from minirl.ranks.process_group import print_here
from minirl.rewards.user_process import escaped
from minirl.rollouts import Request, Rollout, RolloutId, Sampled, appended, rollout_of

NO_BUDGET = sys.maxsize
# Of a wait for replies while nothing is decoded; rewards are looked after in between.
WAIT_S = 0.05
# With on_error "end", up to this share of the episodes of a phase (at least one) may fail.
MAX_FAILED_FRAC = 0.05


@dataclass
class RunningEpisode:
    """An episode between its beginning and the end of its last turn.

    request: with `stop_test` and `turn_start` of the present turn; while the engine does not have it, with all tokens.
    number: that its function's replies have. turn_limit: how many tokens after the prompt there are when the present
    turn ends, at the latest; 0 before the first one.
    inserted: the messages that are appended before the present turn. answer_start: how many tokens there were when the
    last of these had been appended.
    turn_ends: for each turn that has ended, how many there were, and why it ended.
    part_start: how many there were when the engine took up the present turn, in this phase.
    budget: how many tokens the episode may sample in this phase from there on.
    rollout: as it was at the end of the last turn.
    """

    request: Request
    episode: Episode
    number: int
    turn_limit: int = 0
    inserted: Messages = field(default_factory=list)
    answer_start: int = 0
    turn_ends: list[tuple[int, str]] = field(default_factory=list)
    part_start: int = 0
    budget: int = NO_BUDGET
    rollout: Rollout | None = None

    @property
    def part_limit(self) -> int:
        """How many tokens after the prompt there are when this phase's part of the turn ends, at the latest."""
        return min(self.turn_limit, self.part_start + self.budget)

    @property
    def num_before(self) -> int:
        """How many tokens after the prompt there were when the last turn ended."""
        return self.turn_ends[-1][0] if self.turn_ends else 0


@dataclass(frozen=True)
class RecordedEpisode:
    """A paused episode of an earlier process.

    request: as for `EpisodeRunner.begin`. sampled: the tokens after the prompt. turn_ends: as in `RunningEpisode`.
    """

    request: Request
    sampled: tuple[Sampled, ...]
    turn_ends: Sequence[tuple[int, str]]


class EpisodeRunner:
    """Runs episodes, phase by phase. One that has used up its budget is paused until it is run again.

    Not collective.
    """

    def __init__(
        self,
        engine: Engine,
        rollout: RolloutFunction | RolloutWorkers,
        prompts: PromptStream,
        *,
        max_turns: int = 0,
    ):
        """rollout: a generator function, see `episode`. max_turns: an episode has no more, 0: as many as it likes."""
        self._engine = engine
        self._host: Host = rollout if isinstance(rollout, RolloutWorkers) else InProcess(rollout)
        self._name = self._host.name
        self._prompts = prompts
        self._max_turns = max_turns
        self._stop_tests: dict[tuple[str, ...], StopStrings] = {}
        self._num_sampled = 0
        self._num_failed = 0
        self._running: dict[int, RunningEpisode] = {}
        self._number_of: dict[RolloutId, int] = {}
        self._ended: list[Rollout] = []
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
            is_chat=tokenizer.is_chat(row),
            temperature=request.temperature,
        )
        return RunningEpisode(request, episode, self._host.begin(episode))

    def submit(self, episodes: Sequence[RunningEpisode], *, weight_version: int) -> None:
        """Run new and paused episodes, each with its `budget`. Raises InputError as `Engine.submit`."""
        self._weight_version = weight_version
        self._num_failed_in_phase = 0
        self._max_failed = max(1, int(MAX_FAILED_FRAC * len(episodes)))
        for running in episodes:
            self._running[running.number] = running
            self._number_of[running.request.rollout_id] = running.number
            if running.turn_limit == 0:
                self._num_unbegun[running.request.rollout_id.prompt_ordinal] += 1
        self._start([running for running in episodes if running.turn_limit > 0])
        self._take_replies(0.0)

    @property
    def is_busy(self) -> bool:
        """Whether there are episodes that neither have ended nor are paused."""
        return bool(self._running)

    def step(self) -> list[Rollout]:
        """Decode one more token of each episode that has a turn; returns the rollouts of those that have ended.

        If none has a turn, wait a moment for replies. Raises InputError for what the function may not ask for, and
        RolloutError for a failure in its own process, naming function, row and turn.
        """
        for rollout in self._engine.step():
            running = self._running[self._number_of[rollout.rollout_id]]
            num_tokens = len(rollout.tokens) - rollout.num_prompt_tokens
            num_sampled = num_tokens - running.part_start
            running.budget -= num_sampled
            self._num_sampled += num_sampled
            if rollout.finish_reason == "length" and num_tokens < running.turn_limit:
                self._pause(running)
            else:
                self._give_turn(running, rollout)
        self._take_replies(0.0 if self._engine.is_decoding else WAIT_S)
        ended, self._ended = self._ended, []
        return ended

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

    def restore(self, recorded: Sequence[RecordedEpisode]) -> list[RunningEpisode]:
        """Paused episodes of an earlier process: their function runs again, and gets the turns that it got then.

        Raises InputError if the function appends other tokens than it did, RolloutError if it fails.
        """
        restored = [self.begin(one.request) for one in recorded]
        left = {running.number: (running, one) for running, one in zip(restored, recorded, strict=True)}
        while left:
            for number, reply in self._host.replies(WAIT_S):
                running, one = left[number]
                if isinstance(reply, Failed):
                    raise RolloutError(self._failure(running, reply.why))
                if self._restore_turn(running, one, reply):
                    del left[number]
        return restored

    def _restore_turn(self, running: RunningEpisode, recorded: RecordedEpisode, reply: Reply) -> bool:
        """Give the next turn that was recorded to its function; returns whether there was none left."""
        start = running.num_before
        new_ids = self._begin_turn(running, reply)
        refuse(new_ids is None, f"{self._changed(running)}: it had a further turn, and now ends")
        sampled = recorded.sampled
        present = sampled[:start] + appended(new_ids or [])
        self._check_appended(running, present, sampled, start=start)
        num_ended = len(running.turn_ends)
        if num_ended == len(recorded.turn_ends):
            running.request = replace(running.request, sampled=sampled)
            return True
        num_tokens, finish_reason = recorded.turn_ends[num_ended]
        so_far = rollout_of(replace(recorded.request, sampled=sampled[:num_tokens]), finish_reason)
        self._give_turn(running, so_far)
        return False

    def _take_replies(self, timeout_s: float) -> None:
        """Let the episodes go on whose functions have replied."""
        for number, reply in self._host.replies(timeout_s):
            self._go_on(self._running[number], reply)

    def _go_on(self, running: RunningEpisode, reply: Reply) -> None:
        """Begin the turn of an episode that its function asks for, or end the episode."""
        if isinstance(reply, Failed):
            self._fail(running, reply.why)
            return
        try:
            new_ids = self._begin_turn(running, reply)
        except InputError as error:
            if self._host.on_error is None:
                raise
            if not isinstance(reply, Ended):
                self._host.close(running.number)
            self._fail(running, str(error))
            return
        if isinstance(reply, Ended):
            assert running.rollout is not None
            self._end(running, running.rollout.finish_reason)
        elif new_ids is None:  # there was no room for what it asked for
            self._host.close(running.number)
            self._end(running, "length")
        elif 0 < self._max_turns <= len(running.turn_ends):
            self._host.close(running.number)
            self._end(running, "max_turns")
        elif not running.turn_ends:
            self._begin_first_turn(running, new_ids)
        elif running.budget == 0:
            self._pause(running, new_ids)
        else:
            running.part_start = running.request.turn_start
            self._engine.resume(
                running.request.rollout_id,
                new_ids,
                max_new_tokens=running.part_limit - running.part_start,
                stop_test=running.request.stop_test,
            )

    def _begin_first_turn(self, running: RunningEpisode, new_ids: Sequence[int]) -> None:
        """Submit an episode, with the others of its prompt: they share one prefill."""
        running.request = replace(running.request, sampled=appended(new_ids))
        ordinal = running.request.rollout_id.prompt_ordinal
        begun = self._begun.setdefault(ordinal, [])
        begun.append(running)
        self._num_unbegun[ordinal] -= 1
        if self._num_unbegun[ordinal] == 0:
            self._start(sorted(begun, key=lambda running: running.request.rollout_id.sample))
            del self._begun[ordinal]

    def _start(self, episodes: Sequence[RunningEpisode]) -> None:
        """Let the engine take up the present turns of these episodes."""
        requests = []
        for running in episodes:
            running.part_start = len(running.request.sampled)
            requests.append(replace(running.request, max_new_tokens=running.part_limit, holds=True))
        self._engine.submit(requests, weight_version=self._weight_version)

    def _end(self, running: RunningEpisode, finish_reason: str) -> None:
        """End an episode behind its last turn."""
        assert running.rollout is not None
        self._ended.append(replace(running.rollout, finish_reason=finish_reason))
        self._engine.release(running.request.rollout_id)
        self._forget(running)

    def _forget(self, running: RunningEpisode) -> None:
        del self._running[running.number]
        del self._number_of[running.request.rollout_id]

    def _fail(self, running: RunningEpisode, why: str) -> None:
        """End an episode whose function has failed. Raises RolloutError if that is not forgiven."""
        failure = self._failure(running, why)
        self._num_failed_in_phase += 1
        is_forgiven = self._host.on_error == "end" and self._num_failed_in_phase <= self._max_failed
        if not is_forgiven or running.rollout is None:
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
        """Give the turn with which a rollout ends to its function, which is to reply."""
        before = running.num_before
        start = running.request.turn_start
        num_prompt_tokens = rollout.num_prompt_tokens
        tokens = rollout.tokens[num_prompt_tokens + before :].tolist()
        new_ids, ids = tokens[: start - before], tokens[start - before :]
        logprobs = rollout.sample_logprobs[num_prompt_tokens + start :].tolist()
        versions = rollout.weight_version[num_prompt_tokens + start :].tolist()
        if running.inserted:
            running.answer_start = start
        turn = Turn(
            ids,
            logprobs,
            rollout.finish_reason,
            start=start,
            reader=self._reader(rollout, num_prompt_tokens + start, num_prompt_tokens + running.answer_start),
            inserted=running.inserted,
        )
        running.rollout = rollout
        running.turn_ends.append((before + len(tokens), rollout.finish_reason))
        running.episode.add(new_ids, turn, versions)
        self._host.send(running.number)

    def _reader(self, rollout: Rollout, turn_start: int, answer_start: int) -> TurnReader:
        """What reads the last turn of a rollout; the starts are among its tokens."""
        tokenizer = self._prompts.tokenizer
        ids = rollout.tokens[turn_start:]
        return TurnReader(
            text=functools.partial(tokenizer.decode, ids),
            message=functools.partial(parsed_answer, tokenizer, ids.tolist(), rollout.tokens[:turn_start]),
            answer=functools.partial(tokenizer.decode, rollout.tokens[answer_start:]),
        )

    def _begin_turn(self, running: RunningEpisode, asked: Reply) -> list[int] | None:
        """Note what the turn is that a function asks for.

        Returns the token ids to append, None if there is no room for a turn or the function has ended.
        """
        if isinstance(asked, Ended):
            refuse(
                asked.returned is not None,
                f"{self._name}(episode): returns {asked.returned}; rewards come from reward functions (--reward)",
            )
            refuse(not running.turn_ends, f"{self._name}(episode): ended without a turn; it must yield one")
            return None
        refuse(
            not isinstance(asked, Generate),
            f"{self._name}(episode): yields {asked!r:.80}; expected `yield episode.generate()`",
        )
        assert isinstance(asked, Generate)
        is_number = type(asked.max_tokens) is int
        refuse(
            asked.max_tokens is not None and (not is_number or asked.max_tokens < 1),
            f"{self._name}(episode): generate(max_tokens={asked.max_tokens!r:.80}): must be at least 1",
        )
        new_ids = self._appended_ids(running.episode, asked.after)
        turn_start = running.num_before + len(new_ids)
        room = running.episode.max_tokens - turn_start
        is_first = not running.turn_ends
        refuse(
            room < 1 and is_first,
            f"{self._name}(episode): the first turn's `after` leaves no room for a turn",
        )
        if room < 1:
            return None
        running.inserted = [dict(message) for message in asked.after] if is_messages(asked.after) else []
        running.turn_limit = turn_start + min(room, asked.max_tokens or room)
        stop_test = self._stop_test(asked.stop) if asked.stop else None
        running.request = replace(running.request, turn_start=turn_start, stop_test=stop_test)
        return new_ids

    def _appended_ids(self, episode: Episode, after: After) -> list[int]:
        """The token ids of what a function appends behind the turns so far.

        Raises InputError naming function and row.
        """
        place = f"{self._name}(episode), for the row at {episode.row.place}"
        if not is_messages(after):
            return self._prompts.appended_ids(after, place)
        refuse(
            not episode.turns, f"{place}: messages before the first turn; write them into the row's prompt"
        )
        refuse(not episode.is_chat, f"{place}: messages behind a text prompt; see --chat, or append text")
        last = episode.turns[-1]
        end_id = last.ids[-1] if last.finish_reason == "stop" else None
        return self._prompts.appended_ids(after, place, end_id=end_id)

    def _stop_test(self, strings: tuple[str, ...]) -> StopStrings:
        """The test for these strings, made once for all turns that have them."""
        refuse(
            not all(isinstance(string, str) for string in strings),
            f"{self._name}(episode): generate(stop={list(strings)!r:.80}): expected texts",
        )
        if strings not in self._stop_tests:
            self._stop_tests[strings] = StopStrings(self._prompts.tokenizer, strings)
        return self._stop_tests[strings]

    def _pause(self, running: RunningEpisode, new_ids: Sequence[int] = ()) -> None:
        """Take an episode out of the engine, with tokens to be appended before its next turn."""
        rollout_id = running.request.rollout_id
        sampled = self._engine.withdraw(rollout_id).sampled + appended(new_ids)
        running.request = replace(running.request, sampled=sampled)
        self._forget(running)
        self._paused.append(running)

    def _check_appended(
        self,
        running: RunningEpisode,
        present: Sequence[Sampled],
        recorded: Sequence[Sampled],
        *,
        start: int,
    ) -> None:
        """Refuse an episode that does not append at `start` what it appended before."""
        end = running.request.turn_start
        expected = tuple(recorded[start:end])
        refuse(
            tuple(present[start:end]) != expected or any(token.is_sampled for token in expected),
            f"{self._changed(running)}: it appends other tokens than before",
        )

    def _changed(self, running: RunningEpisode) -> str:
        return (
            f"{self._name}(episode), for the row at {running.episode.row.place}: given the same turns as in the run "
            "that is resumed, it does something else; make it a function of its turns and of episode.seed"
        )
