"""Folders of tiny random models."""

from pathlib import Path
from typing import Any

import torch

from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer
from minirl.model.weights import named_parameters, save_folder

# Odd sizes on purpose: neither the vocabulary nor the MLP divides by two ranks.
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


def make_folder(folder: Path, raw: dict[str, Any]) -> Path:
    torch.manual_seed(0)
    model = Transformer(config_from_dict(raw)).double()
    for param in named_parameters(model).values():
        torch.nn.init.normal_(param, std=0.3)
    save_folder(folder, named_parameters(model), config=raw, tokenizer_from=None)
    return folder
