"""Budgets of a decode step's and a microbatch's launches, waits and moved bytes on CUDA, counted on meta tensors."""

import importlib

import pytest
import torch

from minirl.model.config import Adapters
from support.scripts import ROOT


@pytest.fixture(scope="module")
def launches():
    """The benchmark that counts."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("launches")


@pytest.fixture(scope="module")
def model(launches):
    """0.5B parameters, 24 layers."""
    return launches.make_model("qwen2.5-0.5b")


def test_a_decode_step_stays_within_its_budget(launches, model):
    """At most 750 launches, 7.3 GB and no wait for 256 requests."""
    counts = launches.decode_counts(model)
    assert counts.launches <= 750
    assert counts.waits == 0
    assert counts.bytes <= 7.3e9


def test_a_microbatch_stays_within_its_budget(launches, model):
    """At most two waits, with the metrics; 8,192 of its rows go through the head."""
    counts = launches.microbatch_counts(model)
    assert counts.waits <= 2
    assert counts.launches <= 4300
    assert counts.bytes <= 320e9


@pytest.mark.slow
def test_adapters_launch_two_kernels_a_layer_more_and_write_no_second_product(launches):
    """7B, with adapters on all 7 linear layers of 24 layers."""
    base = launches.make_model("qwen2.5-7b")
    model = launches.make_model("qwen2.5-7b", Adapters(16))
    alone, counts = launches.decode_counts(base), launches.decode_counts(model)
    assert counts.launches == alone.launches + 2 * 7 * 24
    assert counts.waits == 0
    assert counts.bytes <= 1.08 * alone.bytes
    alone, counts = launches.microbatch_counts(base), launches.microbatch_counts(model)
    assert counts.waits == alone.waits
    assert counts.launches <= alone.launches + 930


def test_what_makes_the_host_wait_is_counted(launches):
    """A number that is read, a mask as an index, and copies: the counter sees each, and no false wait."""
    x = torch.ones(launches.PROMPT_LENGTH + launches.COMPLETION_LENGTH, device="meta")
    for wait in (
        lambda: float(x.sum()),
        lambda: x[x > 0],
        lambda: x.nonzero(),
        lambda: x.cpu(),
        lambda: torch.ones(3).to("meta"),
        lambda: x.copy_(torch.ones(len(x))),
        lambda: x[torch.arange(3)],
    ):
        with launches.counting() as counts:
            wait()
        assert counts.waits == 1
    with launches.counting() as counts:
        (x[:3] + x.long()[:3].sum()).view(3, 1).expand(3, 2).clone()
        torch.ones(3).to("meta", non_blocking=True)
    assert counts.waits == 0
    assert counts.launches == 5  # a copy to int64, a sum, an addition, a clone, an upload
