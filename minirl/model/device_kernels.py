"""Where the kernels of `minirl.kernels` replace operations of torch."""

import torch


def are_used(device: torch.device) -> bool:
    """Whether tensors on `device` go through Triton kernels: everywhere but on the CPU."""
    return device.type != "cpu"
