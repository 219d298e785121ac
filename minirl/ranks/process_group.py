"""The process group, with one process per rank: start and stop it, and the collectives on host values.

Under torchrun the ranks come from its environment variables; otherwise this process is the only rank. Every
rank runs the same script.
"""

import contextlib
import os
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.errors import InputError
from minirl.ranks import watchdog

JOIN_S = 1800.0  # between the first rank and the last that joins the process group: they have read the data by then


def start(*, device: str = "auto", threads: int = 1, hang_timeout: float | None = None) -> torch.device:
    """Join the process group and return this rank's device. All ranks call it (collective).

    device: "cpu", "cuda" or "auto" (cuda if there is a CUDA device). threads: CPU threads of one operation on
    this rank; with more than one, CPU matrix products are not batch-invariant
    (`minirl.model.batch_invariance`).

    hang_timeout: seconds without progress on any rank after which the watchdog ends the run; 0: never. None:
    the run has no watchdog (`watchdog.run`), and collectives have torch's own timeout. With a watchdog, which
    knows a hang from a slow rank, collectives wait up to a day.

    Raises InputError for a device that does not exist, and torch's DistStoreError if another rank does not come
    within JOIN_S.
    """
    use_cuda = device_type(device) == "cuda"
    torch.set_num_threads(threads)
    if use_cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    watchdog.this_process.hang_timeout = hang_timeout or 0.0
    if not dist.is_initialized():
        store = watchdog.rendezvous()
        # init_process_group would wait for a rank that has died as long as collectives do.
        store.set(f"joins/{rank()}", "")
        store.wait([f"joins/{other}" for other in range(world_size())], timedelta(seconds=JOIN_S))
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if use_cuda else "gloo",
            timeout=None if hang_timeout is None else timedelta(days=1),
            store=store,
            rank=rank(),
            world_size=world_size(),
        )
    if use_cuda:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def device_type(device: str) -> str:
    """ "cpu" or "cuda", for `start`'s argument. Not collective. Raises InputError for a device that does not exist."""
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"--device {device}: choose auto, cpu or cuda")
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise InputError("--device cuda: torch sees no CUDA device; use --device cpu or auto")
    return "cuda" if has_cuda and device != "cpu" else "cpu"


def stop() -> NoReturn:
    """Wait for all ranks and end the process with exit code 0 (collective).

    For scripts that do not use `watchdog.run`.
    """
    dist.barrier()
    watchdog.leave_now(0)


def stop_requested() -> int:
    """The number of the signal that asked any rank to stop, or 0. Called at the end of a step (collective).

    All ranks get the same number, so that they stop after the same step.
    """
    number = torch.tensor(watchdog.this_process.stop_signal)
    dist.all_reduce(number, dist.ReduceOp.MAX)
    return int(number)


def rank() -> int:
    """This process's rank. Before `start`, torchrun's, or 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def has_joined() -> bool:
    """Whether this process is in the process group, so that it can communicate."""
    return dist.is_initialized()


def world_size() -> int:
    """The number of ranks. Before `start`, torchrun's, or 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def launcher() -> str:
    """A name of the torchrun that started this process, which no other has; "" without torchrun. Not collective.

    It stays the same when torchrun restarts its ranks (--max-restarts): run id, host, process and its start.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    torchrun = os.getppid()
    started = ""
    with contextlib.suppress(OSError):  # no /proc
        started = Path(f"/proc/{torchrun}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{os.environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {torchrun} {started}".rstrip()


def print0(*parts: Any) -> None:
    """Print on rank 0, as `print_here`. Not collective."""
    if rank() == 0:
        print_here(*parts)


def print_here(*parts: Any) -> None:
    """Print on this rank and flush; output that cannot be written stops no run. Not collective.

    When the reader of the output has gone (as in `| head`), this and all later output is dropped. On a full disk
    the last lines are written with later output, once there is room.
    """
    try:
        print(*parts, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", errors="replace")  # noqa: SIM115, it stays open
    except OSError:  # a full disk, a terminal that has gone
        pass


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
    """Concatenate the ranks' host tensors [n_r, ...] along dimension 0, in rank order (collective).

    n_r may differ between ranks and may be 0; the other dimensions and the dtype are the same.
    """
    counts = torch.zeros(world_size(), dtype=torch.int64)
    counts[rank()] = len(rows)
    dist.all_reduce(counts)
    # all_gather needs the same shape from every rank: send zeros up to the largest count, and drop them
    # afterwards.
    padded = rows.new_zeros(int(counts.max()), *rows.shape[1:])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in range(world_size())]
    dist.all_gather(gathered, padded)
    return torch.cat([part[:count] for part, count in zip(gathered, counts.tolist(), strict=True)])


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum a host tensor over the ranks, in place (collective)."""
    dist.all_reduce(values)
    return values
