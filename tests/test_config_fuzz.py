"""config.json with one or two changes: it is refused by name, or means the same as in transformers."""

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
from minirl.model.attention import PackedLayout
from minirl.model.weights import load_replica
from support.marks import slow

NUM_TOKENS = 24  # more than the windows have
NUM_CHANGED = {"llama": 30, "mistral": 30, "qwen2": 30, "qwen3": 30}  # of a family; 1,000 of each by hand
SHAPE = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "torch_dtype": "float32",
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": None,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
THETA = {"rope_theta": 500.0}
CLASSIFIER = {"id2label": {"0": "score"}, "label2id": {"score": 0}}
WINDOW = {"sliding_window": 5}
USED = {"use_sliding_window": True}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
LINEAR = {"rope_type": "linear", "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 90.0}
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 2.5, 3.0]}
FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA = WINDOW | {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "head_dim": 8}
MULTIPLIERS = ["attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"]
# name: (class, the model's own keys). Old files have `rope_theta` and `rope_scaling`, new ones `rope_parameters`.
BASES = {
    "llama": ("LlamaForCausalLM", THETA | {"rope_scaling": None, "pretraining_tp": 1, "mlp_bias": False}),
    "llama_llama3": ("LlamaForCausalLM", THETA | {"rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama_biases": (
        "LlamaForCausalLM",
        {"rope_parameters": LLAMA3 | THETA, "attention_bias": True, "mlp_bias": True, "head_dim": 8},
    ),
    "mistral": ("MistralForCausalLM", THETA | WINDOW),
    "qwen2": ("Qwen2ForCausalLM", THETA | WINDOW | USED | {"max_window_layers": 1}),
    "qwen3": (
        "Qwen3ForCausalLM",
        WINDOW | LAYERS | {"rope_parameters": {"rope_type": "default"} | THETA, "head_dim": 16, **USED},
    ),
    "qwen3_bias": ("Qwen3ForCausalLM", THETA | {"attention_bias": True, "head_dim": 8}),
    "llama_classifier": ("LlamaForSequenceClassification", THETA | CLASSIFIER),
    "qwen2_classifier": (
        "Qwen2ForSequenceClassification",
        THETA | WINDOW | CLASSIFIER | USED | {"max_window_layers": 0},
    ),
    "arcee": ("ArceeForCausalLM", {"rope_parameters": YARN | THETA, "hidden_act": "relu2", "mlp_bias": True}),
    "cwm": ("CwmForCausalLM", WINDOW | LAYERS | {"rope_parameters": LLAMA3 | THETA, "head_dim": 8}),
    "ernie4_5": ("Ernie4_5ForCausalLM", THETA | {"use_bias": True, "head_dim": 8}),
    "exaone4": ("Exaone4ForCausalLM", THETA | WINDOW | {"sliding_window_pattern": 2}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA | {"rope_scaling": LINEAR, "rope_theta": 500.0}),
    "gemma3_new": (
        "Gemma3ForCausalLM",
        GEMMA | LAYERS | {"rope_parameters": {SLIDING: DEFAULT, FULL: LINEAR | THETA}},
    ),
    "glm": ("GlmForCausalLM", THETA | {"attention_bias": True, "head_dim": 8, "partial_rotary_factor": 0.5}),
    "glm4": (
        "Glm4ForCausalLM",
        {"rope_parameters": THETA | DEFAULT | {"partial_rotary_factor": 0.75}, "head_dim": 8},
    ),
    "granite": ("GraniteForCausalLM", THETA | dict.fromkeys(MULTIPLIERS, 0.7)),
    "granitemoehybrid": (
        "GraniteMoeHybridForCausalLM",
        THETA
        | dict.fromkeys(MULTIPLIERS, 0.7)
        | {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope", "mamba_n_heads": 8}
        | {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48},
    ),
    "ministral": ("MinistralForCausalLM", THETA | WINDOW | LAYERS | {"head_dim": 8}),
    "ministral3": (
        "Ministral3ForCausalLM",
        {"rope_parameters": YARN | THETA | {"llama_4_scaling_beta": 0.3}, "head_dim": 8},
    ),
    "olmo2": ("Olmo2ForCausalLM", THETA | {"attention_bias": True}),
    "olmo3": ("Olmo3ForCausalLM", THETA | WINDOW | LAYERS | {"rope_scaling": YARN}),
    "phi3": (
        "Phi3ForCausalLM",
        THETA
        | {"rope_scaling": LONGROPE, "original_max_position_embeddings": 30, "partial_rotary_factor": 0.75},
    ),
    "phi3_window": ("Phi3ForCausalLM", THETA | WINDOW),
    "qwen3_5_text": (
        "Qwen3_5ForCausalLM",
        {
            "layer_types": ["linear_attention", FULL],
            "rope_parameters": THETA | DEFAULT | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 1]},
            "head_dim": 8,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 6,
            "linear_conv_kernel_dim": 3,
            "full_attention_interval": 2,
            "attn_output_gate": True,
        },
    ),
    "seed_oss": (
        "SeedOssForCausalLM",
        THETA
        | {
            "attention_bias": True,
            "attention_out_bias": True,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
        },
    ),
    "smollm3": (
        "SmolLM3ForCausalLM",
        THETA | WINDOW | USED | {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
    ),
    "gemma3_classifier": (
        "Gemma3TextForSequenceClassification",
        GEMMA | CLASSIFIER | {"sliding_window_pattern": 2},
    ),
    "smollm3_classifier": ("SmolLM3ForSequenceClassification", THETA | CLASSIFIER),
}
# The classes whose keys are added, with their defaults and with other values.
OTHER_CLASSES = (
    "Cohere2 Gemma2 Gemma3Text Glm4 Granite Llama4Text Ministral Mixtral Olmo2 Phi3 Qwen2Moe Qwen3Next "
    "SmolLM3 StableLm Starcoder2".split()
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
ACTIVATIONS = ["silu", "gelu", "gelu_pytorch_tanh", "relu2"]
NUMBERS = [0, -1, 1, 2, 3, 8, 16, 2**40, 0.0, 0.5, 1.0, 500.0, math.nan, math.inf]
LISTS = [[], [1], *([f"{kind}_attention"] * 2 for kind in ("full", "sliding", "chunked")), ["full_attention"]]
OBJECTS = [{}, {"a": 1}, {"type": "linear", "factor": 2.0}, LLAMA3, LLAMA3 | THETA]
ROPES = [
    {"rope_type": "default"},
    {"rope_type": "default", "rope_theta": 9.0},
    YARN,
    LINEAR | THETA,
    LONGROPE,
]
ROPES_OF_KINDS = [{SLIDING: DEFAULT}, {SLIDING: DEFAULT, FULL: YARN}, {SLIDING: DEFAULT, FULL: None}]
VALUES = [DROP, None, False, True, "", "1", *NUMBERS, *LISTS, *OBJECTS, *ROPES, *ROPES_OF_KINDS, *ACTIVATIONS]
FAST = ("llama_llama3", "mistral", "qwen2", "qwen3_bias")


def raw_config(name):
    architecture, keys = BASES[name]
    model_type = getattr(transformers, architecture).config_class.model_type
    shape = {key: value for key, value in SHAPE.items() if key != "hidden_act" or "gemma3" not in name}
    return {"architectures": [architecture], "model_type": model_type, **shape, **keys}


def write_config(folder, raw):
    (folder / "config.json").write_text(json.dumps(raw))


def make_model(folder, raw):
    """Save a model at which every feature matters: norms off 1, biases off 0, sharp attention."""
    folder.mkdir()
    write_config(folder, raw)
    config = transformers.AutoConfig.from_pretrained(folder)
    model = getattr(transformers, raw["architectures"][0])(config)
    generator = torch.Generator().manual_seed(0)
    for parameter_name, param in model.named_parameters():
        noise = torch.randn(param.shape, generator=generator)
        if param.ndim == 1:
            param.data = noise * 0.5 + ("norm" in parameter_name and "gemma3" not in folder.name)
        else:
            gain = 2.0 if "q_proj" in parameter_name or "k_proj" in parameter_name else 1.0
            param.data = gain * noise / (1 if "embed" in parameter_name else param.shape[1] ** 0.5)
    model.save_pretrained(folder)
    return folder


def mutations(raw):
    """All changes of one key, also within objects: the path to a key, and its new value."""
    found = []
    for key in dict.fromkeys([*raw, *OTHER_KEYS]):
        others = [raw_config(name)[key] for name in BASES if key in raw_config(name)]
        value = raw.get(key)
        near = [value + 1, value * 2, value // 2] if isinstance(value, int) else []
        for new in [*VALUES, *others, *near]:
            found.append(((key,), new))
        if isinstance(value, dict):
            for inner in dict.fromkeys(
                [
                    *value,
                    "rope_theta",
                    "type",
                    "rope_type",
                    "attention_factor",
                    "truncate",
                    "mscale",
                    "0",
                    "1",
                ]
            ):
                found.extend(((key, inner), new) for new in [*VALUES, "llama3", "default", "yarn", "linear"])
    for key, default in keys_of_other_classes():
        if key not in raw:
            found.extend(((key,), new) for new in (default, None, False, True, 0, 1, 2.0))
    return found


@functools.cache
def keys_of_other_classes():
    """The keys of `OTHER_CLASSES` with their defaults."""
    configs = [getattr(transformers, f"{name}Config")() for name in OTHER_CLASSES]
    return [item for config in configs for item in config.to_dict().items()]


def mutated(raw, changes):
    """A copy of `raw` with these changes."""
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
    """Logits or scores [T, ...] of one sequence, as long as the model's positions allow."""
    model = load_replica(folder, dtype=torch.float32, scalar_head=scalar_head)
    num_tokens = min(NUM_TOKENS, model.config.max_position_embeddings)
    layout = PackedLayout((num_tokens,), torch.device("cpu"))
    hidden = model(torch.arange(num_tokens), layout.positions, layout)
    return model.score(hidden) if scalar_head else model.lm_head(hidden)


@torch.no_grad()
def outputs_there(folder, scalar_head, num_tokens):
    """The same in transformers."""
    auto_class = AutoModelForSequenceClassification if scalar_head else AutoModelForCausalLM
    model = auto_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.arange(num_tokens)[None]
    return model.score(model.model(tokens, use_cache=False)[0][0]) if scalar_head else model(tokens).logits[0]


def verdict(folder, raw, changes):
    """The fate of the folder: "refused", "equal" to transformers, "unchanged" or an error.

    Where transformers refuses it for one of the changes, that change may have no part in the model
    (`use_cache: 0.5`): then it is the model without it.
    """
    scalar_head = "Classification" in raw["architectures"][0]
    write_config(folder, mutated(raw, changes))
    try:
        got = outputs_here(folder, scalar_head)
    except InputError:
        return "refused"
    except Exception as error:
        return f"raises {error!r}"
    # All changes, then all but one, then none.
    for count in range(len(changes), -1, -1):
        for kept in itertools.combinations(changes, count):
            write_config(folder, mutated(raw, kept))
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


@pytest.mark.parametrize("name", [name if name in FAST else slow(name) for name in BASES])
def test_a_changed_config_is_refused_or_means_what_it_means_in_transformers(tmp_path, name):
    """Of every key: left out, another type, zero, far too large, of another family; and keys of other families.

    Fault 33.
    """
    raw = raw_config(name)
    folder = make_model(tmp_path / name, raw)
    assert verdict(folder, raw, []) == "equal"
    singles = mutations(raw)
    rng = random.Random(name)
    wrong = []
    for _ in range(NUM_CHANGED.get(raw["model_type"], 8)):
        changes = rng.sample(singles, rng.choice([1, 1, 1, 2]))
        result = verdict(folder, raw, changes)
        if result not in ("refused", "equal", "unchanged"):
            wrong.append((changes, result))
    assert wrong == []
