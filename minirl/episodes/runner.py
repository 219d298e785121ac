"""Run the functions that write rollouts on the engine, which decodes their turns together.

While a function works on its reply (`driver`), its episode waits in the engine, which decodes the others.

Episodes run in rounds; a round's budget limits the tokens that each may sample in it. Between two rounds they keep
their keys and values in the engine, which frees these at the end of a step: see `EpisodeRunner.in_step`.
"""

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from minirl.data.messages import is_messages
from minirl.data.prompts import PromptStream
from minirl.episodes.driver import NO_BUDGET, Driver, Reply, check_form, function_name
from minirl.episodes.episode import REWARD, Branch, Episode, Generate, RolloutFunction, Turn
from minirl.episodes.event_loop import event_loop
from minirl.errors import InputError, RolloutError, escaped, refuse
from minirl.generation.engine import Engine
from minirl.ranks.time_account import spent_on
from minirl.rollouts import Request, Rollout, RolloutId

# The longest wait for replies while there is nothing to decode, before rewards get attention.
WAIT_S = 0.05
# The limit without --max-turns: some programs would never stop.
MAX_TURNS = 1000
# How a tool's result begins if it is an error, in TRL and `tool_loop`.
TOOL_ERROR = "{'error': "
# Seconds for functions to clean up when the run ends.
CLOSE_S = 1.0


