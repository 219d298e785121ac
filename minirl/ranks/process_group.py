"""The process group, with one process per rank: how it starts, and the collectives on host values.

Under torchrun the ranks come from its environment variables; otherwise this process is the only rank. Every
rank runs the same script.
"""

import os
import socket
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


def start(
    *, shares_cores: bool = False, hang_timeout: float = 1800.0, may_use_cpu: bool = False
) -> torch.device:
    """Join the process group and return this rank's device. All ranks call it (collective).

    shares_cores: on CUDA, the CPU computes on this rank's share of the cores; else on one thread. On the CPU it is
    always one: with more, matrix products are not batch-invariant (`minirl.model.batch_invariance`).

    hang_timeout: seconds after which a collective fails that some rank has not come to. may_use_cpu: see
    `select_device`.

    CUDA's allocator gets expandable segments, so that memory freed by one phase can hold a larger block of the next,
    unless ALLOCATOR_SETTINGS say otherwise; and sums of bf16 products stay in fp32.

    Raises InputError for an unusable device, for --max-restarts on several nodes, and on all ranks if their devices or
    command lines differ; torch's DistError if another rank does not come.
    """
    refuse(
        local_world_size() < world_size() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
        "--max-restarts: works on one node only, as each node's torchrun counts its own restarts; instead start all "
        "nodes again with the same --run-name",
    )
    if os.environ.keys().isdisjoint(ALLOCATOR_SETTINGS):
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"  # torch reads it when CUDA starts
    device = select_device(may_use_cpu=may_use_cpu)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if shares_cores:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size()))
        # Otherwise products summed in parts are rounded to bf16 in between, by shape: errors of 3e-3 instead of 3e-5.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    if not dist.is_initialized():
        timeout = timedelta(seconds=hang_timeout)
        store = launch.rendezvous()
        store.set_timeout(timeout)
        dist.init_process_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timeout,
            store=store,
            rank=rank(),
            world_size=world_size(),
        )
    require_same((device.type, sys.argv), "the command line, and the kind of device,")
    return device


def select_device(*, may_use_cpu: bool) -> torch.device:
    """The CUDA device of this rank, or the CPU where torch sees none: CUDA_VISIBLE_DEVICES= (empty) hides all.

    may_use_cpu: if this node has more ranks than devices, hide these and print a line that says so. Not collective.
    Raises InputError if the ranks cannot each use a CUDA device.
    """
    num_devices = torch.cuda.device_count()
    if num_devices < local_world_size():
        if num_devices:
            fault = f"{local_world_size()} ranks on a node where torch sees {num_devices} CUDA device(s)"
            refuse(
                not may_use_cpu,
                f"{fault}: use --nproc-per-node {num_devices}, or CUDA_VISIBLE_DEVICES= for the CPU",
            )
            print0(f"{fault}: the ranks compute on the CPU")
            # FSDP would make a second process group, with NCCL, if it saw a device.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", rank()))
    found = torch.cuda.get_device_capability(index)
    refuse(
        found < OLDEST_CAPABILITY,
        f"CUDA device {index} has compute capability {found}, and at least {OLDEST_CAPABILITY} (Ampere) is "
        "needed: leave it out by CUDA_VISIBLE_DEVICES",
    )
    return torch.device("cuda", index)


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


def local_world_size() -> int:
    """The number of ranks on this node, by torchrun; without torchrun all ranks are on one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


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


def require_same(value: Any, what: str) -> None:
    """Raise InputError on every rank, naming `what` and two nodes, unless all have the same value (collective)."""
    for other, node in gather_objects((value, socket.gethostname())):
        refuse(
            other != value,
            f"{what} must be the same on all nodes, and differs between {node} and {socket.gethostname()}",
        )


@spent_on("wait_ranks")
def barrier() -> None:
    """Wait for all ranks (collective)."""
    dist.barrier()


@spent_on("wait_ranks")
def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum a host tensor over the ranks, in place (collective)."""
    dist.all_reduce(values)
    return values
