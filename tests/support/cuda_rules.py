"""CUDA's rules, applied on the CPU."""

from unittest import mock

import torch

from minirl.model import padding


def pad_as_on_cuda() -> mock._patch:
    """A patch under which tensors of the CPU are padded like those of a CUDA device."""
    num_padded = padding.num_padded
    return mock.patch.object(
        padding, "num_padded", lambda rows, device: num_padded(rows, torch.device("cuda"))
    )
