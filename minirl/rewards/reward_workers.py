"""Run each of the user's reward functions in worker processes (`minirl.workers`), which check the rewards first.

If a whole call raises, hangs, dies or does not return a list of the right length, its completions are sent again one by
one, to find those that fail. The trainer checks all rewards again.
"""

import contextlib
import inspect
import math
from collections import deque
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirl.errors import RewardError, escaped
from minirl.ranks.time_account import spent_on
from minirl.rewards.reward_adapter import ADAPTER
from minirl.rewards.values import validate_number
from minirl.workers.failures import Failures
from minirl.workers.pool import NO_ANSWER, Kind, Pool, Reply, WorkerError, wait_for_any

POLL_S = 0.5  # the longest wait for an event
REWARD = Kind(
    flag="--reward", called="reward", adapter=ADAPTER, too_long="and was killed; see --call-timeout"
)

# A reward or an error string for each completion; a single string: the whole call failed.
Answers = list[float | str | None] | str


def load_reward(
    spec: str, *, timeout_s: float = 60.0, on_error: str = "stop", num_workers: int = 1
) -> "RewardWorkers":
    """Start workers for a function, "file.py:name" or "module:name".

    timeout_s: limit of one call. on_error: "zero" forgives a few failed completions, "stop" none. Raises InputError if
    the function is missing or cannot run.
    """
    return RewardWorkers(Pool(REWARD, spec, timeout_s=timeout_s, num_workers=num_workers), on_error)


class RewardWorkers:
    """A reward function whose calls run in worker processes, one at a time in each.

    pool: the workers. on_error: see `load_reward`.
    """

    def __init__(self, pool: Pool, on_error: str):
        self.pool = pool
        self.__name__ = self.pool.name
        self.__signature__ = _signature(self.pool.description)
        self.on_error = on_error

    def __call__(self, **arguments: list[Any]) -> list[float | None]:
        """Compute rewards; error messages do not name the rows. Raises like `compute`."""
        count = max(map(len, arguments.values()))
        texts = [str(completion) for completion in arguments.get("completions", [""] * count)]
        return self.compute(arguments, places=["?"] * count, texts=texts)

    def compute(
        self, arguments: dict[str, list[Any]], *, places: Sequence[str], texts: Sequence[str]
    ) -> list[float | None]:
        """Compute the rewards of N completions; NaN where a failure is forgiven, None where it does not apply.

        Not collective. For arguments and errors see `FunctionCalls`. The seed is 0.
        """
        calls = FunctionCalls(self)
        calls.begin_step(len(texts))
        call = Call(arguments, places, texts, seeds=[0] * len(texts))
        calls.add(call)
        complete([calls], [call])
        return call.rewards


