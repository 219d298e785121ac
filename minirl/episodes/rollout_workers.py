"""Run a user's rollout function in worker processes (`minirl.workers`), during decoding.

When a process dies, its episodes run again in another process with the turns they had received, and must make the same
requests again.
"""

import functools
from typing import Any

from minirl.episodes.episode import Episode
from minirl.episodes.generate import Generate
from minirl.episodes.program import Failed, Reply
from minirl.episodes.remote import opening, read_reply, take_facts, turns_message
from minirl.episodes.turn import Turn
from minirl.errors import InputError, RolloutError
from minirl.ranks.time_account import spent_on
from minirl.workers import pool as workers
from minirl.workers.pool import NO_ANSWER, Kind, Pool, WorkerError, wait_for_any

TOO_LONG = "for a reply; see --call-timeout"
TOOLS = "minirl.agents.tool_loop"
KINDS = {
    "rollout": Kind("--rollout", "rollout", "minirl.episodes.remote:load_rollout", TOO_LONG),
    "tools": Kind(
        "--tools",
        "rollout",
        f"{TOOLS}:load_tools",
        TOO_LONG,
        expected="function,function",
        describes_apart=True,
    ),
    "environment": Kind(
        "--environment",
        "rollout",
        f"{TOOLS}:load_environment",
        TOO_LONG,
        expected="Class",
        describes_apart=True,
    ),
}


def load_rollout(
    spec: str,
    *,
    kind: str = "rollout",
    timeout_s: float = 60.0,
    on_error: str = "stop",
    num_workers: int = 1,
) -> "RolloutWorkers":
    """Start workers for the value of the flag --KIND, "file.py:name" or "module:name".

    kind: "rollout", a rollout function; or "tools" (names separated by commas) or "environment", from which
    `minirl.agents.tool_loop` makes one. timeout_s: limit of one reply. on_error: "end" ends a few failed episodes after
    their last turn, "stop" stops the run. Raises InputError if the function cannot be loaded.
    """
    pool = Pool(KINDS[kind], spec, timeout_s=timeout_s, num_workers=num_workers)
    return RolloutWorkers(pool, kind, on_error)


class RolloutWorkers:
    """A rollout function that runs in worker processes; the interface of `program.InProcess`.

    kind, on_error: see `load_rollout`. tools: JSON schemas of the tools that the function calls. gives_reward:
    whether an environment has `get_reward`.
    """

    def __init__(self, pool: Pool, kind: str, on_error: str):
        self.pool = pool
        self.name = pool.name
        self.kind = kind
        self.on_error = on_error
        self.tools: list[dict[str, Any]] = pool.description.get("tools", [])
        self.gives_reward: bool = pool.description.get("gives_reward", False)
        self._episodes: dict[int, Episode] = {}

    def beside(self) -> "RolloutWorkers":
        """The same function in the same processes, for other episodes."""
        return RolloutWorkers(self.pool, self.kind, self.on_error)

    def begin(self, episode: Episode) -> int:
        """See `InProcess`. Raises InputError for a row that JSON cannot hold, RolloutError if no process starts."""
        try:
            number = self.pool.open(episode.seed, functools.partial(opening, episode))
        except (TypeError, ValueError, RecursionError) as error:
            message = f"--{self.kind}: the row at {episode.row.place} cannot be sent to it: {error}"
            raise InputError(message) from None
        except WorkerError as error:
            raise RolloutError(f"{self.pool.what}: {error}") from None
        self._episodes[number] = episode
        return number

    def send(self, number: int, turn: Turn) -> None:
        """See `InProcess`."""
        episode = self._episodes[number]
        episode.take(turn)
        self.pool.send(number, turns_message(episode, [turn]))

    def close(self, number: int) -> None:
        """See `InProcess`."""
        del self._episodes[number]
        self.pool.close(number)

    def seconds(self, number: int) -> float:
        """See `InProcess`. Counts time in the present process only, not in one that died."""
        return self.pool.seconds(number)

    def replies(self, timeout_s: float = 0.0) -> list[tuple[int, Reply]]:
        """See `InProcess`. Waits if there are none. Raises RolloutError if a dead process cannot be replaced."""
        try:
            if timeout_s > 0:
                self._wait(timeout_s)
            found = self.pool.poll(self._episodes)
        except WorkerError as error:
            started_for = ""
            # It may be one of `beside`.
            if error.number in self._episodes:
                place = self._episodes[error.number].row.place
                started_for = f"\nThe process was to replace one that had died, for the row at {place}"
            raise RolloutError(f"{self.pool.what}: {error}{started_for}") from None
        replies = []
        for number, received in found:
            reply = _taken(received, self._episodes[number])
            replies.append((number, reply))
            if not isinstance(reply, Generate):
                del self._episodes[number]
                if not received.is_last:
                    self.pool.close(number)
        return replies

    @spent_on("wait_replies")
    def _wait(self, timeout_s: float) -> None:
        """Wait until a worker that owes a reply has sent something, or has exceeded its time."""
        wait_for_any([self.pool], timeout_s)


def _taken(received: workers.Reply, episode: Episode) -> Reply:
    """Return a function's reply, and put its facts into the episode."""
    try:
        if received.facts is not None:
            take_facts(episode, received.facts)
        return Failed(received.error) if received.error else read_reply(received.content)
    except (ValueError, LookupError, TypeError, AttributeError):
        return Failed(NO_ANSWER)
