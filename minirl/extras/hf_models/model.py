"""transformers' own modules on packed sequences, with the interface of `model.transformer.Transformer`.

Attention is minirl's `attend`, registered through transformers' AttentionInterface. On the CPU, batch-invariant
versions replace matmuls and elementwise functions while the model runs. Parameters use transformers' naming, which
`types` converts to the checkpoint's naming. `gate` decides which models are supported.
"""

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from minirl.errors import InputError, refuse
from minirl.model import batch_invariance, padding
from minirl.model.attention import Layout, attend
from minirl.model.config import ModelConfig
from minirl.model.layers import Linear
from minirl.model.shards import ShardGroup
from minirl.model.transformer import add_adapters

# Attention arguments that have no effect here. Dropout has no effect because models are always in eval mode.
_HARMLESS = frozenset(
    "dropout position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits "
    "return_dict".split()
)
# Minimum number of rows per forward pass on the CPU; shorter inputs are padded. Some modules multiply without
# `F.linear` (GPT-2 with `addmm`), and the number of rows that makes such products batch-invariant has not been
# measured.
MIN_ROWS = 16
# Elementwise functions whose vectorised kernel and scalar tail differ in the last bit.
_ELEMENTWISE = {
    getattr(namespace, name)
    for name in "silu gelu sigmoid softplus tanh exp cos sin".split()
    for namespace in (F, torch, Tensor)
    if hasattr(namespace, name)
}


class Stream:
    """The packed sequence batch that a model's modules run on; all modules share one instance.

    layout: the layout of the current forward pass. attention_calls: if a list, records each attention call as (layer,
    window, shape of the keys).
    """

    layout: Layout
    attention_calls: list[tuple[int, int | None, torch.Size]] | None = None


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *_: Any,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Run `attend` as a transformers attention function: [1, heads, T, C] -> [1, T, heads, C].

    Raises InputError, naming the arguments, if unsupported arguments would change the result.
    """
    unknown = [name for name, given in others.items() if given is not None and name not in _HARMLESS]
    refuse(unknown, f"its attention needs {', '.join(unknown)}, which minirl does not support")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    refuse(not causal, "its attention is not causal")
    stream: Stream = module.stream
    num_tokens = len(stream.layout.positions)
    q, k, v = (x[0, :, :num_tokens].transpose(0, 1) for x in (query, key, value))
    if stream.attention_calls is not None:
        stream.attention_calls.append((module.layer_idx, sliding_window, k.shape))
    if scaling is not None and scaling != q.shape[-1] ** -0.5:
        q = q * (scaling * q.shape[-1] ** 0.5)
    width = v.shape[-1]
    if width < k.shape[-1]:  # latent attention
        v = F.pad(v, (0, k.shape[-1] - width))
    out = attend(q, k, v, stream.layout, layer=module.layer_idx, window=sliding_window)
    return padding.pad_rows(out, query.shape[2])[None, ..., :width], None


class _BatchInvariant(TorchFunctionMode):
    """Makes each matmul row and each elementwise result on the CPU bitwise independent of the batch.

    Calls from `__torch_function__` itself go to torch directly, because a mode is disabled inside this method.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func in _ELEMENTWISE and isinstance(args[0], Tensor) and args[0].is_floating_point():
            shape = args[0].shape
            x = args[0].reshape(-1)
            padded = F.pad(x, (0, -len(x) % batch_invariance.VECTOR_WIDTH))
            values = func(padded, *args[1:], **kwargs)
            return values[: len(x)].reshape(shape)
        return func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Run a batch-invariant `F.linear` on x [..., in]."""
    rows = x.reshape(-1, x.shape[-1])
    return batch_invariance.linear(rows, weight, bias).unflatten(0, x.shape[:-1])


class _Linear(Linear):
    """A linear layer on x [1, T, in] that supports adapters and sharding."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        return super().forward(rows).unflatten(0, x.shape[:-1])


def _fuse_norm(norm: Any) -> None:
    """Make an RMSNorm use `F.rms_norm`, which saves less memory for backward; leave other modules unchanged."""
    weight = getattr(norm, "weight", None)
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    if weight is None or eps is None or not type(norm).__name__.endswith("RMSNorm"):
        return
    generator = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(norm).to_empty(device="cpu")
    x, values = torch.randn(2, len(weight), generator=generator)
    with torch.no_grad():
        twin.weight.copy_(values)
        fused = F.rms_norm(x, x.shape, values, eps)
        is_same = torch.allclose(twin(x), fused, rtol=1e-5)
    if is_same:
        norm.forward = lambda x: F.rms_norm(x, norm.weight.shape, norm.weight, eps)


