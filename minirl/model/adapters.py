"""LoRA adapters (Hu et al. 2021, arXiv 2106.09685) in PEFT's format.

An adapter folder contains adapter_config.json, which names the base model's folder or Hub id, and
adapter_model.safetensors; minirl also writes the base model's config.json and tokenizer into the folder.
`weights.load_weights` loads an adapter folder as the base model with the adapters merged in.
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
# Prefixes of the decoder's tensors in transformers' vision models; older versions use the second prefix.
_VISION_MODEL_PREFIX = r"^(model\.language_model|language_model\.model)\."
# PEFT treats modules with these names as stacked experts, even inside a shared expert.
_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# PEFT keys that do not affect a trained adapter, or that only select which tensors the adapter contains.
_HARMLESS_KEYS = frozenset(
    "task_type auto_mapping peft_version base_model_name_or_path inference_mode r lora_alpha lora_dropout "
    "target_modules target_parameters exclude_modules layers_to_transform layers_pattern megatron_core eva_config "
    "runtime_config qalora_group_size ensure_weight_tying".split()
)
# Supported values, in addition to values that disable an option. With these values, `layers.Linear` matches PEFT. With
# other values of `init_lora_weights`, PEFT changes the base weights at initialization.
_SUPPORTED_VALUES = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "revision": ("main",),
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "modules_to_save": (["score"],),
}


def initial_values(name: str, shape: torch.Size) -> Tensor:
    """Return initial values for a parameter that no file stores: zeros, so the parameter has no effect at first.

    The exception is lora_A, which is drawn uniformly as in PEFT, with a seed derived from the parameter's name.
    """
    values = torch.zeros(shape)
    if name.endswith("lora_A"):
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        torch.nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
    return values


@dataclass
class SavedAdapters:
    """The adapters in one folder; `tensors` is empty if the folder contains no adapters.

    tensors: adapter tensors, keyed by parameter name, e.g. model.layers.0.mlp.up_proj.lora_A. A module that PEFT saved
        in full, such as a scalar head, keeps its own name. `merge` removes a layer's tensors after merging them.
    """

    path: Path
    rank: int = 1
    alpha: float = 0.0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def merge(self, layer: str, base: Any, label: str) -> Any:
        """Return a layer's stored weight with its adapter merged in fp32, or `base` if the layer has no adapter.

        base: a safetensors slice, or a tensor of stacked experts, which never has an adapter. Raises InputError,
        prefixed with `label`, if the shapes do not match.
        """
        if f"{layer}.lora_A" not in self.tensors or isinstance(base, Tensor):
            return base
        lora_a = self.tensors.pop(f"{layer}.lora_A")  # [r, in]
        lora_b = self.tensors.pop(f"{layer}.lora_B", torch.empty(0))  # [out, r]
        num_out, num_in = base.get_shape()
        refuse(
            lora_a.shape != (self.rank, num_in) or lora_b.shape != (num_out, self.rank),
            f"{label} has shape {[num_out, num_in]}, which does not match lora_A {list(lora_a.shape)} and lora_B "
            f"{list(lora_b.shape)} with r {self.rank}",
        )
        return base[:].float() + self.alpha / self.rank * (lora_b.float() @ lora_a.float())


def read_adapters(folder: Path) -> SavedAdapters:
    """Read a folder's adapters.

    Raises InputError, naming the file and the key, if a setting would change the computation in an unsupported way.
    """
    path = folder / ADAPTERS_FILE
    if not path.is_file():
        return SavedAdapters(folder / WEIGHTS_FILE)
    config = read_json_object(path)
    for key, value in config.items():
        is_disabled = value in (None, False, [], {}) and key != "peft_type"
        is_supported = is_disabled or key in _HARMLESS_KEYS or value in _SUPPORTED_VALUES.get(key, ())
        refuse(
            not is_supported,
            f"{path}: {key} is {value!r}, which is not supported; merge the adapter with PEFT first",
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float) or rank < 1:
        raise InputError(f"{path}: r is {rank!r} and lora_alpha is {alpha!r}; expected two numbers")
    adapters = SavedAdapters(folder / WEIGHTS_FILE, rank, alpha)
    with open_tensors(adapters.path) as file:
        for name in sorted(file.keys()):
            module_name = name.removeprefix(_PREFIX).removesuffix(".weight")
            adapters.tensors[re.sub(_VISION_MODEL_PREFIX, "model.", module_name)] = file.get_tensor(name)
    return adapters


def peft_config(
    config: ModelConfig, raw: Mapping[str, Any], names: Collection[str], base: str
) -> dict[str, Any]:
    """Return the contents of adapter_config.json for a model's adapters.

    raw: the contents of the model's config.json. names: the trained parameters' names. base: the base model's folder or
    Hub id.
    """
    assert config.adapters is not None
    adapted_modules = dict.fromkeys(name.split(".")[-2] for name in names if is_adapter(name))
    # PEFT treats modules with certain names as experts, because the transformers library stacks expert weights.
    expert_names = _EXPERT_PROJECTIONS if config.hf_backend is not None and "expert" in str(raw) else ()
    target_modules = [name for name in adapted_modules if name not in expert_names]
    # Match only the language model, because layers of the vision encoder may have the same names.
    language_model_pattern = rf"model\.(language_model\.)?layers\..*\.({'|'.join(target_modules)})"
    has_score_head = "score.weight" in names
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if has_score_head else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": config.adapters.rank,
        "lora_alpha": config.adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": language_model_pattern if config.weight_prefix != "model." else target_modules,
        "target_parameters": [f"{name}.weight" for name in adapted_modules if name in expert_names] or None,
        "modules_to_save": ["score"] if has_score_head else None,
        "inference_mode": True,
    }


def peft_name(name: str) -> str:
    """Return the name under which PEFT stores a trained parameter."""
    return f"{_PREFIX}{name.removesuffix('.weight')}.weight"
