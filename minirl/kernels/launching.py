"""How Triton kernels are launched. Each is compiled at its first launch."""

from typing import Any

from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], *args: Tensor | int | float, **constants: int) -> None:
    """Launch a kernel with these arguments and compile-time constants; a grid without programs launches nothing."""
    if 0 not in grid:
        kernel[grid](*args, **constants)