@dataclass
class Call:
    """N completions that go to a function together, and their rewards.

    The worker is seeded with seeds[0], or with a completion's own seed if that is sent alone. is_group: none is sent
    alone; if the call fails, it fails for all of them.
    """

    arguments: dict[str, list[Any]]  # a list [N] per argument of the function
    places: Sequence[str]  # the origins of the rows, for error messages
    texts: Sequence[str]  # the completions, for error messages
    seeds: Sequence[int]
    is_group: bool = False
    # Once known: NaN where a failure is forgiven, None where the reward does not apply.
    rewards: list[float | None] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Return whether all its rewards are known."""
        return len(self.rewards) == len(self.texts)

    def alone(self, i: int) -> "Call":
        """Return the call for one completion."""
        arguments = {name: values[i : i + 1] for name, values in self.arguments.items()}
        return Call(arguments, self.places[i : i + 1], self.texts[i : i + 1], self.seeds[i : i + 1])


class FunctionCalls:
    """Calls of one function, started in the order in which they were added. Nothing here waits.

    Each worker runs one at a time. A call that fails as a whole is repeated completion by completion, one after the
    other, so that a function that hangs delays no other call as long as another worker exists. Not collective.

    failures: of the step.
    """

    def __init__(self, function: RewardWorkers):
        self.function = function
        self.begin_step(0)
        # Each call as a generator of its remaining requests.
        self._waiting: deque[Generator[Call, Reply, None]] = deque()
        # The same with the request under way, by the conversation's number.
        self._under_way: dict[int, tuple[Call, Generator[Call, Reply, None]]] = {}

    @property
    def is_busy(self) -> bool:
        """Return whether calls are under way or wait for a worker."""
        return bool(self._under_way or self._waiting)

    def begin_step(self, num_completions: int) -> None:
        """Reset the count of failures; the limit of forgiven ones is a share of these completions."""
        self.failures = Failures(num_completions, are_forgiven=self.function.on_error == "zero")

    def add(self, call: Call) -> None:
        """Add a call; it starts at once if a worker is free."""
        self._waiting.append(self._requests(call))
        with self._place_named():
            self._start_waiting()

    def advance(self) -> None:
        """Send, receive, kill calls that exceed their time, and start the next ones.

        Raises RewardError naming function, row, completion and the error, as soon as a failure is not forgiven.
        """
        with self._place_named():
            for number, reply in self.function.pool.poll(self._under_way):
                _, requests = self._under_way.pop(number)
                self._continue(requests, reply)
            self._start_waiting()

    def say_forgiven(self) -> None:
        """Print once per run that failures were forgiven."""
        if self.failures.messages:
            text = f"{self.failures.messages[0]}\nThe reward is 0, see reward/errors."
            self.function.pool.print_once("forgiven", text)

    def _start_waiting(self) -> None:
        """Start a call on each free worker. Raises WorkerError."""
        while self._waiting and self.function.pool.has_free_worker:
            self._continue(self._waiting.popleft(), None)
        self.function.pool.flush()

    def _continue(self, requests: Generator[Call, Reply, None], reply: Reply | None) -> None:
        """Give a call the reply to its last request, and a worker its next request, if any."""
        try:
            request = next(requests) if reply is None else requests.send(reply)
        except StopIteration:
            return
        opening = {"arguments": request.arguments, "count": len(request.texts)}
        number = self.function.pool.open(request.seeds[0], lambda: opening)
        self._under_way[number] = (request, requests)

    @contextlib.contextmanager
    def _place_named(self) -> Iterator[None]:
        """If a worker cannot be started, raise RewardError naming the row and completion that it was for."""
        try:
            yield
        except WorkerError as error:
            of_call = ""
            # The completion may belong to another call of the function.
            if error.number in self._under_way:
                call, _ = self._under_way[error.number]
                of_call = named_completion(call.places[0], call.texts[0])
            raise RewardError(escaped(f"reward {self.function.__name__}{of_call}: {error}")) from None

    def _requests(self, call: Call) -> Generator[Call, Reply, None]:
        """Yield the requests of a call one after the other, and get the replies. Raises like `advance`."""
        count = len(call.texts)
        answers = _answers((yield call), count)
        if not isinstance(answers, str):
            call.rewards = [self._reward(call, i, answer) for i, answer in enumerate(answers)]
        elif count == 1 or call.is_group:
            call.rewards = [self._reward(call, i, answers) for i in range(count)]
        else:
            for i in range(count):
                alone = _answers((yield call.alone(i)), 1)
                call.rewards.append(self._reward(call, i, alone if isinstance(alone, str) else alone[0]))
            if not any(reward is not None and math.isnan(reward) for reward in call.rewards):
                what = f"{count} completions, none of which fails alone"
                raise RewardError(escaped(f"reward {self.function.__name__} for {what}: {answers}"))
        # Calls, with token ids among their arguments, are kept until their rollouts are taken.
        call.arguments = {}

    def _reward(self, call: Call, i: int, answer: float | str | None) -> float | None:
        """Return a completion's reward, or NaN for a forgiven failure. Raises RewardError for any other failure."""
        if not isinstance(answer, str):
            return answer
        failures = self.failures
        message = (
            f"reward {self.function.__name__}{named_completion(call.places[i], call.texts[i])}: {answer}"
        )
        if failures.add(escaped(message)):
            return math.nan
        summary = ""
        if failures.max_forgiven > 0:
            counts = f"{len(failures.messages)} of this step's {failures.num_total} completions"
            summary = f"{counts}, --on-reward-error zero forgives {failures.max_forgiven}; "
        raise RewardError(summary + failures.messages[0])


def named_completion(place: str, text: str) -> str:
    """Return the text of a completion's error, to follow the function's name. place: its row's."""
    return f" for the row at {place}, completion {text[:80]!r}"


def poll(all_calls: Collection[FunctionCalls], timeout_s: float) -> None:
    """Advance the calls of several functions. With a timeout, wait for an event, up to POLL_S seconds.

    Raises like `FunctionCalls.advance`.
    """
    if timeout_s > 0:
        with spent_on("wait_rewards"):
            wait_for_any([calls.function.pool for calls in all_calls], min(timeout_s, POLL_S))
    for calls in all_calls:
        calls.advance()


@spent_on("wait_rewards")
def complete(all_calls: Collection[FunctionCalls], awaited: Sequence[Call]) -> None:
    """Wait for these calls of several functions. Raises like `poll`."""
    while not all(call.is_complete for call in awaited):
        poll(all_calls, POLL_S)
    for calls in all_calls:
        calls.say_forgiven()


def _answers(reply: Reply, count: int) -> Answers:
    """Check a reply to a request for `count` completions; returns the result of `values.validate_rewards`."""
    if reply.error is not None:
        return reply.error
    rewards = reply.content
    if isinstance(rewards, list) and len(rewards) == count:
        return [value if isinstance(value, str) else validate_number(value) for value in rewards]
    return rewards if isinstance(rewards, str) else NO_ANSWER


def _signature(description: Mapping[str, Any]) -> inspect.Signature:
    """Return the signature of the user's function, as its worker describes it."""
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                getattr(inspect.Parameter, kind),
                default=inspect.Parameter.empty if is_required else None,
            )
            for name, kind, is_required in description["parameters"]
        ]
    )
