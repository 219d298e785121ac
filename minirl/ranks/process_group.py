"""The process group, with one process per rank: how it starts, and the collectives on host values.

Under torchrun the ranks come from its environment variables; otherwise this process is the only rank. Every
rank runs the same script.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.errors import refuse
from minirl.ranks import launch
from minirl.ranks.time_account import spent_on

# Compute capability of Ampere, the oldest GPUs used. Those before it have no bf16 products, and neither flash-attn nor
# torch's varlen kernel runs there.
OLDEST_CAPABILITY = (8, 0)
# Variables with which the user may have set torch's CUDA allocator: the present name, and the older one.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def start(*, shares_cores: bool = False, hang_timeout: float = 1800.0) -> torch.device:
    """Join the process group and return this rank's device. All ranks call it (collective).

    shares_cores: on CUDA, the CPU computes on this rank's share of the cores; else on one thread. On the CPU it is
    always one: with more, matrix products are not batch-invariant (`minirl.model.batch_invariance`).

    hang_timeout: seconds after which a collective fails that some rank has not come to.

    CUDA's allocator gets expandable segments, so that memory freed by one phase can hold a larger block of the next,
    unless ALLOCATOR_SETTINGS say otherwise; and sums of bf16 products stay in fp32.

    Raises InputError for an unusable device, and torch's DistError if another rank does not come.
    """
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"  # torch reads it when CUDA starts
    use_cuda = device_type() == "cuda"
    num_cores = len(os.sched_getaffinity(0)) // world_size()
    torch.set_num_threads(max(1, num_cores) if use_cuda and shares_cores else 1)
    if use_cuda:
        torch.cuda.set_device(rank())
        # Otherwise products summed in parts are rounded to bf16 in between, by shape: errors of 3e-3 instead of 3e-5.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    timeout = timedelta(seconds=hang_timeout)
    if not dist.is_initialized():
        store = launch.rendezvous()
        store.set_timeout(timeout)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if use_cuda else "gloo",
            timeout=timeout,
            store=store,
            rank=rank(),
            world_size=world_size(),
        )
    return torch.device("cuda", rank()) if use_cuda else torch.device("cpu")


def device_type() -> str:
    """ "cuda" where torch sees a device, else "cpu": CUDA_VISIBLE_DEVICES= (empty) hides all.

    Not collective. Raises InputError for CUDA if the ranks cannot each use a device.
    """
    num_devices = torch.cuda.device_count()
    if not num_devices:
        return "cpu"
    refuse(
        world_size() > num_devices,
        f"{world_size()} ranks, and torch sees {num_devices} CUDA device(s): use "
        f"--nproc-per-node {num_devices}, or CUDA_VISIBLE_DEVICES= for the CPU",
    )
    found = torch.cuda.get_device_capability(rank())
    refuse(
        found < OLDEST_CAPABILITY,
        f"CUDA device {rank()} has compute capability {found}, and at least {OLDEST_CAPABILITY} (Ampere) is "
        "needed: leave it out by CUDA_VISIBLE_DEVICES",
    )
    return "cuda"


def stop_requested() -> int:
    """The number of the signal that asked any rank to stop, or 0. Called at the end of a step (collective).

    All ranks get the same number, so that they stop after the same step.
    """
    return max(gather_objects(launch.this_process.stop_signal))


def rank() -> int:
    """This process's rank. Before `start`, torchrun's, or 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """The number of ranks. Before `start`, torchrun's, or 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def print0(*parts: Any) -> None:
    """Print on rank 0 and flush; output that cannot be written stops no run. Not collective.

    When the reader of the output has gone (as in `| head`), this and all later output is dropped. On a full disk
    the last lines are written with later output, once there is room.
    """
    if rank() != 0:
        return
    try:
        print(*parts, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", errors="replace")  # noqa: SIM115, it stays open
    except OSError:  # a full disk, a terminal that has gone
        pass


def broadcast_object(value: Any) -> Any:
    """Rank 0's value, on every rank (collective)."""
    return gather_objects(value)[0]


@spent_on("wait_ranks")
def gather_objects(value: Any) -> list[Any]:
    """Every rank's value in rank order, on every rank (collective).

    A process that has not joined the process group, as in a notebook, is alone.
    """
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


@spent_on("wait_ranks")
def barrier() -> None:
    """Wait for all ranks (collective)."""
    dist.barrier()


@spent_on("wait_ranks")
def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum a host tensor over the ranks, in place (collective)."""
    dist.all_reduce(values)
    return values
