"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685) in PEFT's files.

A folder with adapters has adapter_config.json, which names the folder or hub id of the base model, and
adapter_model.safetensors, beside the base's config.json and tokenizer. `weights.load_weights` reads such a folder as
the base with the adapters merged.
"""

import math
import re
import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object
from minirl.files.safetensors_files import open_tensors
from minirl.model.config import ModelConfig, is_adapter
from minirl.model.folders import ADAPTERS_FILE

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# The decoder's prefix in transformers' classes of vision models, and in those of older versions.
_VISION_MODEL_PREFIX = r"^(model\.language_model|language_model\.model)\."
# Names of modules that PEFT takes for experts, which transformers stacks, even if they are shared experts.
_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# PEFT's keys that change nothing in a trained adapter, or only which tensors it has.
_HARMLESS_KEYS = frozenset(
    "task_type auto_mapping peft_version base_model_name_or_path inference_mode r lora_alpha lora_dropout "
    "target_modules target_parameters exclude_modules layers_to_transform layers_pattern megatron_core eva_config "
    "runtime_config qalora_group_size ensure_weight_tying".split()
)
# Values of other keys, besides those that turn an option off, with which `layers.Linear` computes what PEFT does. PEFT
# changes the base at the start, except with these `init_lora_weights`.
_SUPPORTED_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "revision": ("main",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "modules_to_save": (["score"],),
}


def initial_values(name: str, shape: torch.Size) -> Tensor:
    """The first values of a parameter that no file has: 0, so that it adds nothing.

    An adapter's A is uniform, as in PEFT, and depends on its name.
    """
    values = torch.zeros(shape)
    if name.endswith("lora_A"):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


@dataclass
class SavedAdapters:
    """A folder's adapters; without tensors if it has none.

    tensors: by names such as model.layers.0.mlp.up_proj.lora_A; a module that PEFT saved whole, as a scalar head, has
        its own name. `merge` takes those of a layer out.
    """

    path: Path
    rank: int = 1
    alpha: float = 0.0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def merge(self, layer: str, base: Any, label: str) -> Any:
        """The stored weight of a layer with its adapter, summed in fp32; `base` if the layer has none.

        base: a slice; a tensor (stacked experts) gets no adapter. Raises InputError, with `label`, for a wrong shape.
        """
        if f"{layer}.lora_A" not in self.tensors or isinstance(base, Tensor):
            return base
        lora_a = self.tensors.pop(f"{layer}.lora_A")  # [r, in]
        lora_b = self.tensors.pop(f"{layer}.lora_B", torch.empty(0))  # [out, r]
        num_out, num_in = base.get_shape()
        refuse(
            lora_a.shape != (self.rank, num_in) or lora_b.shape != (num_out, self.rank),
            f"{label} has shape {[num_out, num_in]}, but lora_A {list(lora_a.shape)} and lora_B "
            f"{list(lora_b.shape)}, with r {self.rank}",
        )
        return base[:].float() + self.alpha / self.rank * (lora_b.float() @ lora_a.float())


def read_adapters(folder: Path) -> SavedAdapters:
    """Read a folder's adapters.

    Raises InputError naming file and key for what would be computed in another way.
    """
    path = folder / ADAPTERS_FILE
    if not path.is_file():
        return SavedAdapters(folder / WEIGHTS_FILE)
    config = read_json_object(path)
    for key, value in config.items():
        is_off = value in (None, False, [], {}) and key != "peft_type"
        is_supported = is_off or key in _HARMLESS_KEYS or value in _SUPPORTED_VALUES.get(key, ())
        refuse(
            not is_supported, f"{path}: {key} is {value!r}, which minirl does not compute; merge it by PEFT"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise InputError(f"{path}: r is {rank!r} and lora_alpha {alpha!r}; expected two numbers")
    adapters = SavedAdapters(folder / WEIGHTS_FILE, rank, alpha)
    with open_tensors(adapters.path) as file:
        for name in sorted(file.keys()):
            layer = name.removeprefix(_PREFIX).removesuffix(".weight")
            adapters.tensors[re.sub(_VISION_MODEL_PREFIX, "model.", layer)] = file.get_tensor(name)
    return adapters


def peft_config(
    config: ModelConfig, raw: Mapping[str, Any], names: Collection[str], base: str
) -> dict[str, Any]:
    """The adapter_config.json of a model's adapters.

    raw: the content of its config.json. names: those of the trained parameters. base: the folder or hub id of the model
    under the adapters.
    """
    assert config.adapters is not None
    targets = dict.fromkeys(name.split(".")[-2] for name in names if is_adapter(name))
    # PEFT takes some names for experts, which transformers stacks.
    expert_names = _EXPERT_PROJECTIONS if config.hf_backend is not None and "expert" in str(raw) else ()
    modules = [name for name in targets if name not in expert_names]
    # The layers of a vision model's other part may have the same names.
    in_language_model = rf"model\.(language_model\.)?layers\..*\.({'|'.join(modules)})"
    has_score = "score.weight" in names
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_score else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.adapters.rank,
        "lora_alpha": config.adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": in_language_model if config.weight_prefix != "model." else modules,
        "target_parameters": [f"{name}.weight" for name in targets if name in expert_names] or None,
        "modules_to_save": ["score"] if has_score else None,
        "inference_mode": True,
    }


def peft_name(name: str) -> str:
    """The name of a trained parameter in PEFT's file."""
    return f"{_PREFIX}{name.removesuffix('.weight')}.weight"
