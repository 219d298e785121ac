"""Model folders with tiny random models."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from minirl.model.config import Adapters
from minirl.model.families import config_from_dict, read_config
from minirl.model.transformer import Transformer
from minirl.model.weights import write_folder
from minirl.training import sharded_model
from minirl.training.sharded_model import ShardedModel

# Odd sizes, so that neither the vocabulary nor the MLP is divisible by two ranks.
RAW_CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 33,
    "hidden_size": 32,
    "intermediate_size": 51,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}


def qwen2_config(
    hidden: int, inner: int, layers: int, heads: int, kv_heads: int, *, vocab: int = 151936, tied: bool = True
) -> dict[str, Any]:
    """Return the config.json of a Qwen2.5 model."""
    return {
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "tie_word_embeddings": tied,
    }


QWEN_05B = qwen2_config(896, 4864, 24, 14, 2)
QWEN_1_5B = qwen2_config(1536, 8960, 28, 12, 2)
QWEN_7B = qwen2_config(3584, 18944, 28, 28, 4, vocab=152064, tied=False)
QWEN_32B = qwen2_config(5120, 27648, 64, 40, 8, vocab=152064, tied=False)


def sharded(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    *,
    scalar_head: bool = False,
    adapters: Adapters | None = None,
    bucket_size: int = 3000,
    **options: Any,
) -> ShardedModel:
    """Return the folder's model, sharded over all ranks on the CPU.

    With the default bucket size, it has one FSDP unit per layer and several gathers per refresh, like a large model.
    """
    sharded_model.BUCKET_SIZE = bucket_size
    config = dataclasses.replace(read_config(folder), scalar_head=scalar_head, adapters=adapters)
    return ShardedModel(config, folder, dtype=dtype, device=torch.device("cpu"), **options)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a sharded tensor (collective), or return any other tensor."""
    return getattr(tensor, "full_tensor", tensor.detach)()


def adamw(model: ShardedModel, weight_decay: float = 0.0) -> torch.optim.AdamW:
    return model.make_optimizer(betas=(0.9, 0.95), weight_decay=weight_decay)


def moved_weights(before: Path, after: Path) -> dict[str, bool]:
    """Return whether each weight differs between two model folders, which must name the same weights."""
    old, new = (load_file(folder / "model.safetensors") for folder in (before, after))
    assert old.keys() == new.keys()
    return {name: not torch.equal(weight, new[name]) for name, weight in old.items()}


def make_folder(folder: Path, raw: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    model = Transformer(config_from_dict(raw)).double()
    for param in model.parameters():
        torch.nn.init.normal_(param, std=0.3)
    write_folder(folder, dict(model.named_parameters()), config=raw)
    return folder
