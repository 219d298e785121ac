"""Kernel launches, waits of the host and bytes moved of a decode step and of a microbatch on CUDA, counted without one.

    python benchmarks/launches.py [qwen2.5-0.5b qwen2.5-1.5b qwen2.5-7b] [--by-name]

Meta tensors go through the code that CUDA tensors take, and nothing is computed: each operation of torch, and the
decode kernel, is counted with the bytes that it reads and writes. A wait stops the host until the device has caught up:
reading a number, a result whose shape depends on values, a copy from or to pageable memory. A microbatch is forward,
loss, backward and metrics, and its head has as many rows as the batch has loss tokens. Neither FSDP nor the optimizer
is counted. bf16.
"""

import argparse
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from workload import print_result

import train_grpo  # found by workload
from minirl.extras.kernels import paged_attention
from minirl.generation import decode_step
from minirl.model import attention
from minirl.model.attention import PAGED_BLOCK, Cached, CachePool, DecodeLayout, DecodeRead
from minirl.model.config import Adapters, ModelConfig
from minirl.model.families import config_from_dict
from minirl.model.rotation import rope_table
from minirl.model.transformer import Transformer
from minirl.report.metrics import StepMetrics, add_clip, add_tokens
from minirl.training import batch as batching
from minirl.training import losses
from minirl.training.batch import Batch
from minirl.training.scoring import score_batch

META = torch.device("meta")
COMMON: dict[str, Any] = {
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "num_hidden_layers": 24,  # in all three, so that launches can be compared
    "tie_word_embeddings": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen2.5-7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
    },
}
NUM_REQUESTS = 256
CONTEXT = 768  # tokens of a decoding request
NUM_ROLLOUTS = 16  # of a microbatch, with prompts of 256 tokens and completions of 512: 8,192 loss tokens
PROMPT_LENGTH = 256
COMPLETION_LENGTH = 512

aten = torch.ops.aten
# Operations that launch several kernels on CUDA, and how often these pass over the first argument. logsumexp: amax,
# abs, eq, masked_fill, sub, exp, sum, log and add, of which amax, sub, exp and sum see the whole input.
SEVERAL = {aten.logsumexp.default: (9, 6)}
# Memory that is only taken.
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.empty_strided.default,
    aten.new_empty_strided.default,
}
# They read only as many rows of the first argument as the result has.
GATHERS = {
    aten.index.Tensor,
    aten.index_select.default,
    aten.gather.default,
    aten.embedding.default,
}
# They write to a part of the first argument only. Those without "_" copy it first.
SCATTERS = {
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten.scatter_add_.default,
    aten.index_add_.default,
}
# They overwrite the first argument without reading it.
WRITES = {aten.copy_.default, aten.fill_.Scalar, aten.zero_.default}


@dataclasses.dataclass
class Counts:
    """The counts. by_name: launches and bytes of each operation."""

    launches: int = 0
    waits: int = 0
    bytes: int = 0
    launches_by_name: Counter = dataclasses.field(default_factory=Counter)
    bytes_by_name: Counter = dataclasses.field(default_factory=Counter)
    waits_by_name: Counter = dataclasses.field(default_factory=Counter)

    def launch(self, name: str, num_bytes: int, *, times: int = 1) -> None:
        self.launches += times
        self.bytes += num_bytes
        self.launches_by_name[name] += times
        self.bytes_by_name[name] += num_bytes

    def wait(self, name: str) -> None:
        self.waits += 1
        self.waits_by_name[name] += 1


