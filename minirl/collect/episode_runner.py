"""Run the functions that write rollouts on the engine: the turns that they yield are decoded together."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from minirl.collect.episode import Episode, Generate, Inserted, RolloutFunction, Turn, Turns
from minirl.data.chat_turns import After, is_messages
from minirl.data.prompts import PromptStream
from minirl.data.stop_strings import StopStrings
from minirl.errors import InputError, refuse
from minirl.generation.engine import Engine
from minirl.rollouts import Request, Rollout, RolloutId, Sampled, appended, rollout_of

NO_BUDGET = sys.maxsize


@dataclass
class RunningEpisode:
    """An episode between the beginning of its first turn and the end of its last one.

    request: with `stop_test` and `turn_start` of the present turn; while the engine does not have it, with all tokens.
    turn_limit: how many tokens after the prompt there are when the present turn ends, at the latest.
    turn_ends: for each turn that has ended, how many there were, and why it ended.
    part_start: how many there were when the engine took up the present turn, in this phase.
    budget: how many tokens the episode may sample in this phase from there on.
    """

    request: Request
    episode: Episode
    turns: Turns
    turn_limit: int = 0
    turn_ends: list[tuple[int, str]] = field(default_factory=list)
    part_start: int = 0
    budget: int = NO_BUDGET

    @property
    def part_limit(self) -> int:
        """How many tokens after the prompt there are when this phase's part of the turn ends, at the latest."""
        return min(self.turn_limit, self.part_start + self.budget)


