"""An engine whose model a group of ranks holds by slices: the first rank leads, the others follow.

Everything that depends on a clock runs on the leader alone: rollout functions, workers, rewards, budgets. An engine's
state depends only on the calls that change it and the tokens that it samples. So the leader records its calls and sends
them with each step, and the followers repeat them. They sample the same tokens; a checksum of finished rollouts goes
along.
"""

import functools
import zlib
from typing import Any

import torch
import torch.distributed as dist

from minirl.errors import GuardError
from minirl.generation.engine import Engine
from minirl.generation.engine_stats import EngineStats
from minirl.ranks.time_account import spent_on
from minirl.rollouts import Rollout

# A method's name and its arguments.
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _recorded(method: Any) -> Any:
    """The same method, whose calls the leader sends to its followers."""

    @functools.wraps(method)
    def call(engine: "GroupEngine", *args: Any, **options: Any) -> Any:
        result = method(engine, *args, **options)
        if engine.leads:
            engine.calls.append((method.__name__, args, options))
        return result

    return call


class GroupEngine(Engine):
    """The engine of one rank of a group. The leader uses it like any other; followers only call `sync`.

    A follower returns no rollouts and counts no work.
    """

    def __init__(self, *args: Any, group: dist.ProcessGroup, **options: Any):
        """group: the ranks that hold the model's slices, for messages between their hosts.

        The other arguments are `Engine`'s.
        """
        super().__init__(*args, **options)
        self.leads = dist.get_rank(group) == 0
        self._group = group
        self._leader = dist.get_global_rank(group, 0)
        # The leader's calls since its last message.
        self.calls: list[Call] = []
        self._checksum = 0

    submit = _recorded(Engine.submit)
    release = _recorded(Engine.release)

    def step(self) -> list[Rollout]:
        """`Engine.step`, which the followers repeat (collective in the group, unless there is nothing to do)."""
        if self.leads and self.is_decoding:
            self._send(is_step=True)
        rollouts = super().step()
        for rollout in rollouts:
            for stream in (rollout.tokens, rollout.sample_logprobs):
                self._checksum = zlib.crc32(stream.numpy().tobytes(), self._checksum)
        return rollouts

    def sync(self) -> None:
        """On the leader: update the followers' engines. On a follower: repeat the leader's calls until it does.

        Collective in the group. Raises GuardError on a follower that sampled other tokens than its leader.
        """
        if self.leads:
            self._send(is_step=False)
            return
        is_step = True
        while is_step:
            checksum, is_step, calls = self._receive()
            if checksum != self._checksum:
                raise GuardError(
                    f"this rank sampled other tokens than rank {self._leader}, which leads it: their devices compute "
                    "different bits; use --decode-group 1"
                )
            for name, args, options in calls:
                getattr(self, name)(*args, **options)
            if is_step:
                self.step()

    def take_stats(self) -> EngineStats:
        stats = super().take_stats()
        return stats if self.leads else EngineStats()

    def _send(self, *, is_step: bool) -> None:
        """Send the calls since the last message, and whether a step follows them."""
        calls, self.calls = self.calls, []
        # Most steps have no calls, and send these numbers alone.
        header = torch.tensor([self._checksum, is_step, bool(calls)])
        dist.broadcast(header, self._leader, self._group)
        if calls:
            dist.broadcast_object_list([calls], self._leader, self._group)

    @spent_on("wait_ranks")
    def _receive(self) -> tuple[int, bool, list[Call]]:
        """The leader's checksum before its next calls, whether a step follows them, and the calls."""
        header = torch.empty(3, dtype=torch.int64)
        dist.broadcast(header, self._leader, self._group)
        checksum, is_step, has_calls = header.tolist()
        received: list[Any] = [[]]
        if has_calls:
            dist.broadcast_object_list(received, self._leader, self._group)
        return checksum, bool(is_step), received[0]
