"""The one process group, from torchrun's variables or of a single process. Every rank runs the same script."""

import os
import sys
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.errors import InputError
from minirl.ranks import watchdog


def start(*, device: str = "auto", threads: int = 1, hang_timeout: float | None = None) -> torch.device:
    """Join the process group and return this rank's device. All ranks call it (collective).

    device: "cpu", "cuda" or "auto" (cuda where there is one). threads: intra-op CPU threads of this rank; with more
    than one, CPU products are not batch-invariant (`numerics`). hang_timeout: seconds without progress on any rank after
    which `watchdog.run` ends the run, 0: never; collectives then wait for a slow rank up to a day, without it as long as
    torch lets them. Raises InputError for a device that is not there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device}: choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA device; use --device cpu or auto")
    torch.set_num_threads(threads)
    use_cuda = device != "cpu" and torch.cuda.is_available()
    backend = "cpu:gloo,cuda:nccl" if use_cuda else "gloo"
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    watchdog.this_process.hang_timeout = hang_timeout or 0.0
    patience = None if hang_timeout is None else timedelta(days=1)
    if not dist.is_initialized():
        store, num_ranks = watchdog.rendezvous(), world_size()
        dist.init_process_group(backend, timeout=patience, world_size=num_ranks, rank=rank(), store=store)
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


def stop() -> NoReturn:
    """Wait for all ranks and end the process with exit code 0 (collective): for scripts without `watchdog.run`."""
    dist.barrier()
    watchdog.leave_now(0)


def stop_requested() -> int:
    """The signal by which a rank was asked to stop, or 0; the same on all ranks (collective), for the end of a step."""
    number = torch.tensor(watchdog.this_process.stop_signal)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def rank() -> int:
    """This process's rank; 0 before `start`."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of ranks; 1 before `start`."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def print0(*parts: Any) -> None:
    """Print on rank 0, at once; nowhere from when on the reader has gone (`| head`)."""
    if rank() == 0:
        try:
            print(*parts, flush=True)
        except BrokenPipeError:
            sys.stdout = open(os.devnull, "w", errors="replace")  # noqa: SIM115, it stays open


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank (collective)."""
    values = [value]
    dist.broadcast_object_list(values)
    return values[0]


def gather_objects(value: Any) -> list[Any]:
    """Every rank's value in rank order, on every rank (collective)."""
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def barrier() -> None:
    """Wait for all ranks (collective)."""
    dist.barrier()


def all_gather_rows(rows: Tensor) -> Tensor:
    """The ranks' host tensors [n_r, ...] end to end in rank order; n_r may differ or be 0 (collective)."""
    counts = torch.zeros(world_size(), dtype=torch.int64)
    counts[rank()] = len(rows)
    dist.all_reduce(counts)
    padded = rows.new_zeros(int(counts.max()), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts.tolist(), strict=True)])


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum of a host tensor over the ranks, in place (collective)."""
    dist.all_reduce(values)
    return values
