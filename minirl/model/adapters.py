"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685) in PEFT's files.

A folder with adapters has adapter_config.json, which names the folder or hub id of the base model, and
adapter_model.safetensors, beside the base's config.json and tokenizer. `weights.load_weights` reads such a folder as
the base with the adapters merged.
"""

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.errors import InputError, refuse
from minirl.files import durable
from minirl.files.durable import Digest
from minirl.files.json_files import read_json_object
from minirl.files.safetensors_files import open_tensors, write_tensors
from minirl.model.config import LINEAR_LAYERS, ModelConfig, is_adapter
from minirl.model.folders import ADAPTERS_FILE

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# PEFT's keys that change nothing in a trained adapter, or only which tensors it has.
_HARMLESS_KEYS = frozenset(
    "task_type auto_mapping peft_version base_model_name_or_path inference_mode r lora_alpha lora_dropout "
    "target_modules exclude_modules layers_to_transform layers_pattern megatron_core eva_config runtime_config "
    "qalora_group_size ensure_weight_tying".split()
)
# Values of other keys, besides those that turn an option off, with which `LoraLinear` computes what PEFT does. PEFT
# changes the base at the start, except with these `init_lora_weights`.
_PLAIN_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "revision": ("main",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "modules_to_save": (["score"],),
}


def first_values(name: str, shape: torch.Size) -> Tensor:
    """The first values of an adapter as in PEFT: A uniform, B 0, so that it adds nothing. They depend on its name."""
    values = torch.zeros(shape)
    if name.endswith("lora_A"):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


@dataclass(frozen=True)
class MergedSlice:
    """A stored weight of the base with its adapter added: the sum is made in fp32, of the rows that are read."""

    base: Any
    lora_a: Tensor  # [r, in]
    lora_b: Tensor  # [out, r]
    scale: float

    def get_shape(self) -> list[int]:
        """See the class."""
        return list(self.base.get_shape())

    def __getitem__(self, rows: slice) -> Tensor:
        base = self.base[rows]
        return base.float() + self.scale * (self.lora_b[rows].float() @ self.lora_a.float())


def read_adapters(folder: Path) -> tuple[int, float, dict[str, Tensor]]:
    """Rank and alpha of a folder's adapters, and their tensors by names such as model.layers.0.mlp.up_proj.lora_A.

    A module that PEFT saved whole, as a scalar head, has its parameter's name. Raises InputError naming file and key
    for what would be computed in another way.
    """
    path = folder / ADAPTERS_FILE
    config = read_json_object(path)
    for key, value in config.items():
        is_off = value in (None, False, [], {}) and key != "peft_type"
        is_plain = is_off or key in _HARMLESS_KEYS or value in _PLAIN_VALUES.get(key, ())
        refuse(not is_plain, f"{path}: {key} is {value!r}, which minirl does not compute; merge it by PEFT")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise InputError(f"{path}: r is {rank!r} and lora_alpha {alpha!r}; expected two numbers")
    tensors = {}
    with open_tensors(folder / WEIGHTS_FILE) as file:
        for name in sorted(file.keys()):
            plain_name = name.removeprefix(_PREFIX)
            if is_adapter(plain_name.removesuffix(".weight")):
                plain_name = plain_name.removesuffix(".weight")
            tensors[plain_name] = file.get_tensor(name)
    return rank, alpha, tensors


def merged(base: Any, name: str, rank: int, alpha: float, tensors: dict[str, Tensor], label: str) -> Any:
    """The slice of a stored weight with its adapter, which it takes out of `tensors`, or itself if it has none.

    Raises InputError, with `label`, for a wrong shape.
    """
    layer = name.removesuffix(".weight")
    if f"{layer}.lora_A" not in tensors:
        return base
    lora_a = tensors.pop(f"{layer}.lora_A")
    lora_b = tensors.pop(f"{layer}.lora_B", torch.empty(0))
    num_out, num_in = base.get_shape()
    refuse(
        lora_a.shape != (rank, num_in) or lora_b.shape != (num_out, rank),
        f"{label} has shape {[num_out, num_in]}, but lora_A {list(lora_a.shape)} and lora_B {list(lora_b.shape)}, "
        f"with r {rank}",
    )
    return MergedSlice(base, lora_a, lora_b, alpha / rank)


def write_adapters(
    folder: Path, tensors: Mapping[str, Tensor], config: ModelConfig, *, base: str
) -> dict[str, Digest]:
    """Write PEFT's two files; returns their digests by name.

    tensors: the trained parameters in fp32, by name. base: the folder or hub id of the model that they are for.
    """
    adapters = config.adapters
    assert adapters is not None
    stored = {}
    for name, tensor in tensors.items():
        stored[f"{_PREFIX}{name}.weight" if is_adapter(name) else f"{_PREFIX}{name}"] = tensor
    peft_config = {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if config.scalar_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name for name in LINEAR_LAYERS if name in adapters.targets],
        "modules_to_save": ["score"] if config.scalar_head else None,
        "inference_mode": True,
    }
    content = (json.dumps(peft_config, indent=2) + "\n").encode()
    digest = durable.write_file(folder / ADAPTERS_FILE, [content])
    return {ADAPTERS_FILE: digest, WEIGHTS_FILE: write_tensors(folder / WEIGHTS_FILE, stored)}
