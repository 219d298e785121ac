"""Copy several host tensors to the device in one transfer.

Even the smallest transfer costs the host some microseconds, and a decode step has about ten small tensors.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from minirl.model.attention import upload

ALIGNMENT = 16  # bytes; a view needs its element size, a kernel's wide loads need 16


def upload_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on `device`, without waiting for it. On the CPU they are returned as they are."""
    if device.type == "cpu":
        return list(tensors)
    return unpack(upload(pack(tensors), device), tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of host tensors end to end, each from an aligned address: uint8 [bytes]."""
    streams = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
    return torch.cat([F.pad(stream, (0, -len(stream) % ALIGNMENT)) for stream in streams])


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split the bytes that `pack` made into views with the shapes and dtypes of these tensors."""
    sizes = [tensor.nbytes + -tensor.nbytes % ALIGNMENT for tensor in tensors]
    return [
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(packed.split(sizes), tensors, strict=True)
    ]
