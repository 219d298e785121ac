"""Copy several host tensors to the device in one transfer.

Even the smallest transfer costs the host some microseconds, and a decode step has about ten small tensors.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; a view needs its element size, a kernel's wide loads need 16


def upload_together(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Return the tensors on `device`, without waiting for it. On the CPU they are returned as they are."""
    if device.type == "cpu":
        return list(tensors)
    packed = pack(tensors, pin_memory=device.type == "cuda")
    return unpack(packed.to(device, non_blocking=True), tensors)


def pack(tensors: Sequence[Tensor], *, pin_memory: bool) -> Tensor:
    """The bytes of host tensors end to end, each from an aligned address: uint8 [bytes]."""
    sizes = [_aligned_size(tensor) for tensor in tensors]
    packed = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pin_memory)
    for target, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        target.copy_(tensor)
    return packed


def unpack(packed: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Split the bytes that `pack` made into views with the shapes and dtypes of these tensors."""
    views = []
    start = 0
    for tensor in tensors:
        part = packed[start : start + tensor.nbytes]
        views.append(part.view(tensor.dtype).view(tensor.shape))
        start += _aligned_size(tensor)
    return views


def _aligned_size(tensor: Tensor) -> int:
    return tensor.nbytes + -tensor.nbytes % ALIGNMENT
