"""Read safetensors files lazily, and write them durably."""

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

# Name of a model folder's index file, which lists the weight files.
INDEX = "model.safetensors.index.json"


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a file with `safe_open`. Raises InputError if the file, or a tensor read in the block, is unreadable."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise InputError(
            f"{path} cannot be read as safetensors ({error}); fetch the file again, and {INDEX} if the model has it"
        ) from None


def read_tensor(path: Path, name: str) -> Tensor:
    """Read one tensor from a file. Raises InputError, like `open_tensors`."""
    with open_tensors(path) as file:
        return file.get_tensor(name)


def is_finite(tensor: Tensor) -> bool:
    """Return whether all values of a non-empty tensor are finite.

    Checking only the extremes is ten times as fast as `isfinite().all()`, which allocates a tensor.
    """
    # Both extremes are NaN if any value is NaN.
    lowest, highest = tensor.aminmax()
    return bool(lowest.isfinite() & highest.isfinite())


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, which may be on any device, to a file and sync it to disk.

    GPU tensors and non-contiguous tensors are first copied to host memory. Raises OSError, naming the file.
    """
    host_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with durable.add_path_to_oserror(path):
        path.touch()
        permissions = path.stat().st_mode
        try:
            save_file(host_tensors, path, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error)) from None
        path.chmod(permissions)  # `save_file` makes the file readable only by its owner
        durable.fsync_path(path)
