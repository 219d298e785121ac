"""The peak of tensors in a piece of code, and the bytes that docs/memory.md gives."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

from minirl.model.config import ModelConfig
from minirl.plan.workload import Workload

PAGE = (Path(__file__).parent.parent.parent / "docs" / "memory.md").read_text()


def formula(row: str, **sizes: float) -> float:
    """The value of the formula in the table's row that begins with `row`, by the letters of the page."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {row} |")]
    text = re.split(r"[;a-z]|\([a-z]", line.split("|")[2])[0].strip()
    assert re.fullmatch(r"[A-Z0-9 .+*/()-]+", text), text
    product = re.sub(r"(?<=[A-Z0-9)]) (?=[A-Z0-9(])", " * ", text)
    return eval(product, {}, sizes)


def allocated_bytes(function: Callable[[], Any]) -> tuple[int, int]:
    """The most bytes that a call adds to those before it, and how many of them stay. On the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    assert profiler.profiler is not None
    kineto = profiler.profiler.kineto_results
    events = [event for event in kineto.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    allocated = 0
    peak = 0
    for event in events:
        allocated += event.nbytes()
        peak = max(peak, allocated)
    del result  # until here it counts
    return peak, allocated


def saved_bytes(model: nn.Module, function: Callable[[], Any]) -> int:
    """How many bytes a forward call keeps for backward, besides the model's parameters. On any device, also meta."""
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


def make_workload(config: ModelConfig, **changes: Any) -> Workload:
    """Of GRPO on the CPU in fp32, with a reference model."""
    work = Workload(
        trained=(config,),
        frozen={"reference": config},
        dtype=torch.float32,
        device_type="cpu",
        num_ranks=1,
        num_shards=changes.get("num_ranks", 1),
        parks_frozen=True,
        offloads_optimizer=False,
        longest_prompt=300,
        longest=812,
        requests=128,
        update_tokens=128 * 812,
        enough_tokens=8192,
    )
    return dataclasses.replace(work, **changes)
