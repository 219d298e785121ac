"""Run each of the user's reward functions in processes (`worker`) that are killed if a call takes too long.

When a whole call raises, hangs, dies or does not return a list of the right length, its completions are sent
again, one in a call, to find those that fail. What the workers send is checked here again.
"""

import contextlib
import inspect
import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minirl.errors import InputError, RewardError
from minirl.ranks import watchdog
from minirl.ranks.process_group import print_here, rank
from minirl.ranks.time_account import spent_on
from minirl.rewards import worker
from minirl.rewards.exchange import NO_ANSWER, POLL_S, Worker, wait_for_any
from minirl.rewards.user_process import escaped, source_and_name

# With on_error "zero", up to this share of the completions of a phase (at least one) may fail and is forgiven.
MAX_FORGIVEN_FRAC = 0.05

# What a worker sends for a request, and rewards or error strings made of it; a single string: the whole call failed.
Reply = dict[str, Any] | str
Answers = list[float | str | None] | str


def load_reward(
    spec: str, *, timeout_s: float = 60.0, on_error: str = "stop", num_workers: int = 1
) -> "RewardProcess":
    """Start workers for a function, "file.py:name" or "module:name". Raises InputError if it cannot be used."""
    source, name = source_and_name("--reward", spec)
    return RewardProcess(source, name, timeout_s=timeout_s, on_error=on_error, num_workers=num_workers)


class RewardProcess:
    """A reward function whose calls run in worker processes.

    Each worker runs the user's file for itself: what the file remembers between calls is that worker's own, and is
    lost when the worker is killed.
    """

    def __init__(self, source: str, name: str, *, timeout_s: float, on_error: str, num_workers: int = 1):
        """Start the workers. source: a Python file, or a module's name.

        timeout_s: limit of one call. on_error: "zero" forgives a few failed completions, "stop" none.
        Raises InputError if it cannot be run or has no such function.
        """
        self.__name__ = name
        self.on_error = on_error
        # Of `FunctionCalls`: only the newest may use the workers.
        self.phase = 0
        # The kinds of notes that were printed: each is printed once.
        self._printed_notes: set[str] = set()
        self.workers: list[Worker] = []
        try:
            # All load the file at the same time.
            for _ in range(num_workers):
                self.workers.append(Worker(source, name, timeout_s=timeout_s))
            for started in self.workers:
                self.__signature__ = self._await_start(started)
        except RewardError as error:
            self.close()
            raise InputError(f"--reward {source}:{name}: {error}") from None

    def __call__(self, **arguments: list[Any]) -> list[float | None]:
        """Compute rewards; error messages do not name the rows. Raises as `compute`."""
        count = max(map(len, arguments.values()))
        texts = [str(completion) for completion in arguments.get("completions", [""] * count)]
        return self.compute(arguments, places=["?"] * count, texts=texts, seeds=[0] * count)

    def compute(
        self,
        arguments: dict[str, list[Any]],
        *,
        places: Sequence[str],
        texts: Sequence[str],
        seeds: Sequence[int],
    ) -> list[float | None]:
        """Compute the rewards of N completions; NaN where a failure is forgiven, None where it does not apply.

        Not collective. A phase of one call: arguments and errors as of `FunctionCalls`.
        """
        calls = FunctionCalls(self, num_completions=len(texts))
        call = calls.add(arguments, places=places, texts=texts, seeds=seeds)
        complete([calls])
        return call.rewards

    def begin_phase(self) -> int:
        """Return the number of a new phase. Kills the workers that an earlier one, given up, has left in a call.

        Their answers would come late, and must not be taken for those of later calls.
        """
        for busy in self.workers:
            if busy.is_busy:
                busy.kill()
        self.phase += 1
        return self.phase

    def close(self) -> None:
        """Kill the workers and the other processes of their sessions; later calls start new ones."""
        for open_worker in self.workers:
            open_worker.kill()

    def show_printed(self, reply: Reply) -> None:
        """Print once what the user's code has printed, on rank 0: it is much the same on all."""
        if isinstance(reply, dict) and reply["printed"] and rank() == 0:
            text = escaped(reply["printed"])
            self.print_once("printed", f"reward {self.__name__} printed (said once):\n{text}")

    def print_once(self, kind: str, text: str) -> None:
        """Print a note on this rank unless one of this kind was printed before."""
        if kind not in self._printed_notes:
            self._printed_notes.add(kind)
            print_here(f"note: {text}")

    def _await_start(self, started: Worker) -> inspect.Signature:
        """Return the signature of the function that a new worker has loaded. Raises RewardError."""
        reply = None
        while reply is None:
            wait_for_any([started], POLL_S)
            reply = started.receive()
        if isinstance(reply, str):
            raise RewardError(reply)
        self.show_printed(reply)
        if isinstance(reply.get("error"), str):
            raise RewardError(escaped(reply["error"]))
        try:
            return _signature(reply)
        except (KeyError, TypeError, ValueError):
            raise RewardError(NO_ANSWER) from None


