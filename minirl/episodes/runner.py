"""Run rollout functions on the engine, which decodes the turns of all episodes together.

The life of a rollout:

1. The collector draws a prompt and begins its G rollouts. Each rollout function runs as a task, owned by a `Driver`.
2. The function requests a turn. The first turns of all G rollouts start together and share one prefill.
3. Each engine step samples one token per turn; between engine steps, rollout functions work on their next replies.
4. A turn ends at a stop token or stop string, or is truncated at its limit ("length"). In both cases, the function
   gets the turn, and may append tokens and request another turn on any branch.
5. The episode ends when its function returns. The episode also ends when a requested turn does not fit or exceeds
   `max_turns`: the function is cancelled, and the turns so far become the rollout, with the limit as the finish reason.
6. When the last rollout of a prompt has ended, the whole group enters the reward queue and waits for a step.
7. An invalid request raises InputError in the function. The run fails if a function raises, exceeds its time limit or
   returns anything but rewards. The RolloutError names the function, row and turn, and all other functions are
   cancelled.
8. With `max_staleness`, a step decodes in rounds, each with a token budget per rollout. A rollout that has used its
   budget pauses until the next round. A round waits only briefly for functions that are still working, for example on
   a tool call.
9. At the end of a step, unfinished rollouts keep their tokens but lose their KV cache. Tool calls keep running. The
   next step receives the results of these calls, prefills the tokens again under the new weights, and continues
   sampling.
10. A checkpoint stores only the prompt ordinals of unfinished rollouts, which start over after a resume.
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
from minirl.errors import InputError, RolloutError, escape_control_chars, refuse
from minirl.generation.engine import Engine
from minirl.ranks.time_account import spent_on
from minirl.report.progress_bar import show_progress
from minirl.rewards.functions import RewardLike
from minirl.rewards.reward_queue import RewardQueue
from minirl.rollouts import Request, RewardedRollout, Rollout, RolloutId

# Maximum time (s) to wait for replies while there is nothing to decode, before reward calls are polled.
IDLE_WAIT_S = 0.05
# The turn limit if --max-turns is not set. Without any limit, some agents would never stop.
MAX_TURNS = 1000
# Prefix of a tool result that reports an error, in TRL and in `tool_loop`.
TOOL_ERROR = "{'error': "
# Time (s) for functions to clean up when the run ends.
CLEANUP_S = 1.0


class EpisodeRunner:
    """Runs episodes in rounds. Its methods are collective only if ranks share the model's layers.

    queue: the queue that computes the rewards of complete groups.
    counts: counters "sampled_tokens", "tool_results" (appended tool results) and "tool_errors" (appended tool results
    that report an error). All counts include rollouts that no step takes.
    reply_wait_s: maximum time (s) to wait for the next reply in a round with a budget and nothing to decode.
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
        """functions: the K reward functions, keyed by name. rollout: see `episode`.

        max_turns: maximum number of turns per episode (0 means MAX_TURNS).
        call_timeout: time limit (s) between a turn and the function's next request, and for a reward call in a thread.
        """
        self.engine = engine
        check_rollout_function(rollout, f"rollout {function_name(rollout)}")
        self._rollout = rollout
        self._call_timeout = call_timeout
        self._prompts = prompts
        self._max_turns = max_turns or MAX_TURNS
        self.queue = RewardQueue(functions, prompts, call_timeout=call_timeout)
        # Names of the rewards that each episode must record. If a limit ends an episode, missing rewards are 0.
        self._reward_names = self.queue.episode_rewards
        self.counts: Counter[str] = Counter()
        # Tasks of functions that have not returned, including those still cleaning up after their episodes ended.
        self._tasks: set[asyncio.Task[None]] = set()
        self._step_ended_at = 0.0
        self._forget_episodes()

    def _forget_episodes(self) -> None:
        """Reset the runner, discarding all episodes."""
        # All open episodes, keyed by the id of their first branch, in the order in which they began.
        self._drivers: dict[RolloutId, Driver] = {}
        # Episodes whose requested turn is waiting, either for all episodes of the group to request their first turn or
        # for the next round's budget.
        self._waiting: list[Driver] = []
        # The times at which the functions began to work on their next replies, oldest first.
        self._working_since: dict[Driver, float] = {}
        self._replies: list[tuple[Driver, Reply]] = []
        # Each prompt's open episodes, and the rollouts of its finished episodes until the group is complete.
        self._groups: defaultdict[int, list[Driver]] = defaultdict(list)
        self._rollouts: defaultdict[int, list[Rollout]] = defaultdict(list)

    def run(self, requests: Sequence[Request], *, weight_version: int = 0) -> list[RewardedRollout]:
        """Finish the requests of complete groups; return the rewarded rollouts."""
        with self.step_scope():
            self.begin_episodes(requests)
            self.run_round(weight_version=weight_version)
        return self.queue.finish(sorted(self.queue.groups))

    def begin_episodes(self, requests: Sequence[Request]) -> None:
        """Create a task for each new episode; the next round runs the tasks. Raises InputError for an invalid row."""
        for request in requests:
            driver = Driver(request, self._prompts, self._rollout, self._replies)
            self._tasks.add(driver.task)
            driver.task.add_done_callback(self._tasks.discard)
            self._drivers[request.rollout_id] = driver
            self._groups[request.rollout_id.prompt_ordinal].append(driver)
            self._working_since[driver] = time.monotonic()

    def run_round(self, budget: int = NO_BUDGET, *, weight_version: int) -> None:
        """Let each episode sample up to `budget` tokens; without a budget, run all episodes to completion.

        A group enters the queue when its last episode ends. With a budget, the round also ends when there is nothing to
        decode and no function has replied for `reply_wait_s`.

        Raises InputError under the same conditions as `Engine.submit`, and RewardError if a reward call fails. Raises
        RolloutError, naming the function, row and turn, if the function fails or does not catch the error for an
        invalid request.
        """
        for driver in self._drivers.values():
            driver.budget = budget
        self._submit_turns(weight_version)
        last_active_at = time.perf_counter()
        with show_progress("generate", total=len(self._drivers), unit="completions") as bar:
            while self.engine.has_unfinished_requests or len(self._waiting) < len(self._drivers):
                num_open_episodes = len(self._drivers)
                has_replies = self._handle_replies(0.0 if self.engine.any_rank_has_work else IDLE_WAIT_S)
                self._submit_turns(weight_version)
                self.queue.poll()
                bar.update(num_open_episodes - len(self._drivers))
                if has_replies or self.engine.has_unfinished_requests:
                    last_active_at = time.perf_counter()
                elif budget < NO_BUDGET and time.perf_counter() - last_active_at > self.reply_wait_s:
                    break
                self._decode_step()
        # Ranks that share the model's layers join each other's passes until all ranks are done.
        self.engine.sync_ranks()

    @contextmanager
    def step_scope(self) -> Iterator[None]:
        """Release all engine requests at the end of the block; call `close` if the block raises."""
        # The event loop does not run between steps, so that time does not count against the functions' time limits.
        between_steps_s = time.monotonic() - self._step_ended_at
        self._working_since = {
            driver: since + between_steps_s for driver, since in self._working_since.items()
        }
        try:
            yield
        except BaseException:
            self.close()
            raise
        for driver in self._drivers.values():
            self._release_requests(driver)
        event_loop().run_slice()  # lets the functions of finished episodes clean up
        self._step_ended_at = time.monotonic()

    def close(self) -> None:
        """Cancel all episodes and drop their rollouts; give their functions CLEANUP_S to clean up."""
        for driver in self._drivers.values():
            driver.cancel()
        self._forget_episodes()
        deadline = time.perf_counter() + CLEANUP_S
        while self._tasks and time.perf_counter() < deadline:
            event_loop().run_slice(0.01)

    def _submit_turns(self, weight_version: int) -> None:
        """Submit all turns that can run now. A group's first turns are submitted together, to share one prefill."""
        requests = []
        waiting, self._waiting = self._waiting, []
        for driver in waiting:
            group_drivers = self._groups[driver.rollout_id.prompt_ordinal]
            if driver.budget > 0 and all(member.has_begun for member in group_drivers):
                requests.append(driver.next_engine_request())
            else:
                self._waiting.append(driver)
        self.engine.submit(requests, weight_version=weight_version)

    def _decode_step(self) -> None:
        """Run one engine step, and hand each finished turn to the rollout function that awaits it."""
        for sequence in self.engine.step():
            driver = self._drivers[sequence.rollout_id._replace(branch=0)]
            self.counts["sampled_tokens"] += len(sequence.tokens_after_prompt) - len(driver.tokens)
            if driver.receive_tokens(sequence):
                self._working_since[driver] = time.monotonic()
            else:
                self._waiting.append(driver)
        if self.engine.lacks_blocks:
            # Waiting episodes sample no more in this round, so their blocks can go to other episodes.
            for driver in self._waiting:
                self._release_requests(driver)

    def _handle_replies(self, wait_s: float) -> bool:
        """Run the functions until all are blocked, and handle their replies; return whether any function replied.

        If there is no reply yet, wait up to `wait_s` seconds for the first reply. Raises RolloutError if the slowest
        function exceeds --call-timeout.
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
            # Check after the slice: by then, every result that arrived in time has been turned into a reply.
            slowest, since = next(iter(self._working_since.items()))
            if time.monotonic() - since > self._call_timeout:
                raise self._rollout_error(
                    slowest, f"took more than {self._call_timeout:g} s; see --call-timeout"
                )
        return has_replies

    def _rollout_error(self, driver: Driver, error: InputError | str) -> RolloutError:
        """Return the error that ends the run when a function fails."""
        num_turns = driver.episode.num_turns
        failure_point = f"after turn {num_turns}" if num_turns else "before its first turn"
        return RolloutError(escape_control_chars(f"{driver.description}, {failure_point}: {error}"))

    def _begin_turn(self, driver: Driver, turn_request: TurnRequest) -> None:
        """Begin the turn that a function requests, or end the episode if there is no room or the turn limit is reached.

        An invalid request raises InputError in the function, which may catch the error and continue.
        """
        try:
            has_token_room = driver.begin_turn(turn_request)
        except InputError as error:
            driver.fail(error)
            self._working_since[driver] = time.monotonic()
            return
        if has_token_room:
            for message in driver.turn.inserted:
                if message["role"] == "tool":
                    self.counts["tool_results"] += 1
                    self.counts["tool_errors"] += str(message["content"]).startswith(TOOL_ERROR)
        if has_token_room and driver.episode.num_turns < self._max_turns:
            self._waiting.append(driver)
        else:
            driver.cancel()
            self._end_episode(driver, "max_turns" if has_token_room else "length")

    def _end_episode(self, driver: Driver, finish_reason: str | None, *, has_returned: bool = False) -> None:
        """End an episode after its last turn, and queue its group if the group is now complete.

        finish_reason: the rollout's finish reason, or None for the finish reason of the last turn. has_returned:
        whether the function returned before the episode reached a limit. Raises InputError for an episode without
        turns, and for missing or unknown rewards.
        """
        given_rewards = driver.episode.given_rewards
        rollout = driver.finished_rollout(
            finish_reason, dict.fromkeys(self._reward_names, 0.0) | given_rewards
        )
        if has_returned and (given_rewards or self._reward_names):
            check_rewards(given_rewards, self._reward_names)
        prompt_ordinal = driver.rollout_id.prompt_ordinal
        self._rollouts[prompt_ordinal].append(rollout)
        self._groups[prompt_ordinal].remove(driver)
        if not self._groups[prompt_ordinal]:
            del self._groups[prompt_ordinal]
            self.queue.add(self._rollouts.pop(prompt_ordinal))
        del self._drivers[driver.rollout_id]
        self._release_requests(driver)

    def _release_requests(self, driver: Driver) -> None:
        """Release the engine requests for all of an episode's branches."""
        self.engine.release(*(branch.request.rollout_id for branch in driver.episode.branches))


def check_rewards(given_rewards: Collection[str], required_rewards: Collection[str]) -> None:
    """Raise InputError if a required reward is missing, or if the run uses no episode rewards but some were recorded.

    given_rewards: names of the rewards that an episode recorded or returned. required_rewards: names of the rewards
    that the run uses.
    """
    refuse(
        not all(isinstance(name, str) for name in given_rewards),
        f"reward names must be strings: {given_rewards!r:.80}",
    )
    given_names = ", ".join(map(repr, sorted(given_rewards))) or "none"
    flag_values = " ".join(
        "episode" if name == REWARD else f"episode:{name}" for name in sorted(given_rewards)
    )
    refuse(
        given_rewards and not required_rewards,
        f"the episode recorded rewards ({given_names}) that this run does not use; add --reward {flag_values}",
    )
    for name in required_rewards:
        refuse(
            name not in given_rewards,
            f"the episode ended without recording the reward {name!r} (recorded: {given_names}); record it in every "
            f"episode, even if only as `episode.reward(0.0, {name!r})`, or return {{{name!r}: None}} where it does not "
            "apply",
        )
