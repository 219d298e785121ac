"""A pool of processes in one gloo group that many tests share."""

import gc
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch

from minirl.episodes.runner import EpisodeRunner
from support.forked import fork, make_pipe
from support.jobs import LIMIT_S


class RankPool:
    """A pool of processes in one gloo group, which run functions."""

    def __init__(self, world_size: int):
        self.num_ranks = world_size
        rendezvous = tempfile.mkdtemp()
        self._pipes, self._processes = [], []
        for rank in range(world_size):
            ours, theirs = make_pipe()
            self._processes.append(fork(_serve, theirs, rank, world_size, rendezvous))
            self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `function(rank, *args)` on all ranks; return the results in rank order. Raises a rank's error."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(LIMIT_S), f"rank {rank} has not answered"
            answers.append(pipe.recv())
        errors = [error for error, _ in answers if error]
        assert not errors, "\n".join(errors)
        return [result for _, result in answers]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()


def wait_for_replies() -> None:
    """Let rounds wait for replies and rewards, which are late on a loaded machine, because tests compare bits."""
    EpisodeRunner.reply_wait_s = 60.0


def _serve(pipe: Any, rank: int, world_size: int, rendezvous: str) -> None:
    torch.set_num_threads(1)
    wait_for_replies()
    store = torch.distributed.FileStore(f"{rendezvous}/store", world_size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    while True:
        function, args = pipe.recv()
        try:
            answer = (None, function(rank, *args))
        except (Exception, SystemExit):  # wrong flags exit
            answer = (f"rank {rank}: {traceback.format_exc()}", None)
        if answer[0] is not None:
            # A reference cycle in the traceback may keep objects of the failed run alive, such as its folder's lock.
            gc.collect()
        pipe.send(answer)
