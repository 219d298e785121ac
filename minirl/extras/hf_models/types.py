"""The model of a config.json by transformers' modules: its shape, and the names of its tensors in folders."""

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

# Keys that say which class wrote the file, not what it computes.
_OF_CLASS = ("architectures", "id2label", "label2id", "dtype", "torch_dtype", "transformers_version")


@dataclasses.dataclass(frozen=True)
class HFModel:
    """A model of transformers' modules: `ModelConfig.hf_backend`. Hashable.

    text: the config.json, without the keys of its class. is_exact: whether decoding had the bits of scoring on the CPU.
    """

    text: str
    is_exact: bool

    def make(self, config: ModelConfig, *, recompute_layers: bool) -> HFTransformer:
        """Make the model on the meta device."""
        hf = _build_cached(self.text)
        with torch.device("meta"):
            return HFTransformer(hf, config, recompute_layers=recompute_layers)

    def to_checkpoint(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a folder, by its names, from those of parameters, by the model's."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(_for_names(self.text), dict(tensors))

    def join_stored(self, stored: Mapping[str, Tensor]) -> Tensor:
        """Return the one parameter that a folder stores in these tensors."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        hf = _for_names(self.text)
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
    """The `ModelConfig` of a config.json. Raises InputError, naming what differs, if it does not pass the gate."""
    text = _text(raw)
    config, is_exact = _pass_gate(text)
    return dataclasses.replace(config, hf_backend=HFModel(text, is_exact))


def check_native(raw: Mapping[str, Any], read: Callable[[Mapping[str, Any]], ModelConfig]) -> None:
    """Raise InputError if minirl's own modules, by `read`, are not what transformers makes of a config.json."""
    _pass_gate(_text(raw), read)


def _text(raw: Mapping[str, Any]) -> str:
    # transformers takes a quantization_config of null for one.
    known = {
        key: value
        for key, value in raw.items()
        if key not in _OF_CLASS and (key, value) != ("quantization_config", None)
    }
    return json.dumps(known, sort_keys=True)


@functools.cache
def _pass_gate(text: str, read: Callable[[Mapping[str, Any]], ModelConfig] | None = None) -> Any:
    """What the gate returns: `measure`, or with `read` `check_native`. Raises InputError, naming the type."""
    raw = json.loads(text)
    try:
        config = transformers_config(raw)
        return gate.measure(config) if read is None else gate.check_native(config, read)
    except Exception as error:
        reason = error if isinstance(error, InputError) else f"a small model of it does not run: {error!r}"
        raise InputError(
            f"config.json: model_type {raw['model_type']!r} is not supported: {reason}"
        ) from None


def _build_cached(text: str) -> Any:
    """transformers' model of a config.json, on the meta device."""
    return build_on_meta(transformers_config(json.loads(text)))


_for_names = functools.cache(_build_cached)  # for transformers' conversion of names
