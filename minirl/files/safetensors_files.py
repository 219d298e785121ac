"""Safetensors files: read lazily, and written one tensor at a time.

The library's own writer needs all tensors in memory at once.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minirl.errors import InputError
from minirl.files import durable
from minirl.files.durable import Digest

# The dtypes of weights that are read and written.
DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
# The dtypes of all tensors that are written.
STORED_DTYPES = DTYPE_NAMES | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def open_tensors(path: Path) -> Any:
    """Open a file with `safe_open`. Raises InputError naming the file if it is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); fetch it again") from None


def nonfinite_tensor(path: Path) -> str | None:
    """The name of a tensor with a value that is not finite, or None. Needs memory for one tensor."""
    with open_tensors(path) as file:
        for name in sorted(file.keys()):
            if not is_finite(file.get_tensor(name)):
                return name
    return None


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite. Ten times as fast as `isfinite().all()`, which allocates a tensor."""
    if tensor.numel() == 0:
        return True
    # Both are NaN if any value is.
    lowest, highest = tensor.aminmax()
    return bool(lowest.isfinite() & highest.isfinite())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Digest:
    """Write a file of these tensors and wait until it is on the disk.

    Needs host memory for one tensor at a time.
    """
    # The format: size of the header (8 bytes, little-endian), header (JSON, padded with spaces to a multiple
    # of 8 bytes), data.
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": STORED_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    num_padding = -len(encoded) % 8
    encoded += b" " * num_padding
    size = len(encoded).to_bytes(8, "little")
    return durable.write_file(path, itertools.chain([size + encoded], raw_bytes(tensors.values())))


def raw_bytes(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    """The bytes of each tensor in a safetensors file."""
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().view(-1)
        yield flat.view(torch.uint8).numpy().data