@dataclass
class Call:
    """N completions that are sent to a function together, and their rewards.

    The worker is seeded with seeds[0], or with a completion's own seed when that is sent alone. is_group: none is; if
    the call fails, it fails for all of them.
    """

    arguments: dict[str, list[Any]]  # a list [N] per argument of the function
    places: Sequence[str]  # the origins of the rows, for error messages
    texts: Sequence[str]  # the completions, for error messages
    seeds: Sequence[int]
    is_group: bool = False
    # Once they are known: NaN where a failure is forgiven, None where the reward does not apply.
    rewards: list[float | None] = field(default_factory=list)

    def request(self) -> dict[str, Any]:
        """What a worker gets for all completions."""
        return {"seed": self.seeds[0], "arguments": self.arguments, "count": len(self.texts)}

    def request_alone(self, i: int) -> dict[str, Any]:
        """What a worker gets for one completion."""
        single = {name: values[i : i + 1] for name, values in self.arguments.items()}
        return {"seed": self.seeds[i], "arguments": single, "count": 1}


class FunctionCalls:
    """The calls of one function in a phase, begun in the order in which they are added. Nothing here waits.

    As many are under way as there are workers. A call that fails as a whole is repeated completion by completion on
    its worker, so that a function which hangs delays no other call while there is another worker. Not collective.
    """

    def __init__(self, function: RewardProcess, *, num_completions: int):
        """num_completions: of all calls together; the limit of forgiven failures is a share of them.

        The calls of an earlier phase of this function are given up.
        """
        self.function = function
        self._phase = function.begin_phase()
        self._num_completions = num_completions
        self._max_forgiven = 0
        if function.on_error == "zero":
            self._max_forgiven = max(1, int(MAX_FORGIVEN_FRAC * num_completions))
        self._failures: list[str] = []
        # Each call is the requests that it has yet to make.
        self._waiting: deque[Generator[dict[str, Any], Reply, None]] = deque()
        self._under_way: dict[Worker, Generator[dict[str, Any], Reply, None]] = {}

    @property
    def is_busy(self) -> bool:
        """Whether calls are under way or wait for a worker."""
        return bool(self._under_way or self._waiting)

    @property
    def busy_workers(self) -> list[Worker]:
        """The workers with a call."""
        return list(self._under_way)

    def add(
        self,
        arguments: dict[str, list[Any]],
        *,
        places: Sequence[str],
        texts: Sequence[str],
        seeds: Sequence[int],
        is_group: bool = False,
    ) -> Call:
        """Add a call; it begins at once if a worker is free. The arguments are those of `Call`."""
        self._check_is_newest()
        call = Call(arguments, places, texts, seeds, is_group)
        self._waiting.append(self._requests(call))
        self._start_waiting()
        return call

    def advance(self) -> None:
        """Send, receive, kill what is over its time, and begin the next calls.

        Raises RewardError naming function, row, completion and what the user's code did, as soon as a failure that
        is not forgiven is known.
        """
        self._check_is_newest()
        for busy, requests in list(self._under_way.items()):
            reply = busy.receive()
            if reply is not None:
                self.function.show_printed(reply)
                self._continue(busy, requests, reply)
        self._start_waiting()

    def give_up(self) -> None:
        """Kill the workers that are in a call. Nothing can be added any more."""
        if self._phase == self.function.phase:
            self.function.begin_phase()

    def say_forgiven(self) -> None:
        """Print once per run that failures were forgiven."""
        if self._failures:
            text = f"{self._failures[0]}\nThe reward is 0, see reward/errors."
            self.function.print_once("forgiven", text)

    def _check_is_newest(self) -> None:
        """Raise RuntimeError if the calls were given up."""
        if self._phase != self.function.phase:
            raise RuntimeError(f"reward {self.function.__name__}: this phase was given up")

    def _start_waiting(self) -> None:
        for free in self.function.workers:
            if self._waiting and free not in self._under_way:
                self._continue(free, self._waiting.popleft(), None)

    def _continue(
        self, free: Worker, requests: Generator[dict[str, Any], Reply, None], reply: Reply | None
    ) -> None:
        """Give a call the reply to its last request, and a worker its next request, if there is one.

        A call that raises stays under way: its phase cannot be finished.
        """
        self._under_way[free] = requests
        try:
            request = next(requests) if reply is None else requests.send(reply)
        except StopIteration:
            del self._under_way[free]
        else:
            free.call(request)

    def _requests(self, call: Call) -> Generator[dict[str, Any], Reply, None]:
        """Make the requests of a call one after the other, from the replies to them. Raises as `advance`."""
        count = len(call.texts)
        answers = _answers((yield call.request()), count)
        if not isinstance(answers, str):
            call.rewards = [self._reward(call, i, answer) for i, answer in enumerate(answers)]
        elif count == 1 or call.is_group:
            call.rewards = [self._reward(call, i, answers) for i in range(count)]
        else:
            for i in range(count):
                alone = _answers((yield call.request_alone(i)), 1)
                call.rewards.append(self._reward(call, i, alone if isinstance(alone, str) else alone[0]))
            if not any(reward is not None and math.isnan(reward) for reward in call.rewards):
                what = f"{count} completions, none of which fails alone"
                raise RewardError(escaped(f"reward {self.function.__name__} for {what}: {answers}"))
        # Calls are kept until the phase ends, token ids among their arguments.
        call.arguments = {}

    def _reward(self, call: Call, i: int, answer: float | str | None) -> float | None:
        """Return a completion's reward, NaN for a failure that is forgiven. Raises RewardError for another."""
        if not isinstance(answer, str):
            return answer
        where = f"reward {self.function.__name__} for the row at {call.places[i]}, completion {call.texts[i][:80]!r}"
        self._failures.append(escaped(f"{where}: {answer}"))
        if len(self._failures) <= self._max_forgiven:
            return math.nan
        summary = ""
        if self._max_forgiven > 0:
            counts = f"{len(self._failures)} of this phase's {self._num_completions} completions"
            summary = f"{counts}, --on-reward-error zero forgives {self._max_forgiven}; "
        raise RewardError(summary + self._failures[0])


