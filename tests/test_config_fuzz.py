"""A config.json with one or two changes is rejected by name, or means the same as in transformers."""

import functools
import itertools
import json
import math
import random

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from minirl.errors import InputError
from minirl.model.attention import PackedLayout, Sequence
from minirl.model.batch_invariance import head_logits
from minirl.model.weights import load_unsharded_model
from support.families import CASES, LLAMA3_ROPE, make_checkpoint
from support.marks import slow

NUM_TOKENS = 40  # longer than the windows
THETA = {"rope_theta": 500.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
LLAMA3 = LLAMA3_ROPE | {"original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 90.0}
FULL, SLIDING = "full_attention", "sliding_attention"
NAMES = [
    *CASES,
    *(f"{name} classifier" for name in ("llama", "qwen2_window_above", "gemma3_text", "smollm3")),
]
# Config classes whose keys are added, with default and other values.
OTHER_CLASSES = (
    "Cohere2 Gemma2 Gemma3Text Granite Llama4Text Mixtral Olmo2 Phi3 Qwen3Next SmolLM3 StableLm".split()
)
OTHER_KEYS = (
    "add_cross_attention attention_chunk_size is_causal is_decoder layer_scale logits_scaling "
    "per_layer_config partial_rotary_factor pruned_heads quantization_config rope_scaling rope_parameters "
    "rope_theta rope_interleaved torchscript transformers_weights use_mrope sliding_window layer_types "
    "max_window_layers use_sliding_window head_dim attention_bias mlp_bias num_labels id2label hidden_act "
    "no_rope_layers no_rope_layer_interval sliding_window_pattern query_pre_attn_scalar use_bias "
    "attention_out_bias rope_local_base_freq original_max_position_embeddings hidden_activation".split()
)
DROP = object()
NUM_CHANGED = 20  # use 100 in a manual run
ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu2"]
NUMBERS = [0, -1, 1, 2, 3, 8, 16, 2**40, 0.0, 0.5, 1.0, 500.0, math.nan, math.inf]
LISTS = [[], [1], *([f"{kind}_attention"] * 2 for kind in ("full", "sliding", "chunked")), [FULL]]
ROPES = [
    {},
    {"a": 1},
    {"type": "linear", "factor": 2.0},
    LLAMA3,
    YARN,
    LINEAR | THETA,
    DEFAULT,
    {"rope_type": "default"},
]
ROPES += [{SLIDING: DEFAULT}, {SLIDING: DEFAULT, FULL: YARN}, {SLIDING: DEFAULT, FULL: None}]
VALUES = [DROP, None, False, True, "", "1", *NUMBERS, *LISTS, *ROPES, *ACTIVATIONS]
INNER_KEYS = "rope_theta type rope_type attention_factor truncate mscale 0 1".split()
FAST = ("llama_rope_llama3", "mistral_window")


def save_model(folder, name):
    """Save a case's model; return its config.json as transformers writes it, and as version 4 wrote it."""
    case, _, is_classifier = name.partition(" ")
    make_checkpoint(case, scalar_head=bool(is_classifier)).save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    rope = dict(raw["rope_parameters"])
    if "rope_theta" not in rope:  # each kind of layer has its own theta
        return [raw]
    before = {key: value for key, value in raw.items() if key != "rope_parameters"}
    return [raw, before | {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}]


def mutations(raw):
    """Return all changes of one key, even inside objects, as (path to the key, new value)."""
    found = []
    for key in dict.fromkeys([*raw, *OTHER_KEYS]):
        others = [keys[key] for _, keys, _ in CASES.values() if key in keys]
        value = raw.get(key)
        near = [value + 1, value * 2, value // 2] if isinstance(value, int) else []
        for new in [*VALUES, *others, *near]:
            found.append(((key,), new))
        if isinstance(value, dict):
            inner_values = [*VALUES, "llama3", "default", "yarn", "linear"]
            for inner in dict.fromkeys([*value, *INNER_KEYS]):
                found.extend(((key, inner), new) for new in inner_values)
    for key, default in keys_of_other_classes():
        if key not in raw:
            found.extend(((key,), new) for new in (default, None, False, True, 0, 1, 2.0))
    return found


@functools.cache
def keys_of_other_classes():
    """Return the keys of `OTHER_CLASSES` with their defaults."""
    configs = [getattr(transformers, f"{name}Config")() for name in OTHER_CLASSES]
    return [item for config in configs for item in config.to_dict().items()]


def mutated(raw, changes):
    """Return a copy of `raw` with these changes."""
    copy = json.loads(json.dumps(raw))
    for path, value in changes:
        place = copy
        for key in path[:-1]:
            place = place.get(key)
        if not isinstance(place, dict):
            continue
        if value is DROP:
            place.pop(path[-1], None)
        else:
            place[path[-1]] = value
    return copy


@torch.no_grad()
def outputs_here(folder, scalar_head):
    """Return minirl's logits or scores [T, ...] for one sequence, which fits into the model's context."""
    model = load_unsharded_model(folder, dtype=torch.float32, scalar_head=scalar_head)
    num_tokens = min(NUM_TOKENS, model.config.max_position_embeddings)
    layout = PackedLayout((Sequence(num_tokens),), torch.device("cpu"))
    hidden = model(torch.arange(num_tokens), layout.positions, layout)
    return model.score(hidden) if scalar_head else head_logits(hidden, model.head)


@torch.no_grad()
def outputs_there(folder, scalar_head, num_tokens):
    """Return transformers' logits or scores for the same sequence."""
    auto_class = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.arange(num_tokens)[None]
    return (
        model.score(model.model(tokens, use_cache=False)[0][0])
        if scalar_head
        else model(tokens, use_cache=False).logits[0]
    )


def verdict(folder, raw, changes):
    """Return the outcome: "refused", "equal" to transformers, "unchanged" or an error.

    A change that transformers rejects may not concern the model (`use_cache: 0.5`); then the model must equal the model
    without that change.
    """
    scalar_head = "Classification" in raw["architectures"][0]
    path = folder / "config.json"
    path.write_text(json.dumps(mutated(raw, changes)))
    try:
        got = outputs_here(folder, scalar_head)
    except InputError:
        return "refused"
    except Exception as error:
        return f"raises {error!r}"
    # All changes, then all but one, then none.
    for count in range(len(changes), -1, -1):
        for kept in itertools.combinations(changes, count):
            path.write_text(json.dumps(mutated(raw, kept)))
            try:
                expected = outputs_there(folder, scalar_head, len(got))
            except Exception as error:
                reason = f"accepts what transformers refuses: {error!r}"
                continue
            if got.shape == expected.shape and (got - expected).norm() <= 1e-5 * expected.norm():
                return "equal" if count == len(changes) else "unchanged"
            if count == len(changes):
                return "has other numbers than transformers"
    return reason


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in NAMES])
def test_a_changed_config_is_refused_or_means_what_it_means_in_transformers(tmp_path, name):
    """Changes drop a key, or set another type, zero, a huge value or another family's value. Fault 33.

    Other changes add keys from other families.
    """
    rng = random.Random(name)
    wrong = []
    forms = save_model(tmp_path, name)
    for raw in forms:
        assert verdict(tmp_path, raw, []) == "equal"
        singles = mutations(raw)
        for _ in range(NUM_CHANGED // len(forms)):
            changes = rng.sample(singles, rng.choice([1, 1, 1, 2]))
            result = verdict(tmp_path, raw, changes)
            if result not in ("refused", "equal", "unchanged"):
                wrong.append((changes, result))
    assert wrong == []
