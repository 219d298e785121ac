"""Safetensors files: read lazily, and written through to the disk."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minirl.errors import InputError
from minirl.files import durable

# The dtypes that are read and written.
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def open_tensors(path: Path) -> Any:
    """Open a file with `safe_open`. Raises InputError naming the file if it is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite. Ten times as fast as `isfinite().all()`, which allocates a tensor."""
    if tensor.numel() == 0:
        return True
    # Both are NaN if any value is.
    lowest, highest = tensor.aminmax()
    return bool(lowest.isfinite() & highest.isfinite())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of these tensors, on any device, and wait until it is on the disk.

    Needs host memory for two copies of them. Raises OSError naming the file.
    """
    # Copies, as the format has no tensors that share storage.
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    with durable.new_file(path) as file:
        file.write(safetensors.torch.save(copies, metadata={"format": "pt"}))
