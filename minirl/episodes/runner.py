"""Run the functions that write rollouts on the engine: the turns that they ask for are decoded together.

A function may run in this process or in others (`program.Host`). While it works on its reply, its episode waits in the
engine and the others are decoded.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from minirl.data.prompts import PromptStream
from minirl.data.task import is_messages
from minirl.episodes.episode import Episode, RolloutFunction
from minirl.episodes.generate import Generate
from minirl.episodes.limits import NO_LIMITS, EpisodeLimits
from minirl.episodes.program import Differs, Ended, Failed, Host, InProcess, Reply
from minirl.episodes.refusals import check_rewards
from minirl.episodes.running import PausedEpisode, RunningEpisode, TokenReader
from minirl.episodes.turn import Turn
from minirl.episodes.turn_maker import TurnMaker
from minirl.errors import InputError, RolloutError, refuse
from minirl.files.redaction import escaped
from minirl.generation.engine import Engine
from minirl.ranks.process_group import print_here
from minirl.rollouts import Request, Rollout, RolloutId
from minirl.workers.failures import Failures

# Of a wait for replies while nothing is decoded; rewards are looked after in between.
WAIT_S = 0.05
# How a tool's result begins that is an error, in TRL and `tool_loop`.
TOOL_ERROR = "{'error': "
# A runner counts: tokens that all episodes sampled; episodes that ended because their function failed; paused ones
# that began again from the start; results of tools that were appended, and how many of them are errors, as TRL's.
Counted = Literal["sampled_tokens", "rollout_errors", "restarted", "tool_results", "tool_errors"]


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
        self._turn_maker = TurnMaker(self._name, prompts, limits)
        self._counts: Counter[Counted] = Counter()
        # Of episodes that are not running yet.
        self._kept_replies: list[tuple[int, Reply]] = []
        self._running: dict[int, RunningEpisode] = {}
        # Of all branches of the running episodes that the engine has had in this phase.
        self._number_of: dict[RolloutId, int] = {}
        self._ended: list[Rollout] = []
        # Of branches of episodes that ended or were paused, which the engine still has.
        self._over: list[RolloutId] = []
        self._paused: list[RunningEpisode] = []
        # Of this phase. By prompt: how many of its episodes have not begun their first turn, and those that could.
        self._weight_version = 0
        self._num_unbegun: Counter[int] = Counter()
        self._begun: dict[int, list[RunningEpisode]] = {}
        self._failures = Failures(0, are_forgiven=False)

    def begin(self, request: Request, paused: PausedEpisode | None = None) -> RunningEpisode:
        """Call the function for a new episode. Raises InputError if it is not such a function.

        paused: an episode of an earlier process, whose turns the function gets again.
        """
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
        turns: list[Turn] = []
        if paused is not None:
            episode.know(paused.begun)
            turns = paused.turns_read(tokenizer)
        return RunningEpisode(request, episode, self._host.begin(episode, turns))

    def submit(self, episodes: Sequence[RunningEpisode], *, weight_version: int) -> None:
        """Run new and paused episodes, each with its `budget`. Raises InputError as `Engine.submit`."""
        self._weight_version = weight_version
        self._failures = Failures(len(episodes), are_forgiven=self._host.on_error == "end")
        for running in episodes:
            self._running[running.number] = running
            if running.turn is None:
                self._num_unbegun[running.request.rollout_id.prompt_ordinal] += 1
        self._start([running for running in episodes if running.turn is not None])
        self._take_replies(0.0)

    @property
    def is_busy(self) -> bool:
        """Return whether episodes are running: neither at their end nor paused."""
        return bool(self._running)

    def step(self) -> list[Rollout]:
        """Decode one more token of each episode that has a turn; return the rollouts of those that ended.

        If none has a turn, wait a moment for replies. Raises RolloutError naming function, row and turn if the
        function asks for something that it may not ask for, or fails in another process.
        """
        for rollout in self._engine.step():
            running = self._running[self._number_of[rollout.rollout_id]]
            self._take_tokens(running, rollout)
        self._take_replies(0.0 if self._engine.is_decoding else WAIT_S)
        ended, self._ended = self._ended, []
        return ended

    def is_waiting(self) -> bool:
        """Return whether `step` would only wait for replies: no turn is there to be decoded, and no reply."""
        self._take_replies(0.0)
        return self.is_busy and not self._engine.is_decoding

    def take_paused(self) -> list[RunningEpisode]:
        """Return the episodes that were paused since the last call."""
        paused, self._paused = self._paused, []
        return paused

    def take_count(self, counted: Counted) -> int:
        """Return how many of these there were since the last call."""
        return self._counts.pop(counted, 0)

    def restore(self, paused: Sequence[PausedEpisode]) -> list[RunningEpisode]:
        """Bring back paused episodes of an earlier process: their function runs again, and gets the turns that it got.

        One that then does something else than it did begins again from the start, and is counted. Raises RolloutError
        if it fails, or asks for something that it may not ask for.
        """
        restored = [self.begin(one.request, one) for one in paused]
        left = {running.number: i for i, running in enumerate(restored)}
        restarted: set[int] = set()
        while left:
            for number, reply in self._host.replies(WAIT_S):
                i = left.pop(number)
                if i in restarted:
                    self._kept_replies.append((number, reply))
                elif not self._is_as_before(restored[i], paused[i], reply):
                    self._note_restart(restored[i])
                    restored[i] = self.begin(paused[i].request)
                    left[restored[i].number] = i
                    restarted.add(i)
        return restored

    def _is_as_before(self, running: RunningEpisode, paused: PausedEpisode, reply: Reply) -> bool:
        """Return whether the function asks for the turn that was being sampled; the episode then has all its tokens.

        If it does not, it runs no more. Raises RolloutError as `restore`.
        """
        if isinstance(reply, Failed) and not isinstance(reply, Differs):
            raise RolloutError(self._failure(running, reply.why))
        if not isinstance(reply, Generate):
            return False
        turn = None
        if reply.digest == paused.asked:
            self._turn_maker.bring_back(running)
            try:
                turn = self._turn_maker.make(running, reply)
            except InputError as error:
                raise RolloutError(self._failure(running, str(error))) from None
        if turn is None:
            self._host.close(running.number)
            return False
        for number, rollout in paused.branches.items():
            running.branches[number].tokens.rollout = rollout
        return True

    def _note_restart(self, running: RunningEpisode) -> None:
        """Count an episode that begins again from the start; say so of the first one."""
        self._counts["restarted"] += 1
        if self._counts["restarted"] == 1:
            place = self._turn_maker.place(running.episode)
            print_here(
                f"note: {place}: given the same turns as in the run that is resumed, it does something else, and "
                "begins again from the start, see count/restarted; make it a function of its turns and of episode.seed"
            )

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
        if isinstance(reply, Generate):
            self._begin_turn(running, reply)
        elif isinstance(reply, Failed):
            self._fail(running, reply.why)
        else:
            try:
                self._check_end(running.episode, reply)
            except InputError as error:
                self._fail(running, str(error))
            else:
                self._end(running, reply.reason, reply.returned)

    def _begin_turn(self, running: RunningEpisode, asked: Generate) -> None:
        """Begin the turn that a function asks for. Without room, or at a limit, end the episode instead."""
        limit = "length"  # the turn has no room
        try:
            if self._turn_maker.make(running, asked) is not None:
                self._count_results(asked)
                limit = self._limits.reached(running.episode, self._host.seconds(running.number)) or ""
        except InputError as error:
            self._host.close(running.number)
            self._fail(running, str(error))
            return
        if limit:
            self._host.close(running.number)
            self._end(running, limit)
        else:
            self._take_up(running)

    def _check_end(self, episode: Episode, ended: Ended) -> None:
        """Refuse the end of a function without a turn, or with other rewards than the run has."""
        refuse(not episode.all_turns, f"{self._name}(episode): ended without a turn; it must yield one")
        given = set(ended.returned).union(*episode.rewards)
        check_rewards(given, self._reward_names, self._turn_maker.place(episode))

    def _count_results(self, asked: Generate) -> None:
        """Count the results of tools that are appended before a turn."""
        for message in asked.after if is_messages(asked.after) else ():
            if message["role"] == "tool":
                self._counts["tool_results"] += 1
                self._counts["tool_errors"] += message["content"].startswith(TOOL_ERROR)

    def _take_up(self, running: RunningEpisode) -> None:
        """Let the engine sample an episode's turn, unless it has to wait for others or for a budget."""
        present, turn = running.present
        if not running.episode.all_turns:
            self._take_up_first(running)
        elif running.budget == 0:
            self._pause(running)
        elif not present.is_held:
            self._start([running])
        else:
            present.is_held = False
            running.part_start = turn.start
            self._engine.resume(
                present.request.rollout_id,
                turn.appended,
                max_new_tokens=running.part_limit - turn.start,
                stop_test=running.stop_test,
            )

    def _take_up_first(self, running: RunningEpisode) -> None:
        """Submit an episode once all those of its prompt ask for their first turns: they share one prefill."""
        ordinal = running.request.rollout_id.prompt_ordinal
        begun = self._begun.setdefault(ordinal, [])
        begun.append(running)
        self._num_unbegun[ordinal] -= 1
        if self._num_unbegun[ordinal] == 0:
            self._start(sorted(begun, key=lambda running: running.request.rollout_id.sample))
            del self._begun[ordinal]

    def _start(self, episodes: Sequence[RunningEpisode]) -> None:
        """Let the engine take up the turns of these episodes, in branches that it does not have."""
        requests = []
        for running in episodes:
            present, turn = running.present
            tokens = present.completion(turn)
            running.part_start = len(tokens)
            request = replace(
                present.request,
                sampled=tokens,
                max_new_tokens=running.part_limit,
                holds=True,
                stop_test=running.stop_test,
                turn_start=turn.start,
            )
            requests.append(request)
            self._number_of[request.rollout_id] = running.number
        self._engine.submit(requests, weight_version=self._weight_version)

    def _take_tokens(self, running: RunningEpisode, rollout: Rollout) -> None:
        """Take an episode's tokens from the engine: the function gets the turn, or the episode is paused."""
        present, turn = running.present
        present.tokens.rollout = rollout
        present.is_held = True
        last = len(rollout.tokens)
        end = last - rollout.num_prompt_tokens
        running.budget -= end - running.part_start
        self._counts["sampled_tokens"] += end - running.part_start
        if rollout.finish_reason == "length" and end < running.turn_limit:
            self._pause(running)
            return
        if turn.inserted:
            present.answer_start = turn.start
        reader = TokenReader(
            self._prompts.tokenizer.with_tools(present.branch.tools),
            present.tokens,
            first=rollout.num_prompt_tokens + turn.start,
            last=last,
            answer_first=rollout.num_prompt_tokens + present.answer_start,
        )
        turn.finish(end - turn.start, rollout.finish_reason, reader)
        self._host.send(running.number, turn)

    def _pause(self, running: RunningEpisode) -> None:
        """Take an episode out of the engine until it is run again."""
        self._forget(running)
        self._paused.append(running)

    def _end(
        self,
        running: RunningEpisode,
        finish_reason: str | None,
        returned: Mapping[str, float | None] | None = None,
    ) -> None:
        """End an episode after its last turn. returned: by its function, if that ended.

        finish_reason: None for that of the last turn. Raises RolloutError if nobody saw any turn.
        """
        episode = running.episode
        episode.drop_unseen()
        if not episode.all_turns:
            raise RolloutError(self._failure(running, "ended, and hung up before it got any of its turns"))
        missing = None if finish_reason == "error" else 0.0
        rewards = dict.fromkeys(self._reward_names, missing) | episode.sum_of_rewards(returned or {})
        # An episode's end is that of the branch which had its last turn, or asked for a further one.
        ends = self._limits.ends(episode)
        if finish_reason is None:
            finish_reason = ends[episode.all_turns[-1].branch]
        elif running.branch is not None:
            ends[running.branch.branch.number] = finish_reason
        self._ended.append(running.rollout(finish_reason, ends, rewards))
        self._forget(running)

    def _forget(self, running: RunningEpisode) -> None:
        """Let an episode run no more; the engine releases its branches at the end of `_take_replies`."""
        del self._running[running.number]
        for branch in running.branches.values():
            self._number_of.pop(branch.request.rollout_id, None)
            if branch.is_held:
                branch.is_held = False
                self._over.append(branch.request.rollout_id)

    def _fail(self, running: RunningEpisode, why: str) -> None:
        """End an episode whose function has failed. Raises RolloutError if that is not forgiven."""
        failure = self._failure(running, why)
        is_forgiven = self._failures.add(failure)
        if not is_forgiven or not running.episode.all_turns:
            raise RolloutError(failure)
        if len(self._failures.messages) == 1:
            print_here(f"note: {failure}\nThe episode ends there, see count/rollout_errors.")
        self._counts["rollout_errors"] += 1
        self._end(running, "error")

    def _failure(self, running: RunningEpisode, why: str) -> str:
        num_turns = len(running.episode.all_turns)
        when = f"after turn {num_turns}" if num_turns else "before its first turn"
        return escaped(f"rollout {self._name} for the row at {running.episode.row.place}, {when}: {why}")
