"""Where the kernels of `minirl.kernels` replace operations of torch."""

import torch


def are_used(device: torch.device) -> bool:
    """Return whether tensors on `device` go through Triton kernels: on every device except the CPU."""
    return device.type != "cpu"