class EpisodeRunner:
    """Runs episodes, round by round. Not collective.

    patience_s: how long a round with a budget waits for the next reply if it has nothing to decode.
    counts: see `Collector.take_count`.
    """

    patience_s = 0.05

    def __init__(
        self,
        engine: Engine,
        rollout: RolloutFunction,
        prompts: PromptStream,
        *,
        max_turns: int,
        reward_names: Collection[str],
        call_timeout: float | None,
    ):
        """rollout: see `episode`. max_turns: of an episode; 0: MAX_TURNS.

        call_timeout: the most seconds from a turn to the function's next request.

        reward_names: the rewards that an episode must give; if it ends at a limit first they are 0.
        """
        self._engine = engine
        check_form(rollout, f"rollout {function_name(rollout)}")
        self._rollout = rollout
        self._call_timeout = call_timeout
        self._prompts = prompts
        self._max_turns = max_turns or MAX_TURNS
        self._reward_names = reward_names
        self.counts: Counter[str] = Counter()
        # Those of all open episodes, by the id of their first branch, in the order in which they began; those whose
        # turn waits for the next round's budget.
        self._drivers: dict[RolloutId, Driver] = {}
        self._paused: list[Driver] = []
        # Those whose functions have not returned: also where they clean up after their episode's end.
        self._unfinished: set[Driver] = set()
        self._replies: list[tuple[Driver, Reply]] = []
        # When each function began to work on its next reply; the first has worked longest.
        self._working: dict[Driver, float] = {}
        # By prompt: its episodes until all have ended; then their rollouts are in `_ended`, until `step` returns them.
        self._groups: defaultdict[int, list[Driver]] = defaultdict(list)
        self._ended: list[list[Rollout]] = []
        # In the present round.
        self._budget = NO_BUDGET
        self._weight_version = 0
        self._active_at = 0.0

    def begin(self, requests: Sequence[Request]) -> None:
        """Call the function for new episodes, which the next round runs. Raises InputError if that cannot work."""
        for request in requests:
            row = self._prompts.row(request.rollout_id.prompt_ordinal)
            tokenizer = self._prompts.tokenizer.with_tools(row.tools)
            episode = Episode(row, request, tokenizer.tools, is_chat=tokenizer.is_chat(row.prompt))
            driver = Driver(episode, self._rollout, self._replies, self._working)
            self._unfinished.add(driver)
            driver.task.add_done_callback(functools.partial(self._forget, driver))
            self._drivers[request.rollout_id] = driver
            self._groups[request.rollout_id.prompt_ordinal].append(driver)

    def begin_round(self, budget: int, *, weight_version: int) -> None:
        """Let each episode sample up to `budget` tokens. Raises InputError like `Engine.submit`."""
        self._budget = budget
        self._weight_version = weight_version
        self._active_at = time.monotonic()
        for driver in self._drivers.values():
            driver.budget = budget
        paused, self._paused = self._paused, []
        self._start(paused)
        self._take_replies(0.0)

    @property
    def num_open(self) -> int:
        """How many episodes have begun and not ended."""
        return len(self._drivers)

    @property
    def is_round_over(self) -> bool:
        """Return whether every episode ended or, with a budget, used it up or waited long for a reply.

        `step` has returned all whole groups.
        """
        if self._engine.is_decoding or self._ended:
            return False
        if self._budget == NO_BUDGET:
            return not self._drivers
        waits = len(self._paused) < len(self._drivers)
        return not waits or time.monotonic() - self._active_at > self.patience_s

    def close(self) -> None:
        """End all episodes without a rollout, and give their functions CLOSE_S to clean up."""
        self._drivers.clear()
        for driver in self._unfinished:
            driver.cancel()
        until = time.monotonic() + CLOSE_S
        while self._unfinished and (left_s := until - time.monotonic()) > 0:
            event_loop().run_slice(left_s)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Take the episodes out of the engine at the end of the block; `close` if it raises an error."""
        try:
            yield
        except BaseException:
            self.close()
            raise
        for driver in self._drivers.values():
            self._leave(driver)
        event_loop().run_slice()  # functions of episodes that ended clean up

    def step(self) -> list[list[Rollout]]:
        """Decode one more token of each episode that has a turn.

        Returns the rollouts of each prompt whose last episode ended, in the order in which they began.
        If none has a turn, wait a moment for replies. Raises RolloutError naming function, row and turn if the
        function fails, as it does at a rejected request that it does not catch.
        """
        for rollout in self._engine.step():
            self._take_tokens(self._drivers[rollout.rollout_id._replace(branch=0)], rollout)
        if self._engine.lacks_room:
            # Episodes that need no more in this round make room for others.
            for driver in self._paused:
                self._leave(driver)
        has_replies = self._take_replies(0.0 if self._engine.any_rank_has_work else WAIT_S)
        if has_replies or self._engine.is_decoding:
            self._active_at = time.monotonic()
        ended, self._ended = self._ended, []
        return ended

    @spent_on("wait_replies")
    def _wait_for_replies(self, wait_s: float) -> list[tuple[Driver, Reply]]:
        """Let the functions run until all wait; return their replies, in any order.

        Without any it waits up to `wait_s` seconds for the first. The function that has worked longest fails if it
        exceeds its time.
        """
        event_loop().run_slice(0.0 if self._replies else wait_s)
        if self._call_timeout is not None and self._working:
            # After the slice: what came in time is a reply by then.
            slowest = next(iter(self._working))
            if slowest.worked_s > self._call_timeout:
                slowest.cancel()
                late = InputError(f"took more than {self._call_timeout:g} s; see --call-timeout")
                self._replies.append((slowest, late))
        replies = self._replies.copy()
        self._replies.clear()
        return replies

    def _forget(self, driver: Driver, task: object) -> None:
        """Note that a driver's function has returned."""
        self._unfinished.discard(driver)
        if not self._unfinished:
            event_loop().stop()

    def _take_replies(self, wait_s: float) -> bool:
        """Continue the episodes whose functions have replied. Return whether there are any."""
        replies = self._wait_for_replies(wait_s)
        for driver, reply in replies:
            try:
                if isinstance(reply, Generate):
                    self._begin_turn(driver, reply)
                elif isinstance(reply, InputError):
                    raise reply
                else:
                    self._end(driver, driver.episode.end_reason, reply)
            except InputError as error:
                num_turns = len(driver.episode.all_turns)
                when = f"after turn {num_turns}" if num_turns else "before its first turn"
                place = f"rollout {function_name(self._rollout)} for the row at {driver.episode.row.place}"
                raise RolloutError(escaped(f"{place}, {when}: {error}")) from None
        return bool(replies)

    def _begin_turn(self, driver: Driver, asked: Generate) -> None:
        """Begin the turn that a function asks for. Without room, or at a limit, end the episode instead.

        A request that is rejected raises its InputError in the function, which may catch it and go on.
        """
        limit = "length"  # the turn has no room
        try:
            driver.branch, turn = _make_turn(self._prompts, driver, asked)
        except InputError as error:
            driver.send(error)
            return
        if turn is not None:
            driver.turn = turn
            self._count_results(turn)
            limit = "max_turns" if len(driver.episode.all_turns) >= self._max_turns else ""
        if limit:
            driver.cancel()
            self._end(driver, limit)
        elif not driver.episode.all_turns:
            # All those of a prompt begin together: they share one prefill.
            group = self._groups[driver.episode.request.rollout_id.prompt_ordinal]
            if all(one.branch is not None for one in group):
                self._start(group)
        elif driver.budget == 0:
            self._paused.append(driver)
        else:
            self._start([driver])

    def _count_results(self, turn: Turn) -> None:
        """Count the results of tools that are appended before a turn."""
        for message in turn.inserted:
            if message["role"] == "tool":
                self.counts["tool_results"] += 1
                self.counts["tool_errors"] += str(message["content"]).startswith(TOOL_ERROR)

    def _start(self, episodes: Sequence[Driver]) -> None:
        """Submit the turns of these episodes."""
        requests = []
        for driver in episodes:
            request = driver.episode.branches[driver.turn.branch].request
            tokens = driver.tokens_before()
            driver.part_start = len(tokens)
            # Of the turn, the part that this round's budget allows.
            limit = min(request.max_new_tokens, driver.part_start + driver.budget)
            requests.append(replace(request, sampled=tokens, max_new_tokens=limit))
        self._engine.submit(requests, weight_version=self._weight_version)

    def _take_tokens(self, driver: Driver, rollout: Rollout) -> None:
        """Take an episode's tokens from the engine: the function gets the turn, or it waits for the next round."""
        turn = driver.turn
        turn.tokens.rollout = rollout
        end = len(rollout.after_prompt)
        driver.budget -= end - driver.part_start
        self.counts["sampled_tokens"] += end - driver.part_start
        if (
            rollout.finish_reason == "length"
            and end < driver.episode.branches[turn.branch].request.max_new_tokens
        ):
            self._paused.append(driver)
            return
        turn.num_tokens, turn.finish_reason = end - turn.start, rollout.finish_reason
        driver.episode.take(turn)
        driver.send(turn)

    def _end(
        self,
        driver: Driver,
        finish_reason: str | None,
        returned: Mapping[str, float | None] | None = None,
    ) -> None:
        """End an episode after its last turn. returned: the rewards from its function, if that ended.

        finish_reason: None for that of the last turn. Raises InputError for an episode without a turn, or with other
        rewards than the run's.
        """
        episode = driver.episode
        episode.drop_unseen()
        rejected = f"; its last request was rejected: {driver.rejected}" if driver.rejected else ""
        refuse(not episode.all_turns, f"ended without a turn; it must await one{rejected}")
        if returned is not None:
            check_rewards({*returned, *episode.given}, self._reward_names, driver.place)
        rewards = dict.fromkeys(self._reward_names, 0.0) | episode.sum_of_rewards(returned or {})
        # The branch that had the last turn, or asked for a further one, has the episode's finish reason.
        ends = _branch_ends(episode)
        if finish_reason is None:
            finish_reason = ends[episode.all_turns[-1].branch]
        elif driver.branch is not None:
            ends[driver.branch.number] = finish_reason
        rollout_id = episode.request.rollout_id
        row = self._prompts.row(rollout_id.prompt_ordinal)
        driver.ended = driver.rollout(finish_reason, ends, rewards, row)
        group = self._groups[rollout_id.prompt_ordinal]
        rollouts = [one.ended for one in group if one.ended is not None]
        if len(rollouts) == len(group):
            del self._groups[rollout_id.prompt_ordinal]
            self._ended.append(rollouts)
        del self._drivers[rollout_id]
        self._leave(driver)

    def _leave(self, driver: Driver) -> None:
        """Take the branches of an episode out of the engine."""
        episode = driver.episode
        self._engine.release(
            *(episode.request.rollout_id._replace(branch=branch.number) for branch in episode.branches)
        )