class LaunchCounter(TorchDispatchMode):
    """Counts operations on meta tensors as if they were CUDA's. Results that depend on values get made-up ones."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        inputs = tensors_in((args, kwargs))
        if func is aten._local_scalar_dense.default and inputs[0].is_meta:
            self.counts.wait(name)
            return 1 if not inputs[0].dtype.is_floating_point else 1.0
        if func is aten.nonzero.default and inputs[0].is_meta:
            return self._nonzero(inputs[0])
        if func in (aten._to_copy.default, aten.copy_.default) and not kwargs.get("non_blocking"):
            target = kwargs.get("device") if func is aten._to_copy.default else args[0].device
            source = inputs[-1].device
            if target is not None and (target == META) != (source == META):
                self.counts.wait(f"{name} between devices")
        if (
            func is aten._to_copy.default
            and inputs[0].is_meta
            and kwargs.get("device") == torch.device("cpu")
        ):
            self.counts.launch(name, inputs[0].nbytes)
            return torch.zeros(inputs[0].shape, dtype=kwargs.get("dtype") or inputs[0].dtype)
        if func is aten.index.Tensor:
            if inputs[0].is_meta and not all(index.is_meta for index in inputs[1:]):
                self.counts.wait("an index on the host")
            args = (args[0], [self._as_numbers(index) for index in args[1]])
        result = func(*args, **kwargs)
        outputs = tensors_in(result)
        is_launch = any(x.is_meta for x in (*inputs, *outputs))
        if (
            is_launch
            and not func.is_view
            and func not in ALLOCATIONS
            and func is not aten._unsafe_view.default
        ):
            times, passes = SEVERAL.get(func, (1, 0))
            num_bytes = passes * _nbytes(inputs[:1]) or _bytes_of(func, inputs, outputs)
            self.counts.launch(name, num_bytes, times=times)
        return result

    def _nonzero(self, mask: Tensor) -> Tensor:
        """All rollouts of a microbatch have the same share of loss tokens."""
        self.counts.wait("nonzero")
        self.counts.launch("nonzero", 2 * mask.nbytes, times=3)
        num_found = len(mask) * COMPLETION_LENGTH // (PROMPT_LENGTH + COMPLETION_LENGTH)
        return torch.empty(num_found, mask.ndim, dtype=torch.int64, device=META)

    def _as_numbers(self, index: Tensor | None) -> Tensor | None:
        """Replace a mask by an index tensor of numbers, as CUDA does."""
        if index is None or index.dtype != torch.bool or not index.is_meta:
            return index
        return self._nonzero(index)[:, 0]


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for part in tree for tensor in tensors_in(part)]


def _nbytes(tensors: list[Tensor]) -> int:
    """Bytes of the elements of tensors on the device; an element that is expanded counts once."""
    total = 0
    for tensor in tensors:
        if tensor.is_meta:
            num_elements = 1
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
                num_elements *= size if stride else min(size, 1)
            total += num_elements * tensor.element_size()
    return total


def _bytes_of(func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> int:
    """Bytes that a kernel reads and writes."""
    if func in GATHERS:
        return _nbytes(inputs[1:]) + 2 * _nbytes(outputs)
    if func in SCATTERS:
        copied = 0 if "_." in str(func) else 2 * _nbytes(outputs)
        return copied + _nbytes(inputs[1:]) + 2 * _nbytes(inputs[-1:])
    if func in WRITES:
        return _nbytes(inputs[1:]) + _nbytes(outputs)
    return _nbytes(inputs) + _nbytes(outputs)


class _RMSNorm(torch.autograd.Function):
    """CUDA's fused norm; meta tensors have none. Backward is one kernel for x and two for the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Counts) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        counts.launch("rms_norm", 2 * x.nbytes)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        ctx.counts.launch("rms_norm backward", 5 * x.nbytes, times=3)
        return torch.empty_like(x), torch.empty_like(weight), None


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """Count operations on meta tensors in the block, with the choices that the code makes for CUDA in bf16."""
    counter = LaunchCounter()
    counts = counter.counts

    def rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
        return _RMSNorm.apply(x, weight, counts)

    def decode(
        q: Tensor, keys: Tensor, values: Tensor, blocks: Tensor, lengths: Tensor, *, window: Any
    ) -> Tensor:
        block_bytes = keys[0].nbytes + values[0].nbytes
        counts.launch("paged_attention", 2 * q.nbytes + blocks.numel() * block_bytes)
        return torch.empty_like(q)

    def upload(x: Tensor, device: torch.device) -> Tensor:
        return x.to(device, non_blocking=True)

    with (
        mock.patch.object(F, "rms_norm", rms_norm),
        mock.patch.object(attention, "kernel_for", return_value="varlen"),
        mock.patch.object(paged_attention, "decode", decode),
        mock.patch.object(attention, "upload", upload),
        mock.patch.object(batching, "upload", upload),
        mock.patch.object(losses, "upload", upload),
        counter,
    ):
        yield counts


