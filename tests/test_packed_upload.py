"""One transfer of several tensors gives each of them back."""

import pytest
import torch

from minirl.generation.packed_upload import ALIGNMENT, pack, unpack, upload_together

TENSORS = [
    torch.arange(5),
    torch.rand(3),
    torch.randint(100, (3, 7), dtype=torch.int32),
    torch.rand(4, 9)[:, 2:5],
    torch.zeros(0, dtype=torch.int64),
    torch.tensor([True]),
    torch.rand(2, dtype=torch.float64),
]


@pytest.mark.parametrize("first", range(len(TENSORS)))
def test_packed_tensors_are_what_was_packed(first):
    """Of any dtype, shape and stride, in any order, each at an aligned address."""
    tensors = TENSORS[first:] + TENSORS[:first]
    views = unpack(pack(tensors), tensors)
    for view, tensor in zip(views, tensors, strict=True):
        assert view.dtype == tensor.dtype
        assert torch.equal(view, tensor)
        assert view.storage_offset() * view.element_size() % ALIGNMENT == 0


def test_on_the_cpu_nothing_is_copied():
    uploaded = upload_together(TENSORS, torch.device("cpu"))
    assert all(got is tensor for got, tensor in zip(uploaded, TENSORS, strict=True))
