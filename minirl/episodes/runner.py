"""Run the functions that write rollouts on the engine, which decodes their turns together.

The life of a rollout:

1. The collector draws a prompt and begins its G rollouts. The function of each runs as a task, which a `Driver` owns.
2. The function asks for a turn. Once all G have asked for their first, they start together, and share one prefill.
3. The engine samples a token of each turn per step; between two steps, functions work on their next replies.
4. A turn ends with a stop token or string, or is truncated at its limit ("length"). The function gets it either way,
   and may append tokens and ask for another one, of this branch or another.
5. If that has no room, or is one more than `max_turns`, the episode ends there: its function is cancelled, and the
   turns so far are the rollout, with the limit as finish reason. Otherwise it ends when its function returns.
6. When the last rollout of a prompt has ended, all go into the reward queue, from which a step takes the group.
7. A rejected request raises InputError in the function. A function that raises, is late, or returns something else than
   rewards ends the run: RolloutError names function, row and turn, and the other functions are cancelled.
8. With `max_staleness` a step decodes in rounds, with a budget of tokens for each rollout. One that has used it pauses
   until the next round, and a round does not wait long for functions at work, on a tool's result say.
9. At the end of a step the rollouts that go on lose their keys and values, but no token. A tool at work goes on, and
   the next step takes its result, computes the tokens again under its own weights, and samples on.
10. A checkpoint has only the numbers of their prompts, whose rollouts begin again after a resume.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

from minirl.data.prompts import PromptStream
from minirl.episodes.driver import NO_BUDGET, Driver, Reply, check_rollout_function, function_name
from minirl.episodes.episode import REWARD, RolloutFunction, TurnRequest
from minirl.episodes.event_loop import event_loop
from minirl.errors import InputError, RolloutError, escaped, refuse
from minirl.generation.engine import Engine
from minirl.ranks.time_account import spent_on
from minirl.report.progress_bar import show_progress
from minirl.rewards.functions import RewardLike
from minirl.rewards.reward_queue import RewardedRollouts, RewardQueue
from minirl.rollouts import Request, Rollout, RolloutId

# The longest wait for replies while there is nothing to decode, before rewards get attention.
IDLE_WAIT_S = 0.05
# The limit without --max-turns: some programs would never stop.
MAX_TURNS = 1000
# How a tool's result begins if it is an error, in TRL and `tool_loop`.
TOOL_ERROR = "{'error': "
# Seconds for functions to clean up when the run ends.
CLEANUP_S = 1.0


class EpisodeRunner:
    """Runs episodes, round by round. Not collective, unless ranks share the model's layers.

    queue: rewards the rollouts of whole prompts. reply_wait_s: how long a round with a budget waits for the next reply
    if it has nothing to decode.
    counts: see `Collector.take_count`.
    """

    reply_wait_s = 0.05

    def __init__(
        self,
        engine: Engine,
        prompts: PromptStream,
        functions: Mapping[str, RewardLike],
        *,
        rollout: RolloutFunction,
        max_turns: int,
        call_timeout: float | None,
    ):
        """functions: the K reward functions by name. rollout: see `episode`. max_turns: of an episode; 0: MAX_TURNS.

        call_timeout: the most seconds from a turn to the function's next request, and of a reward call in a thread.
        """
        self.engine = engine
        check_rollout_function(rollout, f"rollout {function_name(rollout)}")
        self._rollout = rollout
        self._call_timeout = call_timeout
        self._prompts = prompts
        self._max_turns = max_turns or MAX_TURNS
        self.queue = RewardQueue(functions, prompts, call_timeout=call_timeout)
        # Rewards that each episode has to give; they are 0 if a limit ends it before.
        self._reward_names = self.queue.episode_rewards
        self.counts: Counter[str] = Counter()
        # All open episodes, by the id of their first branch, in the order in which they began.
        self._drivers: dict[RolloutId, Driver] = {}
        # Those whose turn waits: for the first turns of its prompt's other episodes, or for the next round's budget.
        self._waiting: list[Driver] = []
        # When each function began to work on its next reply; the first has worked longest.
        self._working_since: dict[Driver, float] = {}
        self._step_ended_at = 0.0
        self._replies: list[tuple[Driver, Reply]] = []
        # Functions that have not returned: also those that clean up after their episode's end.
        self._tasks: set[asyncio.Task[None]] = set()
        # Open episodes per prompt, and the rollouts of those that have ended, until all have.
        self._groups: defaultdict[int, list[Driver]] = defaultdict(list)
        self._rollouts: defaultdict[int, list[Rollout]] = defaultdict(list)

    def run(self, requests: Sequence[Request], *, weight_version: int = 0) -> RewardedRollouts:
        """Run the requests, which cover whole prompts, to their ends; return their rollouts with rewards."""
        with self.in_step():
            self.begin_episodes(requests)
            self.run_round(weight_version=weight_version)
        return self.queue.finish(sorted(self.queue.groups))

    def begin_episodes(self, requests: Sequence[Request]) -> None:
        """Call the function for new episodes, which the next round runs. Raises InputError if that cannot work."""
        for request in requests:
            driver = Driver(request, self._prompts, self._rollout, self._replies)
            self._tasks.add(driver.task)
            driver.task.add_done_callback(self._tasks.discard)
            self._drivers[request.rollout_id] = driver
            self._groups[request.rollout_id.prompt_ordinal].append(driver)
            self._working_since[driver] = time.monotonic()

    def run_round(self, budget: int = NO_BUDGET, *, weight_version: int) -> None:
        """Let each episode sample up to `budget` tokens; without a budget all run to their ends.

        The rollouts of each prompt whose last episode ends go into the queue. With a budget the round also ends when it
        has nothing to decode and no function has replied for `reply_wait_s`.

        Raises InputError like `Engine.submit`, RewardError, and RolloutError naming function, row and turn if the
        function fails, as it does at a rejected request that it does not catch.
        """
        for driver in self._drivers.values():
            driver.budget = budget
        self._submit_turns(weight_version)
        active_at = time.perf_counter()
        with show_progress("generate", total=len(self._drivers), unit="completions") as bar:
            while self.engine.is_decoding or len(self._waiting) < len(self._drivers):
                num_open = len(self._drivers)
                has_replies = self._handle_replies(0.0 if self.engine.any_rank_has_work else IDLE_WAIT_S)
                self._submit_turns(weight_version)
                self.queue.poll()
                bar.update(num_open - len(self._drivers))
                if has_replies or self.engine.is_decoding:
                    active_at = time.perf_counter()
                elif budget < NO_BUDGET and time.perf_counter() - active_at > self.reply_wait_s:
                    break
                self._decode_step()
        self.engine.sync()  # ranks that share the model's layers pass through them until all are here

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Take the episodes out of the engine at the end of the block; `close` if it raises an error."""
        # Between two steps the event loop stands still, which is not the functions' time.
        idle_s = time.monotonic() - self._step_ended_at
        self._working_since = {driver: since + idle_s for driver, since in self._working_since.items()}
        try:
            yield
        except BaseException:
            self.close()
            raise
        for driver in self._drivers.values():
            self._release_requests(driver)
        event_loop().run_slice()  # functions of episodes that ended clean up
        self._step_ended_at = time.monotonic()

    def close(self) -> None:
        """End all episodes without a rollout, and give their functions CLEANUP_S to clean up."""
        for driver in self._drivers.values():
            driver.cancel()
        for kept in (
            self._drivers,
            self._waiting,
            self._working_since,
            self._replies,
            self._groups,
            self._rollouts,
        ):
            kept.clear()
        until = time.perf_counter() + CLEANUP_S
        while self._tasks and time.perf_counter() < until:
            event_loop().run_slice(0.01)

    def _submit_turns(self, weight_version: int) -> None:
        """Let the engine sample the turns that need not wait: all first turns of a prompt share one prefill."""
        requests = []
        waiting, self._waiting = self._waiting, []
        for driver in waiting:
            group = self._groups[driver.rollout_id.prompt_ordinal]
            if driver.budget > 0 and all(one.has_begun for one in group):
                requests.append(driver.next_engine_request())
            else:
                self._waiting.append(driver)
        self.engine.submit(requests, weight_version=weight_version)

    def _decode_step(self) -> None:
        """Sample one more token of each turn that the engine has."""
        for sequence in self.engine.step():
            driver = self._drivers[sequence.rollout_id._replace(branch=0)]
            self.counts["sampled_tokens"] += len(sequence.after_prompt) - len(driver.tokens)
            if driver.receive_tokens(sequence):
                self._working_since[driver] = time.monotonic()
            else:
                self._waiting.append(driver)
        if self.engine.lacks_blocks:
            # Episodes that need no more in this round make room for others.
            for driver in self._waiting:
                self._release_requests(driver)

    def _handle_replies(self, wait_s: float) -> bool:
        """Let the functions run until all wait, and continue the episodes whose functions have replied.

        Without a reply it waits up to `wait_s` seconds for the first. Returns whether there was one. The function that
        has worked longest fails if it exceeds its time.
        """
        with spent_on("wait_replies"):
            event_loop().run_slice(0.0 if self._replies else wait_s)
        has_replies = bool(self._replies)
        for driver, reply in self._replies:
            self._working_since.pop(driver, None)
            try:
                if isinstance(reply, TurnRequest):
                    self._begin_turn(driver, reply)
                elif isinstance(reply, InputError):
                    raise reply
                else:
                    self._end_episode(driver, driver.episode.end_reason, has_returned=True)
            except InputError as error:
                raise self._rollout_error(driver, error) from None
        self._replies.clear()
        if self._call_timeout is not None and self._working_since:
            # After the slice: what came in time is a reply by then.
            slowest, since = next(iter(self._working_since.items()))
            if time.monotonic() - since > self._call_timeout:
                raise self._rollout_error(
                    slowest, f"took more than {self._call_timeout:g} s; see --call-timeout"
                )
        return has_replies

    def _rollout_error(self, driver: Driver, error: InputError | str) -> RolloutError:
        """Return the error of a function, which ends the run."""
        num_turns = driver.episode.num_turns
        when = f"after turn {num_turns}" if num_turns else "before its first turn"
        origin = f"rollout {function_name(self._rollout)} for the row at {driver.episode.row.origin}"
        return RolloutError(escaped(f"{origin}, {when}: {error}"))

    def _begin_turn(self, driver: Driver, turn_request: TurnRequest) -> None:
        """Begin the turn that a function asks for. Without room, or at a limit, end the episode instead.

        A request that is rejected raises its InputError in the function, which may catch it and go on.
        """
        try:
            has_room = driver.begin_turn(turn_request)
        except InputError as error:
            driver.fail(error)
            self._working_since[driver] = time.monotonic()
            return
        if has_room:
            self._count_results(driver)
        if has_room and driver.episode.num_turns < self._max_turns:
            self._waiting.append(driver)
        else:
            driver.cancel()
            self._end_episode(driver, "max_turns" if has_room else "length")

    def _count_results(self, driver: Driver) -> None:
        """Count the results of tools that are appended before a turn."""
        for message in driver.turn.inserted:
            if message["role"] == "tool":
                self.counts["tool_results"] += 1
                self.counts["tool_errors"] += str(message["content"]).startswith(TOOL_ERROR)

    def _end_episode(self, driver: Driver, finish_reason: str | None, *, has_returned: bool = False) -> None:
        """End an episode after its last turn. has_returned: whether its function returned, before a limit.

        finish_reason: None for that of the last turn. Raises InputError for an episode without a turn, or with other
        rewards than the run's.
        """
        given_rewards = driver.episode.given_rewards
        rollout = driver.rollout(finish_reason, dict.fromkeys(self._reward_names, 0.0) | given_rewards)
        if has_returned and (given_rewards or self._reward_names):
            check_rewards(given_rewards, self._reward_names, driver.origin)
        ordinal = driver.rollout_id.prompt_ordinal
        self._rollouts[ordinal].append(rollout)
        self._groups[ordinal].remove(driver)
        if not self._groups[ordinal]:
            del self._groups[ordinal]
            self.queue.add(self._rollouts.pop(ordinal))
        del self._drivers[driver.rollout_id]
        self._release_requests(driver)

    def _release_requests(self, driver: Driver) -> None:
        """Take the branches of an episode out of the engine."""
        self.engine.release(*(branch.request.rollout_id for branch in driver.episode.branches))


def check_rewards(given_rewards: Collection[str], required_rewards: Collection[str], origin: str) -> None:
    """Raise InputError for rewards that the run has no use for, and for one that it wants and nobody gave.

    given_rewards: the names of the rewards that an episode gave or returned. required_rewards: the names of the run's
    rewards.
    """
    refuse(
        not all(isinstance(name, str) for name in given_rewards),
        f"{origin}: a reward's name is not text: {given_rewards!r:.80}",
    )
    listed = ", ".join(map(repr, sorted(given_rewards))) or "none"
    flags = " ".join("episode" if name == REWARD else f"episode:{name}" for name in sorted(given_rewards))
    refuse(
        given_rewards and not required_rewards,
        f"{origin}: gives rewards ({listed}) that the run does not have: add --reward {flags}",
    )
    for name in required_rewards:
        refuse(
            name not in given_rewards,
            f"{origin}: ended without the reward {name!r} (given: {listed}); give it in every episode, at "
            f"least `episode.reward(0.0, {name!r})`, or return {{{name!r}: None}} where it does not apply",
        )