@contextlib.contextmanager
def given_up_on_error(all_calls: Sequence[FunctionCalls]) -> Iterator[None]:
    """Give up the calls if the block raises, whatever it is."""
    try:
        yield
    except BaseException:
        for calls in all_calls:
            calls.give_up()
        raise


def poll(all_calls: Sequence[FunctionCalls], timeout_s: float) -> None:
    """Advance the calls of several functions. With a timeout, wait for something to happen, as `wait_for_any`.

    Raises as `FunctionCalls.advance`; all calls are then given up, as at any other exception.
    """
    with given_up_on_error(all_calls):
        busy_workers = [busy for calls in all_calls for busy in calls.busy_workers]
        if timeout_s > 0 and busy_workers:
            wait_for_any(busy_workers, timeout_s)
        for calls in all_calls:
            calls.advance()


@spent_on("wait_rewards")
def complete(all_calls: Sequence[FunctionCalls]) -> None:
    """Wait for all calls of several functions. Raises as `poll`."""
    for calls in all_calls:
        # What other ranks' hang reports say of this one.
        watchdog.heartbeat(f"reward {calls.function.__name__}")
        while calls.is_busy:
            poll(all_calls, POLL_S)
        watchdog.heartbeat("")
        calls.say_forgiven()


def _answers(reply: Reply, count: int) -> Answers:
    """Check a reply to a request for `count` completions. Returns as `worker.validate_rewards`."""
    if isinstance(reply, str):
        return reply
    error, rewards = reply.get("error"), reply.get("rewards")
    if error is None and isinstance(rewards, list) and len(rewards) == count:
        return [value if isinstance(value, str) else worker.validate_number(value) for value in rewards]
    text = rewards if error is None else error
    return text if isinstance(text, str) else NO_ANSWER


def _signature(description: dict[str, Any]) -> inspect.Signature:
    """Return the signature of the user's function, as its worker describes the arguments."""
    parameters = []
    for name in description["required"]:
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
    for name in description["optional"]:
        parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None))
    if description["takes_all"]:
        parameters.append(inspect.Parameter("others", inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(parameters)
