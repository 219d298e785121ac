"""Safetensors files: read lazily, and written through to the disk."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minirl.errors import InputError
from minirl.files import durable

# The file that names the shards of a model's folder.
INDEX = "model.safetensors.index.json"


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file with `safe_open`. Raises InputError, also in the block, for a file or tensor that cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path}: cannot be read as safetensors ({error}); fetch it again, with {INDEX} if it has one"
        ) from None


def read_tensor(path: Path, name: str) -> Tensor:
    """Read a tensor of a file. Raises like `open_tensors`."""
    with open_tensors(path) as file:
        return file.get_tensor(name)


def is_finite(tensor: Tensor) -> bool:
    """Return whether every value is finite; there must be one.

    Ten times as fast as `isfinite().all()`, which allocates a tensor.
    """
    # Both are NaN if any value is.
    lowest, highest = tensor.aminmax()
    return bool(lowest.isfinite() & highest.isfinite())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file of these tensors, on any device, and wait until it is on the disk.

    The host takes a copy of those that are on a GPU or not contiguous. Raises OSError naming the file.
    """
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with durable.add_path_to_oserror(path):
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(whole, path, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from None
        path.chmod(mode)  # `save_file` lets only the owner read it
        durable.fsync_path(path)
