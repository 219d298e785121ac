"""Model FLOPs utilization (MFU) of the update: the FLOPs that a model needs, over those that the device could do.

They are counted as in PaLM (Chowdhery et al. 2022, arXiv 2204.02311, appendix B), but attention counts only the tokens
that each token sees, a shared prompt counts once in a microbatch, and the head only where the loss needs it. So
recomputed layers, and heads of prompt tokens, do not raise the MFU.
"""

import re
from collections import Counter

from minirl.model.config import ModelConfig
from minirl.model.delta_rule import CHUNK
from minirl.plan.formulas import layer_parameters
from minirl.training.batch import RolloutTable

BACKWARD_AND_FORWARD = 3  # backward takes twice the products of forward
# Products per second in bf16 without sparsity, by name, from NVIDIA's data sheets. The first match counts.
PEAK_FLOPS = [
    (r"NVIDIA G?B200.*", 2250e12),
    (r"NVIDIA H100 PCIe", 756e12),
    (r"NVIDIA H100 NVL", 835e12),
    (r"NVIDIA (H100|H200|H800|GH200)\b.*", 989e12),
    (r"NVIDIA H20\b.*", 148e12),
    (r"NVIDIA A[18]00\b.*", 312e12),
    (r"NVIDIA L40S", 362e12),
    (r"NVIDIA L4", 121e12),
    (r"NVIDIA RTX A6000", 155e12),
    (r"NVIDIA GeForce RTX 4090", 165e12),
    (r"NVIDIA GeForce RTX 3090", 71e12),
]


def peak_flops(device_name: str) -> float | None:
    """The most bf16 FLOPs per second of a device by torch's name for it; None if it is not known."""
    return next((peak for name, peak in PEAK_FLOPS if re.fullmatch(name, device_name)), None)


def training_flops(config: ModelConfig, micro: RolloutTable) -> float:
    """FLOPs of forward and backward of a microbatch."""
    lengths = micro.num_tokens.tolist()
    prompts = Counter(micro.prefixes)
    # A prompt is computed once.
    repeated = [prefix.num_tokens for prefix in (prompts - Counter({*prompts})).elements()]
    num_tokens = sum(lengths) - sum(repeated)
    channels = config.num_attention_heads * config.head_dim
    num_outputs = 1 if config.scalar_head else config.vocab_size
    forward = 2 * num_tokens * config.num_hidden_layers * layer_parameters(config)
    forward += 2 * int(micro.num_loss_tokens.sum()) * config.hidden_size * num_outputs
    if (delta := config.delta_net) is not None:
        keys, values = delta.key_head_dim, delta.value_head_dim
        # With half of the products within a chunk, and those with the state.
        of_token = delta.num_value_heads * (CHUNK * (keys + values) + 3 * keys * values)
        forward += 2 * num_tokens * len(delta.layers) * of_token
    for window in config.attention_windows.values():
        num_pairs = sum(_num_pairs(length, window) for length in lengths)
        num_pairs -= sum(_num_pairs(length, window) for length in repeated)
        forward += 4 * channels * num_pairs  # queries by keys, and weights by values
    return BACKWARD_AND_FORWARD * forward


def _num_pairs(length: int, window: int | None) -> int:
    """How many tokens the tokens of a sequence see together, each itself and those before it in its window."""
    seen = min(length, window or length)
    return seen * (seen + 1) // 2 + (length - seen) * seen
