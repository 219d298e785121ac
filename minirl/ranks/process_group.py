"""Start the process group, choose each rank's device, and run collectives on host values.

torchrun's environment variables define the ranks; without torchrun, this process is the only rank. Every rank runs the
same script.
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

# Compute capability of Ampere, the oldest supported GPU generation. Older GPUs have no bf16 matmuls, and neither
# flash-attn nor torch's varlen kernel supports them.
OLDEST_CAPABILITY = (8, 0)
# Environment variables that configure torch's CUDA allocator: the current name and the older name.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def start(
    *, shares_cores: bool = False, hang_timeout: float = 1800.0, may_use_cpu: bool = False
) -> torch.device:
    """Join the process group and return this rank's device (collective).

    shares_cores: whether each rank on CUDA gets an equal share of the CPU cores instead of one thread. On the CPU,
    every rank uses one thread, because matmuls on more threads are not batch-invariant
    (`minirl.model.batch_invariance`).

    hang_timeout: time (s) after which a collective fails if a rank has not arrived. may_use_cpu: see `select_device`.

    Unless one of ALLOCATOR_SETTINGS is set, the CUDA allocator uses expandable segments, so that memory freed by one
    phase can hold larger blocks in the next phase. bf16 matmuls accumulate in fp32.

    Raises InputError if the device is unusable, if --max-restarts is used on several nodes, or (on all ranks) if the
    ranks' device types or command lines differ. Raises torch's DistError if another rank does not arrive.
    """
    refuse(
        local_world_size() < world_size() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0",
        "--max-restarts: works only on one node, because each node's torchrun counts restarts separately; instead, "
        "start all nodes again with the same --run-name",
    )
    if os.environ.keys().isdisjoint(ALLOCATOR_SETTINGS):
        # torch reads the variable when CUDA is initialized.
        os.environ[ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"
    device = select_device(may_use_cpu=may_use_cpu)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if shares_cores:
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size()))
        # Otherwise, for some shapes, split-k matmuls round partial sums to bf16, with errors of 3e-3 instead of 3e-5.
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
    require_same((device.type, sys.argv), "the command line and the device type")
    return device


def select_device(*, may_use_cpu: bool) -> torch.device:
    """Return this rank's CUDA device, or the CPU if torch sees none. An empty CUDA_VISIBLE_DEVICES hides all devices.

    may_use_cpu: whether to hide the devices and print a note if this node has more ranks than devices.
    Not collective. Raises InputError if the ranks cannot each use a CUDA device.
    """
    num_devices = torch.cuda.device_count()
    if num_devices < local_world_size():
        if num_devices:
            shortage_message = (
                f"{local_world_size()} ranks on a node where torch sees {num_devices} CUDA device(s)"
            )
            refuse(
                not may_use_cpu,
                f"{shortage_message}: use --nproc-per-node {num_devices}, or set CUDA_VISIBLE_DEVICES= (empty) to run "
                "on the CPU",
            )
            print0(f"{shortage_message}: the ranks run on the CPU")
            # If FSDP saw a device, it would create a second process group with NCCL.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return torch.device("cpu")
    index = int(os.environ.get("LOCAL_RANK", rank()))
    capability = torch.cuda.get_device_capability(index)
    refuse(
        capability < OLDEST_CAPABILITY,
        f"CUDA device {index} has compute capability {capability}, but {OLDEST_CAPABILITY} (Ampere) or newer is "
        "required: exclude it with CUDA_VISIBLE_DEVICES",
    )
    return torch.device("cuda", index)


def stop_requested() -> int:
    """Return the number of the signal that requested a stop on any rank, or 0 (collective, at the end of a step).

    All ranks get the same number and therefore stop after the same step.
    """
    return max(gather_objects(launch.this_process.stop_signal))


def rank() -> int:
    """Return this process's rank. Before `start`, this is torchrun's rank, or 0 without torchrun."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Return the number of ranks. Before `start`, this is torchrun's world size, or 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def local_world_size() -> int:
    """Return the number of ranks on this node according to torchrun; without torchrun, all ranks share one node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size()))


def print0(*parts: Any) -> None:
    """Print on rank 0 and flush; a failed write never stops the run. Not collective.

    After a broken pipe (as with `| head`), the current and all later output is dropped. If the disk is full, pending
    lines are kept and written with later output, once there is room.
    """
    if rank() != 0:
        return
    try:
        print(*parts, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", errors="replace")  # noqa: SIM115, it stays open
    except OSError:  # a full disk or a closed terminal
        pass


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank (collective)."""
    return gather_objects(value)[0]


@spent_on("wait_ranks")
def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value, in rank order, on every rank (collective).

    A single rank, or a process without a process group (as in a notebook), gets the value itself, not a
    copy.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def require_same(value: Any, what: str) -> None:
    """Raise InputError on every rank, naming `what` and two nodes, unless all values are equal (collective)."""
    for other, node in gather_objects((value, socket.gethostname())):
        refuse(
            other != value,
            f"{what} must be the same on all ranks, but ranks on {node} and {socket.gethostname()} disagree",
        )


@spent_on("wait_ranks")
def barrier() -> None:
    """Wait for all ranks (collective)."""
    dist.barrier()


@spent_on("wait_ranks")
def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum a tensor across ranks, in place (collective)."""
    dist.all_reduce(values)
    return values