def make_model(shape: str, adapters: Adapters | None = None) -> Transformer:
    """A model of a shape in `SHAPES`, on the meta device in bf16."""
    config = dataclasses.replace(config_from_dict(COMMON | SHAPES[shape]), adapters=adapters)
    rope_table(config, META)  # made and uploaded once in a run
    with META:
        return Transformer(config).to(torch.bfloat16)


def decode_counts(model: Transformer) -> Counts:
    """Of one eager decode step of NUM_REQUESTS requests, without its uploads."""
    layout = _decode_layout(model.config)
    numbers = layout.positions
    with counting() as counts, torch.no_grad():
        decode_step.decode(model, numbers, layout, [numbers, numbers.float()])
    return counts


def _decode_layout(config: ModelConfig) -> DecodeLayout:
    block = PAGED_BLOCK
    blocks_per_request = CONTEXT // block
    num_blocks = NUM_REQUESTS * blocks_per_request
    heads = (config.num_hidden_layers, num_blocks, config.num_key_value_heads)
    keys = torch.empty(*heads, config.head_dim, block, dtype=torch.bfloat16, device=META)
    values = torch.empty(*heads, block, config.head_dim, dtype=torch.bfloat16, device=META)
    numbers = torch.empty(NUM_REQUESTS, dtype=torch.int64, device=META)
    table = torch.empty(NUM_REQUESTS, blocks_per_request, dtype=torch.int32, device=META)
    cached = Cached(
        CachePool(keys, values, None, "paged"),
        block=numbers,
        offset=numbers,
        read=DecodeRead(table, numbers.int()),
    )
    pool_of_layer = {layer: (0, layer) for layer in range(config.num_hidden_layers)}
    return DecodeLayout(numbers, [cached], pool_of_layer)


def microbatch_counts(model: Transformer) -> Counts:
    """Of one microbatch of `train_grpo.py` at its defaults: forward, loss, backward and metrics."""
    config = train_grpo.Config()
    batch = _make_batch()
    metrics = StepMetrics()
    # The last microbatch of several: the gradients exist.
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    with counting() as counts:
        micro = batch.select(range(NUM_ROLLOUTS))
        new, entropy = score_batch(model, micro)
        micro = micro.replace(old_logprobs=new.detach())
        loss, ratio = train_grpo.token_loss(config, micro, new, entropy)
        objective = (micro.loss_weights * loss).sum()
        objective.backward()
        metrics.add_total("policy/loss", objective.detach() / config.updates_per_step)
        add_tokens(metrics, micro, new, ratio, entropy, sampled_version=0)
        add_clip(metrics, micro, ratio, clip_low=config.clip_low, clip_high=config.clip_high)
    return counts


def _make_batch() -> Batch:
    """Twice the microbatch, with the streams of an update."""
    num_rollouts = 2 * NUM_ROLLOUTS
    lengths = (PROMPT_LENGTH + COMPLETION_LENGTH,) * num_rollouts
    stream = torch.empty(sum(lengths), device=META)
    return Batch(
        lengths,
        stream.long(),
        stream.bool(),
        stream,
        weight_version=stream.int(),
        advantages=stream,
        loss_weights=stream,
        rollout=torch.arange(num_rollouts),
    )


def _print_names(counts: Counts) -> None:
    for name, num_bytes in counts.bytes_by_name.most_common():
        print(f"    {name:45} {counts.launches_by_name[name]:6} {num_bytes / 1e9:10.3f} GB")
    for name, times in counts.waits_by_name.items():
        print(f"    waits: {name:38} {times:6}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shapes", nargs="*", default=list(SHAPES), metavar=f"{{{','.join(SHAPES)}}}")
    parser.add_argument(
        "--by-name", action="store_true", help="also the launches and bytes of each operation"
    )
    args = parser.parse_args()
    for shape in args.shapes:
        model = make_model(shape)
        for what, count in (("decode step", decode_counts), ("microbatch", microbatch_counts)):
            counts = count(model)
            print(
                f"{shape:13} {what:12} {counts.launches:6} launches {counts.waits:3} waits {counts.bytes / 1e9:9.2f} GB"
            )
            if args.by_name:
                _print_names(counts)
            print_result(
                what=f"launches of a {what}",
                shape=shape,
                launches=counts.launches,
                waits=counts.waits,
                gigabytes=round(counts.bytes / 1e9, 3),
            )


if __name__ == "__main__":
    main()
