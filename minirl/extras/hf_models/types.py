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
from minirl.extras.hf_models.model import HFTransformer, build_on_meta, transformers_config
from minirl.model.config import ModelConfig
from minirl.model.families import is_classifier

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
        hf = build_on_meta(transformers_config(json.loads(self.text)))
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


def read_other(raw: Mapping[str, Any]) -> ModelConfig:
    """The `ModelConfig` of a config.json. Raises InputError for a model that transformers or minirl lacks."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = str(raw.get("model_type"))
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise InputError(f"config.json: model_type {name!r} is not a language model of this transformers")
    model = hf_model(raw)
    config = transformers_config(raw)
    shape = model_config(config, _facts(model.text))
    scalar_head = is_classifier(raw, config.num_labels)
    return dataclasses.replace(shape, scalar_head=scalar_head, other=model)


def hf_model(raw: Mapping[str, Any]) -> HFModel:
    """The model of a config.json."""
    return HFModel(
        json.dumps({key: value for key, value in raw.items() if key not in _OF_CLASS}, sort_keys=True)
    )


@functools.cache
def _facts(text: str) -> Facts:
    raw = json.loads(text)
    try:
        return measure(transformers_config(raw))
    except InputError as error:
        raise InputError(f"config.json: model_type {raw['model_type']!r} is not supported: {error}") from None


@functools.cache
def _for_names(text: str) -> Any:
    """A model on the meta device, for transformers' conversion of names."""
    return build_on_meta(transformers_config(json.loads(text)))
