"""Run a user's rollout function in worker processes (`minirl.workers`), during decoding.

When a process dies, its episodes run again in another one with the turns that they had got, and must ask for the same
again.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from minirl.episodes.episode import Episode, Generate, Turn, returned_rewards
from minirl.episodes.program import Ended, Failed, Reply
from minirl.errors import InputError, RolloutError
from minirl.ranks import watchdog
from minirl.ranks.time_account import spent_on
from minirl.workers import pool
from minirl.workers.pool import NO_ANSWER, Kind, Pool, WorkerError, wait_for_any

TOO_LONG = "for a reply; see --reply-timeout"
TOOLS = "minirl.agents.tool_adapter"
KINDS = {
    "rollout": Kind("--rollout", "rollout", "minirl.episodes.rollout_adapter:load_rollout", TOO_LONG),
    "tools": Kind(
        "--tools",
        "rollout",
        f"{TOOLS}:load_tools",
        TOO_LONG,
        expected="function,function",
        describer=f"{TOOLS}:describe_tools",
    ),
    "environment": Kind(
        "--environment",
        "rollout",
        f"{TOOLS}:load_environment",
        TOO_LONG,
        expected="Class",
        describer=f"{TOOLS}:describe_environment",
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
    """Start workers for what the flag --KIND names, "file.py:name" or "module:name". Raises InputError if it cannot be.

    kind: "rollout", a rollout function; "tools" (several names, with commas between them) or "environment", of which
    `minirl.agents.tool_loop` makes one.
    """
    return RolloutWorkers(spec, kind=kind, timeout_s=timeout_s, on_error=on_error, num_workers=num_workers)


class RolloutWorkers:
    """A rollout function that runs in worker processes: a `program.Host`.

    kind: as for `load_rollout`. tools: JSON schemas of the tools that the function calls. gives_reward: whether it is
    of an environment with `get_reward`.
    """

    def __init__(
        self,
        spec: str,
        *,
        kind: str = "rollout",
        timeout_s: float,
        on_error: str = "stop",
        num_workers: int = 1,
    ):
        """Start the workers. timeout_s: limit of one reply. on_error: "end" ends a few failed episodes where they
        are, "stop" none. Raises InputError if the function cannot be loaded.
        """
        self.pool = Pool(KINDS[kind], spec, timeout_s=timeout_s, num_workers=num_workers)
        self.name = self.pool.name
        self.kind = kind
        self.on_error = on_error
        self.tools: list[dict[str, Any]] = self.pool.description.get("tools", [])
        self.gives_reward: bool = self.pool.description.get("gives_reward", False)
        self._running: dict[int, _Running] = {}

    def begin(self, episode: Episode) -> int:
        """See `Host`. Raises InputError for a row that cannot be sent as JSON, RolloutError if no process starts."""
        running = _Running(episode, _arguments(episode))
        try:
            number = self.pool.open(episode.seed, running.opening)
        except (TypeError, ValueError, RecursionError) as error:
            message = f"--{self.kind}: the row at {episode.row.place} cannot be sent to it: {error}"
            raise InputError(message) from None
        except WorkerError as error:
            raise RolloutError(f"{self.pool.what}: {error}") from None
        self._running[number] = running
        return number

    def send(self, number: int, turn: Turn) -> None:
        """See `Host`."""
        self.pool.send(number, _fields(turn))

    def close(self, number: int) -> None:
        """See `Host`."""
        del self._running[number]
        self.pool.close(number)

    def seconds(self, number: int) -> float:
        """See `Host`. In the process that has the episode: one that died does not count."""
        return self.pool.seconds(number)

    def replies(self, timeout_s: float = 0.0) -> list[tuple[int, Reply]]:
        """See `Host`. Raises RolloutError if no process can be started in place of another."""
        try:
            if timeout_s > 0:
                self._wait(timeout_s)
            found = self.pool.poll()
        except WorkerError as error:
            started_for = ""
            if error.number is not None:
                place = self._running[error.number].episode.row.place
                started_for = (
                    f"\nThe process was started in place of one that had ended, for the row at {place}"
                )
            raise RolloutError(f"{self.pool.what}: {error}{started_for}") from None
        replies = []
        for number, received in found:
            reply = self._running[number].take(received)
            replies.append((number, reply))
            if not isinstance(reply, Generate):
                del self._running[number]
                if not received.is_last:
                    self.pool.close(number)
        return replies

    def stop(self) -> None:
        """Kill the workers and the other processes of their sessions."""
        self.pool.stop()

    @spent_on("wait_replies")
    def _wait(self, timeout_s: float) -> None:
        """Wait until something is to be read from a worker that has to reply, or one is over its time."""
        # This wait is limited by the deadlines, not by --hang-timeout.
        watchdog.heartbeat(self.pool.what)
        wait_for_any([self.pool], timeout_s)
        watchdog.heartbeat("")


@dataclass
class _Running:
    """An episode in a worker. arguments: of `Episode` there. asked: what its function asked for, reply by reply."""

    episode: Episode
    arguments: dict[str, Any]
    asked: list[dict[str, Any]] = field(default_factory=list)

    def opening(self) -> dict[str, Any]:
        """Return what a process needs that has not had the episode."""
        turns = [_fields(turn) for turn in self.episode.all_turns]
        return {"episode": self.arguments, "turns": turns, "asked": self.asked[: len(turns)]}

    def take(self, reply: pool.Reply) -> Reply:
        """Take a reply, and what goes with it into the episode; returns it for a `Host`."""
        content = reply.content or {}
        if reply.facts is not None:
            if not _are_rewards(reply.facts, content.get("returned", {}), len(self.episode.rewards)):
                return Failed(NO_ANSWER)
            for index, given in reply.facts["rewards"]:
                self.episode.rewards[index] = given
            self.episode.environment = reply.facts["environment"]
            for unseen in reply.facts["unseen"]:
                self.episode.branches[unseen].drops_last = True
        if asked := content.get("asked"):
            self.asked.append(asked)
            return Generate(**{**asked, "stop": tuple(asked["stop"])})
        if "returned" in content:
            return Ended(content["returned"], content["reason"])
        return Failed(reply.error or content["failed"])


def _arguments(episode: Episode) -> dict[str, Any]:
    """Return what a worker makes its `Episode` of."""
    row = episode.row
    return {
        "row": {"prompt": row.prompt, "columns": dict(row.columns), "place": row.place},
        "seed": episode.seed,
        "max_tokens": episode.max_tokens,
        "tools": episode.tools,
        "prompt_ids": episode.prompt_ids,
        "is_chat": episode.is_chat,
        "temperature": episode.temperature,
        "environment": episode.environment,
    }


def _are_rewards(facts: Mapping[str, Any], returned: Any, num_places: int) -> bool:
    """Whether an episode's facts have rewards, and an environment, as the worker's own code sends them.

    returned: the rewards that the function returned. num_places: of the episode's rewards.
    """
    if not isinstance(facts.get("environment"), dict | None) or not isinstance(returned, dict):
        return False
    try:
        for index, given in facts["rewards"]:
            if type(index) is not int or not 0 <= index < num_places or None in given.values():
                return False
            returned_rewards(given)
        returned_rewards(returned)
    except (InputError, AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


def _fields(turn: Turn) -> dict[str, Any]:
    """A turn for its episode's process."""
    message: dict[str, Any] = {}
    message_error = None
    try:
        message = turn.message
    except InputError as error:  # raised there if the function asks for the message
        message_error = str(error)
    return {
        "ids": turn.ids,
        "logprobs": turn.logprobs,
        "versions": turn.versions,
        "finish_reason": turn.finish_reason,
        "branch": turn.branch,
        "start": turn.start,
        "limit": turn.limit,
        "prompt_ids": turn.prompt_ids,
        "appended": turn.appended,
        "inserted": turn.inserted,
        "text": turn.text,
        "message": message,
        "message_error": message_error,
        "answer": turn.answer,
    }