def build_on_meta(config: Any) -> Any:
    """Build the transformers model for a config on the meta device.

    Only the buffers that checkpoints do not store are initialized, on the CPU.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register("minirl", packed_attention)
    with torch.device("meta"):
        hf = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32)
    hf.set_attn_implementation("minirl")
    for module in hf.modules():
        _fuse_norm(module)
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name in module._non_persistent_buffers_set:
                module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
            else:  # stored in checkpoints, but not trained
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))
        if module._non_persistent_buffers_set:
            with torch.no_grad():
                hf._init_weights(module)
    return hf.eval()


def _find_layers(hf: Any, num_layers: int) -> nn.ModuleList:
    """Return the model's layers. Raises InputError if no module list has `num_layers` modules."""
    for module in hf.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return module
    raise InputError("config.json: the model has no ModuleList with num_hidden_layers layers")


class HFTransformer(nn.Module):
    """A Hugging Face transformers model wrapped in the `Transformer` interface. Parameters use transformers' naming.

    hf: the transformers model instance. lm_head: the model's LM head, regardless of its name.
    """

    shard_group: ShardGroup | None = None
    hf: Any
    layers: nn.ModuleList
    embed_tokens: Any
    lm_head: Any

    def __init__(self, hf: Any, config: ModelConfig, *, recompute_layers: bool = False):
        super().__init__()
        self.config = config
        self.stream = Stream()

        # 1. The children of the transformers model become children of this module, under the same names.
        head = hf.get_output_embeddings()
        layers = _find_layers(hf, config.num_hidden_layers)
        for name, child in hf.named_children():
            if child is not head or not config.scalar_head:
                setattr(self, name, child)
        if config.scalar_head:
            self.score = Linear(config.hidden_size, 1, bias=False)
        parts = {"hf": hf, "layers": layers, "embed_tokens": hf.get_input_embeddings(), "lm_head": head}
        for name, part in parts.items():
            # This registers no child module, and shadows any child of the same name. For example, a child `lm_head` may
            # be a module that contains the head.
            object.__setattr__(self, name, part)

        # 2. The head returns hidden states, because the caller multiplies by the head's weight. Anything that the model
        # does to logits after the head is therefore done to hidden states.
        head.forward = lambda states: states

        # 3. Pass the packed sequence batch to attention, and make linear layers support adapters.
        for module in hf.modules():
            module.stream = self.stream
            if type(module) is nn.Linear:
                module.__class__ = _Linear
        if recompute_layers:
            for layer in layers:
                layer.forward = functools.partial(self._recompute, layer.forward)

        # 4. Keep the buffers' values, and copy them to the device of the first forward pass (`_move_buffers`).
        self._buffer_values = [
            (m, name, b) for m in self.modules() for name, b in m.named_buffers(recurse=False)
        ]
        self._device = torch.device("meta")

        # 5. Tie parameters, then add adapters; adding them freezes all other parameters.
        self.tie_weights()
        if config.adapters is not None:
            add_adapters(self, layers, config.adapters)

    @property
    def min_rows(self) -> int:
        """See `Transformer` and MIN_ROWS."""
        return MIN_ROWS if self.embed_tokens.weight.device.type == "cpu" else 1

    def tie_weights(self) -> None:
        """See `Transformer`. For some models, this also ties the head's bias."""
        self.hf.tie_weights()

    @property
    def head(self) -> Tensor:
        """See `Transformer`. A bias becomes an extra column in a copy of the weight; hidden states then end in a 1."""
        weight: Tensor = self.lm_head.weight
        if self.lm_head.bias is None:
            return weight
        return torch.cat([weight, self.lm_head.bias[:, None]], 1)

    def forward(self, tokens: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """See `Transformer`."""
        ids = padding.pad_rows(tokens, self.min_rows)
        positions = padding.pad_rows(positions, self.min_rows)
        if self._device != tokens.device:
            self._move_buffers(tokens.device)
        self.stream.layout = layout
        hf = self.hf.base_model if self.config.scalar_head else self.hf
        with self._invariance():
            out = hf(input_ids=ids[None], position_ids=positions[None], use_cache=False)
        states: Tensor = out[0][0, : len(tokens)]
        if not self.config.scalar_head and self.lm_head.bias is not None:
            states = F.pad(states, (0, 1), value=1.0)
        # Copy, because FSDP warns about views.
        return states.to(self.embed_tokens.weight.dtype, copy=True)

    def _move_buffers(self, device: torch.device) -> None:
        """Copy the buffers' values to the device. Moving or casting the model dropped those values."""
        self._device = device
        for module, name, buffer in self._buffer_values:
            module._buffers[name] = buffer.to(device)
        if self.hf._can_set_experts_implementation():
            self.hf.set_experts_implementation("eager" if device.type == "cpu" else "grouped_mm")

    def _invariance(self) -> Any:
        return _BatchInvariant() if self._device.type == "cpu" else nullcontext()

    def _recompute(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer's forward pass, and rerun the layer during backward on the same packed sequence batch."""
        layout = self.stream.layout

        def run(*args: Any) -> Any:
            self.stream.layout = layout
            with self._invariance():
                return forward(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False) if torch.is_grad_enabled() else run(*args)