def _make_turn(prompts: PromptStream, driver: Driver, asked: Generate) -> tuple[Branch | None, Turn | None]:
    """Return the branch and the turn that a function asks for.

    The turn is None if it has no room, and the branch, too, if it is new and its prompt leaves none. Raises InputError,
    with the episode's place.
    """
    episode, place = driver.episode, driver.place
    refuse(episode.end_reason is not None, f"episode.generate() after episode.end({episode.end_reason!r})")
    branch = episode.branches[asked.branch]
    if not branch.prompt_ids and not _begin_branch(prompts, branch, episode, place):
        return None, None
    new_ids = _appended_ids(prompts, branch, asked, place) if asked.after else []
    start = branch.num_tokens + len(new_ids)
    room = branch.max_tokens - start
    if room < 1:
        refuse(not episode.all_turns, f"{place}: the first turn's `after` leaves no room for a turn")
        return branch, None
    branch.request = replace(
        branch.request,
        max_new_tokens=start + min(room, asked.max_tokens or room),
        holds=True,
        stop=asked.stop,
        turn_start=start,
    )
    turn = Turn(
        start,
        branch=branch.number,
        inserted=asked.after if is_messages(asked.after) else [],
        appended=new_ids,
        tokenizer=prompts.tokenizer.with_tools(branch.tools),
        tokens=branch.engine_tokens,
    )
    return branch, turn


