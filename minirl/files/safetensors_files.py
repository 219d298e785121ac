"""Safetensors files: read lazily, and written one tensor at a time.

The library's own writer needs all tensors on the host, and only the owner can read its files.
"""

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from minirl.errors import InputError
from minirl.files import durable

# The dtypes that parameters are read from.
FLOAT_DTYPES = ("F32", "BF16", "F16", "F64")


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file with `safe_open`. Raises InputError naming it if it, or a tensor that the block reads, is corrupt."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors ({error}); fetch it again") from None


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite. Ten times as fast as `isfinite().all()`, which allocates a tensor."""
    if tensor.numel() == 0:
        return True
    # Both are NaN if any value is.
    lowest, highest = tensor.aminmax()
    return bool(lowest.isfinite() & highest.isfinite())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of these tensors, on any device, and wait until it is on the disk.

    Needs host memory for one tensor at a time. Raises OSError naming the file.
    """
    # The format: size of the header (8 bytes, little-endian), header (JSON, padded with spaces to a multiple
    # of 8 bytes), data.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        dtype, num_packed = _stored_form(tensor.dtype)
        shape = [*tensor.shape[:-1], *(size * num_packed for size in tensor.shape[-1:])]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with durable.new_file(path) as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            flat = tensor.detach().cpu().contiguous().view(-1)
            file.write(flat.view(torch.uint8).numpy().data)


@functools.cache
def _stored_form(dtype: torch.dtype) -> tuple[str, int]:
    """Return the library's name for a dtype, and the number of values that it counts in one element of torch's."""
    encoded = save({"": torch.empty(1, dtype=dtype)})
    end = 8 + int.from_bytes(encoded[:8], "little")
    entry = json.loads(encoded[8:end])[""]
    return entry["dtype"], entry["shape"][0]
