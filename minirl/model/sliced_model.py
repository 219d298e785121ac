"""Make a model that decodes with slices of its weights (see `slices`)."""

import torch
from torch import Tensor, nn

from minirl.model.layers import Linear
from minirl.model.slices import Slices
from minirl.model.transformer import MLP, Attention, Transformer

# Parameters of a linear layer that have a row for each column of its output.
OF_ROWS = ("weight", "bias", "lora_B")


class SlicedEmbedding(nn.Module):
    """`nn.Embedding` of which this rank holds rows."""

    def __init__(self, weight: Tensor, num_embeddings: int, slices: Slices):
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.num_embeddings = num_embeddings
        self.slices = slices

    def forward(self, tokens: Tensor) -> Tensor:
        own = self.slices.own(self.num_embeddings)
        is_own = (tokens >= own.start) & (tokens < own.stop)
        rows = self.weight[torch.where(is_own, tokens - own.start, 0)]
        return self.slices.combine(rows.masked_fill_(~is_own[:, None], 0))


def slice_model(model: Transformer, slices: Slices) -> set[str]:
    """Reduce a model on the meta device to this rank's rows; it then computes together with its group.

    Returns the names of the reduced parameters: the matrices and biases of its layers, embedding and head.
    """
    model.slices = slices
    sliced = set()
    for path, module in model.model.layers.named_modules(prefix="model.layers"):
        if isinstance(module, Linear):
            sliced |= _slice_rows(module, path, slices, module.out_features)
            module.slices = slices
    for module in model.model.layers.modules():
        if isinstance(module, Attention):
            module.o_proj.gathers_input = True
            if module.is_fused or model.config.qk_norm_over_heads:
                module.slices = slices  # it selects its heads from the gathered ones
            else:
                for projection in (module.q_proj, module.k_proj, module.v_proj):
                    projection.gathers_output = False
        elif isinstance(module, MLP) and not module.is_fused:
            getattr(module, module.down_name).gathers_input = True
            module.up_proj.gathers_output = False
            if module.is_gated:
                module.gate_proj.gathers_output = False
    vocab_size = model.config.vocab_size
    sliced |= _slice_rows(model.lm_head, "lm_head", slices, vocab_size)
    sliced |= _slice_rows(model.model.embed_tokens, "model.embed_tokens", slices, vocab_size)
    embedding = SlicedEmbedding(model.model.embed_tokens.weight, vocab_size, slices)
    model.model.add_module("embed_tokens", embedding)
    model.tie_weights()
    return sliced


def _slice_rows(module: nn.Module, path: str, slices: Slices, total: int) -> set[str]:
    """Give a module's parameters this rank's number of `total` rows, at least one. Returns the parameters' names."""
    sliced = set()
    for name in OF_ROWS:
        parameter = getattr(module, name, None)
        if parameter is not None:
            num_rows = max(1, slices.num_own(total))
            own = parameter.new_empty(num_rows, *parameter.shape[1:])
            setattr(module, name, nn.Parameter(own, requires_grad=False))
            sliced.add(f"{path}.{name}")
    return sliced
