"""Measure the memory of tensors in a call, and describe workloads for the tests of the memory budget."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from minirl.model.config import ModelConfig
from minirl.run.budget import Workload


def peak_bytes(function: Callable[[], Any]) -> int:
    """Return the peak number of bytes that a call allocates on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    assert profiler.profiler is not None
    kineto = profiler.profiler.kineto_results
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    allocated = 0
    peak = 0
    for event in events:
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


def saved_bytes(model: nn.Module, function: Callable[[], Any]) -> int:
    """Return the bytes that a forward call saves for backward, without parameters. Works on any device, even meta."""
    parameters = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    saved: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    own = [tensor for storage, tensor in saved.items() if storage not in parameters]
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in own)


def make_workload(policy: ModelConfig, num_ranks: int = 1, **changes: Any) -> Workload:
    """Return a GRPO workload on 80 GB GPUs in bf16: 128 x 8 completions of 512 tokens, prompts of 300 tokens."""
    num_prompts = 128 // num_ranks
    asked = {
        "device_type": "cuda",
        "free_bytes": 80e9,
        "dtype": torch.bfloat16,
        "trained_models": [policy],
        "frozen_models": {},
        "max_sequence_tokens": 812,
        "default_microbatch_tokens": 8192,
        "step_tokens": num_prompts * 8 * 812,
        "num_requests": num_prompts * 9,
    }
    return Workload(num_ranks=num_ranks, **asked | changes)
