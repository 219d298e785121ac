"""Models that run with transformers' modules: how config.json is read and how checkpoint tensors are named."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minirl.errors import InputError
from minirl.extras.hf_models import gate
from minirl.extras.hf_models.model import HFTransformer, build_on_meta
from minirl.model.config import ModelConfig
from minirl.model.folders import transformers_config

# Keys that describe the class that wrote config.json and do not affect the computation.
_CLASS_KEYS = ("architectures", "id2label", "label2id", "dtype", "torch_dtype", "transformers_version")


@dataclasses.dataclass(frozen=True)
class HFModel:
    """A model that runs on transformers' modules. An instance is hashable and serves as `ModelConfig.hf_backend`.

    text: the config.json without _CLASS_KEYS. is_exact: whether decoding matches scoring bitwise on the CPU.
    """

    text: str
    is_exact: bool

    def make_model(self, config: ModelConfig, *, recompute_layers: bool) -> HFTransformer:
        """Build the model on the meta device."""
        hf = _build_hf(self.text)
        with torch.device("meta"):
            return HFTransformer(hf, config, recompute_layers=recompute_layers)

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert parameters, keyed by the model's names, to tensors keyed by a checkpoint's names."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(_cached_hf(self.text), dict(tensors))

    def join_stored(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Join the checkpoint tensors that make up one parameter."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        hf = _cached_hf(self.text)
        steps = get_model_conversion_mapping(hf, add_legacy=False)
        renamings = [step for step in steps if isinstance(step, WeightRenaming)]
        converters = [step for step in steps if isinstance(step, WeightConverter)]
        for name, tensor in stored.items():
            target, pattern = rename_source_key(name, renamings, converters)
            converter = next(step for step in converters if pattern in step.source_patterns)
            converter.add_tensor(target, name, pattern, tensor)
        (parameter,) = converter.convert(target, model=hf, config=hf.config).values()
        return parameter[0] if isinstance(parameter, list) else parameter


def read_hf_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Return the `ModelConfig` for a config.json. Raises InputError, naming the difference, if the gate fails."""
    text = _config_text(raw)
    config, is_exact = _pass_gate(text)
    return dataclasses.replace(config, hf_backend=HFModel(text, is_exact))


def check_native(raw: Mapping[str, Any], read: Callable[[Mapping[str, Any]], ModelConfig]) -> None:
    """Raise InputError if minirl's own modules, configured by `read`, differ from transformers' modules."""
    _pass_gate(_config_text(raw), read)


def _config_text(raw: Mapping[str, Any]) -> str:
    # transformers treats null as a quantization config.
    known = {
        key: value
        for key, value in raw.items()
        if key not in _CLASS_KEYS and (key, value) != ("quantization_config", None)
    }
    return json.dumps(known, sort_keys=True)


@functools.cache
def _pass_gate(text: str, read: Callable[[Mapping[str, Any]], ModelConfig] | None = None) -> Any:
    """Return the result of `gate.measure`, or of `gate.check_native` if `read` is given.

    Raises InputError, naming the model type.
    """
    raw = json.loads(text)
    try:
        config = transformers_config(raw)
        return gate.measure(config) if read is None else gate.check_native(config, read)
    except Exception as error:
        reason = (
            error if isinstance(error, InputError) else f"a small model of this type does not run: {error!r}"
        )
        raise InputError(
            f"config.json: model_type {raw['model_type']!r} is not supported: {reason}"
        ) from None


def _build_hf(text: str) -> Any:
    """Build the transformers model for a config.json, on the meta device."""
    return build_on_meta(transformers_config(json.loads(text)))


_cached_hf = functools.cache(_build_hf)  # for transformers' name conversion
