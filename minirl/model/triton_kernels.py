"""Where Triton kernels take the place of several kernels of torch, and how they are launched.

Each kernel is in the file of its twin in torch or beside it, and is compiled when it is first used: triton is not
installed everywhere.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def are_used(device: torch.device) -> bool:
    """Whether tensors on `device` go through Triton kernels: everywhere but on the CPU."""
    return device.type != "cpu"


def launch(
    make_kernel: Callable[[], Any], grid: tuple[int, ...], *args: Tensor | int | float, **constants: int
) -> None:
    """Launch the kernel that `make_kernel` returns, with these arguments and compile-time constants.

    A grid without programs launches nothing.
    """
    if 0 not in grid:
        make_kernel()[grid](*args, **constants)
