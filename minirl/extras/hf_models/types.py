"""The `OtherModel` of a config.json: its shape, its modules, and the names of its tensors in folders."""

import dataclasses
import functools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minirl.errors import InputError
from minirl.extras.hf_models.gate import Facts, measure, model_config
from minirl.extras.hf_models.model import HFTransformer, build_on_meta
from minirl.model.config import ModelConfig
from minirl.model.folders import as_transformers_reads

# Keys that say which class wrote the file, not what it computes.
_OF_CLASS = ("architectures", "id2label", "label2id", "dtype", "torch_dtype", "transformers_version")


@dataclasses.dataclass(frozen=True)
class HFModel:
    """See the module. text: the config.json, without the keys of its class."""

    text: str

    @property
    def is_exact(self) -> bool:
        """See `OtherModel`."""
        return _facts(self.text).is_exact

    def make(self, config: ModelConfig, *, recompute_layers: bool) -> HFTransformer:
        """See `OtherModel`."""
        hf = build_on_meta(_config(self.text))
        with torch.device("meta"):
            return HFTransformer(hf, config, recompute_layers=recompute_layers)

    def stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `OtherModel`."""
        from transformers.core_model_loading import revert_weight_conversion

        stored: dict[str, Tensor] = revert_weight_conversion(_for_names(self.text), dict(tensors))
        return stored

    def joined(self, stored: Mapping[str, Tensor]) -> Tensor:
        """See `OtherModel`."""
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


def read_other(raw: Mapping[str, Any], config: Any) -> ModelConfig:
    """The `ModelConfig` of a config.json, which transformers reads as `config`.

    Raises InputError, naming what differs, for a model that does not pass the gate.
    """
    known = {key: value for key, value in raw.items() if key not in _OF_CLASS}
    model = HFModel(json.dumps(known, sort_keys=True))
    return dataclasses.replace(model_config(config, _facts(model.text)), other=model)


def _config(text: str) -> Any:
    return as_transformers_reads(json.loads(text))


@functools.cache
def _facts(text: str) -> Facts:
    config = _config(text)
    try:
        return measure(config)
    except InputError as error:
        raise InputError(f"config.json: model_type {config.model_type!r} is not supported: {error}") from None


@functools.cache
def _for_names(text: str) -> Any:
    """A model on the meta device, for transformers' conversion of names."""
    return build_on_meta(_config(text))