def _begin_branch(prompts: PromptStream, branch: Branch, episode: Episode, place: str) -> bool:
    """Make a new branch's request; return False if its prompt leaves no room for a turn."""
    request = prompts.branch_request(episode.request, branch.number, branch.prompt, place, tools=branch.tools)
    if request.max_new_tokens < 1:
        refuse(not episode.all_turns, f"{place}: the prompt of its first turn leaves no room for it")
        return False
    branch.request, branch.prompt_ids = request, list(request.prompt_ids)
    branch.max_tokens = request.max_new_tokens
    return True


def _appended_ids(prompts: PromptStream, branch: Branch, asked: Generate, place: str) -> list[int]:
    """Return the token ids that a function appends to a branch. Raises InputError naming function and row."""
    end_id = None
    if is_messages(asked.after):
        refuse(
            not branch.turns,
            f"{place}: messages before the first turn; see episode.branch, or write them into the row's prompt",
        )
        is_chat = prompts.tokenizer.is_chat(branch.prompt)
        refuse(not is_chat, f"{place}: messages after a text prompt; see --chat, or append text")
        last = branch.turns[-1]
        end_id = last.ids[-1] if last.finish_reason == "stop" else None
    return prompts.tokenizer.with_tools(branch.tools).encode_after(asked.after, place, end_id=end_id)


def _branch_ends(episode: Episode) -> dict[int, str]:
    """Return the finish reasons of an episode's branches, by number, if they end with their last turns."""
    branches = episode.branches
    ends = {}
    for turn in episode.all_turns:
        is_own_limit = turn.finish_reason == "length" and turn.end < branches[turn.branch].max_tokens
        ends[turn.branch] = "turn_length" if is_own_limit else turn.finish_reason
    return ends


def check_rewards(given: Collection[str], wanted: Collection[str], place: str) -> None:
    """Raise InputError for rewards that the run has no use for, and for one that it wants and nobody gave.

    given: the names of the rewards that an episode gave or returned. wanted: the names of the run's rewards.
    """
    refuse(
        not all(isinstance(name, str) for name in given),
        f"{place}: a reward's name is not text: {given!r:.80}",
    )
    listed = ", ".join(map(repr, sorted(given))) or "none"
    flags = " ".join("episode" if name == REWARD else f"episode:{name}" for name in sorted(given))
    refuse(
        given and not wanted,
        f"{place}: gives rewards ({listed}) that the run does not have: add --reward {flags}",
    )
    for name in wanted:
        refuse(
            name not in given,
            f"{place}: ended without the reward {name!r} (given: {listed}); give it in every episode, at "
            f"least `episode.reward(0.0, {name!r})`, or return {{{name!r}: None}} where it does not apply",
        )