class EpisodeRunner:
    """Runs episodes, phase by phase. One that has used up its budget is paused until it is run again.

    Not collective.
    """

    def __init__(self, engine: Engine, rollout: RolloutFunction, prompts: PromptStream):
        """rollout: a generator function, see `episode`."""
        self._engine = engine
        self._rollout = rollout
        self._name = getattr(rollout, "__name__", "rollout")
        self._prompts = prompts
        self._stop_tests: dict[tuple[str, ...], StopStrings] = {}
        self._num_sampled = 0
        self._running: dict[RolloutId, RunningEpisode] = {}
        self._paused: list[RunningEpisode] = []

    def begin(self, request: Request) -> RunningEpisode:
        """A new episode, whose function has asked for its first turn. Raises InputError if it does not."""
        row = self._prompts.row(request.rollout_id.prompt_ordinal)
        episode = Episode(
            row, seed=request.key, max_tokens=request.max_new_tokens, tokenizer=self._prompts.tokenizer
        )
        turns = self._rollout(episode)
        refuse(
            not inspect.isgenerator(turns),
            f"{self._name}(episode): is no generator; write `turn = yield episode.generate()`",
        )
        running = RunningEpisode(request, episode, turns)
        try:
            asked = next(turns)
        except StopIteration:
            raise InputError(f"{self._name}(episode): ended without a turn; it must yield one") from None
        new_ids = self._begin_turn(running, asked, num_tokens=0)
        refuse(new_ids is None, f"{self._name}(episode): the first turn's `after` leaves no room for a turn")
        running.request = replace(running.request, sampled=appended(new_ids or []))
        return running

    def submit(self, episodes: Sequence[RunningEpisode], *, weight_version: int) -> None:
        """Run new and paused episodes, each with its `budget`. Raises InputError as `Engine.submit`."""
        requests = []
        for running in episodes:
            running.part_start = len(running.request.sampled)
            requests.append(replace(running.request, max_new_tokens=running.part_limit, holds=True))
            self._running[running.request.rollout_id] = running
        self._engine.submit(requests, weight_version=weight_version)

    @property
    def is_busy(self) -> bool:
        """Whether there are episodes that neither have ended nor are paused."""
        return bool(self._running)

    def step(self) -> list[Rollout]:
        """Decode one more token of each episode; returns the rollouts of those that have ended."""
        ended = []
        for rollout in self._engine.step():
            running = self._running[rollout.rollout_id]
            num_tokens = len(rollout.tokens) - rollout.num_prompt_tokens
            num_sampled = num_tokens - running.part_start
            running.budget -= num_sampled
            self._num_sampled += num_sampled
            if rollout.finish_reason == "length" and num_tokens < running.turn_limit:
                self._pause(running)
            elif self._end_turn(running, rollout, num_tokens):
                assert running.episode.rollout is not None
                ended.append(running.episode.rollout)
        return ended

    def take_paused(self) -> list[RunningEpisode]:
        """The episodes that have been paused since the last call."""
        paused, self._paused = self._paused, []
        return paused

    def take_num_sampled(self) -> int:
        """How many tokens all episodes have sampled since the last call."""
        num_sampled, self._num_sampled = self._num_sampled, 0
        return num_sampled

    def restore(
        self, request: Request, sampled: tuple[Sampled, ...], turn_ends: Sequence[tuple[int, str]]
    ) -> RunningEpisode:
        """A paused episode of an earlier process: its function runs again, and gets the turns that it got then.

        request: as for `begin`. sampled: the tokens after the prompt. turn_ends: as in `RunningEpisode`. Raises
        InputError if the function appends other tokens than it did.
        """
        running = self.begin(request)
        self._check_appended(running, sampled, start=0)
        for num_tokens, finish_reason in turn_ends:
            so_far = rollout_of(replace(request, sampled=sampled[:num_tokens]), finish_reason)
            asked = self._next_turn(running, so_far, num_tokens)
            new_ids = None if asked is None else self._begin_turn(running, asked, num_tokens)
            refuse(new_ids is None, f"{self._changed(running)}: it had a further turn, and now ends")
            running.request = replace(running.request, sampled=sampled[:num_tokens] + appended(new_ids or []))
            self._check_appended(running, sampled, start=num_tokens)
        running.request = replace(running.request, sampled=sampled)
        return running

    def _end_turn(self, running: RunningEpisode, rollout: Rollout, num_tokens: int) -> bool:
        """Hand a turn to its function and begin the next one; returns whether the episode has ended instead."""
        rollout_id = rollout.rollout_id
        asked = self._next_turn(running, rollout, num_tokens)
        new_ids = None if asked is None else self._begin_turn(running, asked, num_tokens)
        if new_ids is None:
            if asked is not None:  # there was no room for what it asked for
                running.turns.close()
                running.episode.rollout = replace(rollout, finish_reason="length")
            self._engine.release(rollout_id)
            del self._running[rollout_id]
            return True
        if running.budget == 0:
            self._pause(running, new_ids)
            return False
        running.part_start = num_tokens + len(new_ids)
        self._engine.resume(
            rollout_id,
            new_ids,
            max_new_tokens=running.part_limit - running.part_start,
            stop_test=running.request.stop_test,
        )
        return False

    def _next_turn(self, running: RunningEpisode, rollout: Rollout, num_tokens: int) -> Generate | None:
        """What the function asks for, given the turn with which the rollout ends; None if it has ended."""
        turn_start = rollout.num_prompt_tokens + running.request.turn_start
        turn = Turn(rollout, turn_start, self._prompts.tokenizer)
        running.turn_ends.append((num_tokens, rollout.finish_reason))
        running.episode.rollout = rollout
        running.episode.turns.append(turn)
        try:
            return running.turns.send(turn)
        except StopIteration as end:
            refuse(
                end.value is not None,
                f"{self._name}(episode): returns {end.value!r:.80}; rewards come from reward functions (--reward)",
            )
            return None

    def _begin_turn(self, running: RunningEpisode, asked: Generate, num_tokens: int) -> list[int] | None:
        """Note what the turn is that a function asks for; returns the token ids to append, None without room."""
        refuse(
            not isinstance(asked, Generate),
            f"{self._name}(episode): yields {asked!r:.80}; expected `yield episode.generate()`",
        )
        refuse(
            asked.max_tokens is not None and asked.max_tokens < 1,
            f"{self._name}(episode): generate(max_tokens={asked.max_tokens}): must be at least 1",
        )
        new_ids = self._appended_ids(running.episode, asked.after)
        turn_start = num_tokens + len(new_ids)
        room = running.episode.max_tokens - turn_start
        if room < 1:
            return None
        if is_messages(asked.after):
            messages = [dict(message) for message in asked.after]
            running.episode.inserted.append(Inserted(messages, num_tokens, turn_start))
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
        is_chat = self._prompts.tokenizer.is_chat(episode.row)
        refuse(not is_chat, f"{place}: messages behind a text prompt; see --chat, or append text")
        last = episode.turns[-1]
        end_id = last.ids[-1] if last.finish_reason == "stop" else None
        return self._prompts.appended_ids(after, place, end_id=end_id)

    def _stop_test(self, strings: tuple[str, ...]) -> StopStrings:
        """The test for these strings, made once for all turns that have them."""
        if strings not in self._stop_tests:
            self._stop_tests[strings] = StopStrings(self._prompts.tokenizer, strings)
        return self._stop_tests[strings]

    def _pause(self, running: RunningEpisode, new_ids: Sequence[int] = ()) -> None:
        """Take an episode out of the engine, with tokens to be appended before its next turn."""
        rollout_id = running.request.rollout_id
        sampled = self._engine.withdraw(rollout_id).sampled + appended(new_ids)
        running.request = replace(running.request, sampled=sampled)
        del self._running[rollout_id]
        self._paused.append(running)

    def _check_appended(self, running: RunningEpisode, sampled: Sequence[Sampled], *, start: int) -> None:
        """Refuse an episode that does not append at `start` what it appended before."""
        end = running.request.turn_start
        expected = tuple(sampled[start:end])
        refuse(
            running.request.sampled[start:end] != expected or any(token.is_sampled for token in expected),
            f"{self._changed(running)}: it appends other tokens than before",
        )

    def _changed(self, running: RunningEpisode) -> str:
        return (
            f"{self._name}(episode), for the row at {running.episode.row.place}: given the same turns as in the run "
            "that is resumed, it does something else; make it a function of its turns and of episode.seed"
        )
