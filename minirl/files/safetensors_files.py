"""Safetensors files: written one tensor at a time (the library's writer wants all of them in memory), read lazily."""

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

_DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}


def open_tensors(path: Path) -> Any:
    """`safe_open` of a file. Raises InputError naming one that is missing or cut off."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: no whole safetensors file ({error}); fetch it again") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Digest:
    """Write a file of these tensors through to the disk. Peak memory is one of them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    start_of_file = len(encoded).to_bytes(8, "little") + encoded
    return durable.write_file(path, itertools.chain([start_of_file], _raw_bytes(tensors.values())))


def _raw_bytes(tensors: Iterable[Tensor]) -> Iterator[memoryview]:
    for tensor in tensors:
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
