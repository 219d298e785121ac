"""How Triton kernels are launched.

Each is compiled at its first launch, and its file imports triton only then: not every machine has it.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor


def launch(
    make_kernel: Callable[[], Any], grid: tuple[int, ...], *args: Tensor | int | float, **constants: int
) -> None:
    """Launch the kernel that `make_kernel` returns, with these arguments and compile-time constants.

    A grid without programs launches nothing.
    """
    if 0 not in grid:
        make_kernel()[grid](*args, **constants)
