"""Compare minirl with transformers (eager attention) on a small model that has the architecture of a config.json.

This measurement catches what a list of supported features would miss: logit soft caps, states that leak from one
sequence into the next, ignored positions, and RoPE frequencies that depend on the longest sequence. The small model has
all of the config's layers and attention types. Some of the compared sequences are longer than the small model's
attention windows and than the original context length of a scaled RoPE.
"""

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from minirl.errors import refuse
from minirl.extras.hf_models.model import HFTransformer, build_on_meta
from minirl.generation.engine import Engine
from minirl.model.attention import PackedLayout, Sequence
from minirl.model.config import ModelConfig
from minirl.model.transformer import Transformer
from minirl.rollouts import Request, RolloutId
from minirl.training.batch import Batch, pack
from minirl.training.scoring import score_batch

MAX_ERROR = 1e-4  # maximum relative error; correct models reach about 5e-7, or 3e-5 with sharp attention
MIN_WINDOW = 16  # the small model's smallest window
PROMPTS = (5, 30, 82)
NUM_NEW = 8
# High enough for all tokens to be about equally likely.
TEMPERATURE = 16.0
CPU = torch.device("cpu")
HEADS = 4
HEAD_DIM = 16
# Sizes of the small model. The first pattern that matches a whole key applies. The feed-forward width is not a multiple
# of the vector width, so elementwise functions have a scalar tail.
_SIZES = {
    r"vocab_size.*": 128,
    r"max_position_embeddings|n_positions|n_ctx|max_seq_len": 192,
    r"qk_head_dim": 2 * HEAD_DIM,
    r"mamba_n_heads": 8,
    r"mamba_d_head": HEAD_DIM,
    r".*(head_dim|head_size|kv_channels)": HEAD_DIM,
    r".*(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size)|intermediate_size_mlp": 100,
    r"hidden_size|n_embd|d_model|dim|embed_dim|embedding_size|word_embed_proj_dim|moe_latent_size": 64,
    r"((num|n)_)?(local_|routed_)?experts|(n_|num_)routed_experts|moe_num_experts|moe_expert_num": 4,
    r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts": 2,
    r"linear_num_(key|value)_heads": 2,
    r"n_group|topk_group|num_expert_group": 1,
    r"(q|kv)_lora_rank": 32,
}
_WINDOW = r".*(window|window_size|chunk_size|local_attention)"


def shrink_config(config: Any) -> tuple[Any, dict[int | None, int | None]]:
    """Return a config with small sizes, and a map from the small config's windows to the real windows."""
    shortened: dict[int, int] = {}  # maps real windows to short windows
    text = config.get_text_config()
    heads = text.num_attention_heads
    original = 96 if ends_at_original(text) else 32

    def shrink_value(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: shrink_value(str(name), inner) for name, inner in value.items()}
        if isinstance(value, list) and key.endswith("_factor"):  # one factor per pair of head channels
            return value[: HEAD_DIM // 2]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            return value
        if key.endswith("token_id"):
            return min(value, 2)
        if key == "original_max_position_embeddings":
            return original
        if re.fullmatch(_WINDOW, key):
            return shortened.setdefault(value, MIN_WINDOW + len(shortened))
        for pattern, size in _SIZES.items():
            if re.fullmatch(pattern, key):
                return size
        if re.fullmatch(r".*heads?", key):
            return HEADS if value == heads else min(value, HEADS // 2)
        return value

    shrunk = type(config).from_dict(shrink_value("", config.to_dict()))
    return shrunk, {None: None} | {short: real for real, short in shortened.items()}


def ends_at_original(config: Any) -> bool:
    """Whether RoPE rescales all frequencies once a sequence exceeds the original context length.

    Such a change would invalidate cached keys.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") in ("dynamic", "longrope")


@torch.no_grad()
def scramble_weights(hf: Any) -> None:
    """Randomize weights so that every module affects logprobs: no norm weight is 1, no bias is 0, soft caps apply."""
    generator = torch.Generator().manual_seed(0)
    embedding, head = hf.get_input_embeddings().weight, hf.get_output_embeddings().weight
    for parameter in hf.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim < 2:
            parameter.add_(noise, alpha=0.1)
            continue
        gain = 10.0 if parameter is head and head is not embedding else 1.3
        parameter.copy_(noise if parameter is embedding else noise * gain / parameter.shape[-1] ** 0.5)
    saved = hf.state_dict()
    for name, buffer in hf.named_buffers():
        if name in saved:
            buffer.add_(torch.randn(buffer.shape, generator=generator), alpha=0.1)


def model_config(config: Any, *, is_tied: bool) -> ModelConfig:
    """Return the `ModelConfig` for a transformers config, but with no attention windows."""
    text = config.get_text_config()
    inner_size = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    num_active = getattr(text, "num_experts_per_tok", None) or 1
    inner_size = max(inner_size, num_active * (getattr(text, "moe_intermediate_size", None) or inner_size))
    num_heads = text.num_attention_heads
    num_positions = text.max_position_embeddings
    if ends_at_original(text):
        original = text.rope_parameters.get("original_max_position_embeddings") or num_positions
        num_positions = min(num_positions, original)
    return ModelConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=inner_size,
        num_hidden_layers=text.num_hidden_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=getattr(text, "num_key_value_heads", None) or num_heads,
        head_dim=getattr(text, "qk_head_dim", None)
        or getattr(text, "head_dim", None)
        or text.hidden_size // num_heads,
        max_position_embeddings=num_positions,
        rms_norm_eps=0.0,
        layer_ropes=(),
        layer_windows=(),
        tie_word_embeddings=is_tied,
    )


def make_oracle(small: Any) -> Any:
    """Build the transformers model with eager attention and weights from `scramble_weights`."""
    from transformers import AutoModelForCausalLM

    small = copy.deepcopy(small)  # building a model modifies the RoPE parameters in its config
    oracle = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
    if oracle._can_set_experts_implementation():
        oracle.set_experts_implementation("eager")
    scramble_weights(oracle)
    return oracle


def check_native(config: Any, read: Callable[[Mapping[str, Any]], ModelConfig]) -> None:
    """Compare minirl's own modules with transformers' modules. Raises InputError if the logprobs differ.

    read: converts a config.json to a `ModelConfig`.
    """
    small, _ = shrink_config(config)
    oracle = make_oracle(small)
    model = Transformer(read(small.to_dict()))
    model.load_state_dict(oracle.state_dict(), assign=True)
    model.tie_weights()
    _compare(model, oracle)


def measure(config: Any) -> tuple[ModelConfig, bool]:
    """Return the `ModelConfig` for transformers' modules, and whether decoding matches scoring bitwise.

    Raises InputError, naming the difference, if minirl's results differ from transformers' results.
    """
    small, real_windows = shrink_config(config)
    oracle = make_oracle(small)
    refuse(
        not oracle._can_set_attn_implementation(),
        "its attention does not use transformers' AttentionInterface",
    )
    is_tied = oracle.get_output_embeddings().weight is oracle.get_input_embeddings().weight
    shape = model_config(small, is_tied=is_tied)
    model = HFTransformer(build_on_meta(small), shape)
    model.load_state_dict(oracle.state_dict(), strict=False, assign=True)
    model.tie_weights()
    attention_calls: list[Any] = []
    model.stream.attention_calls = attention_calls
    layout = PackedLayout((Sequence(8),), CPU)
    model(layout.positions + 5, layout.positions, layout)
    model.stream.attention_calls = None
    layers, windows, shapes = zip(*attention_calls, strict=True) if attention_calls else ((), (), ())
    refuse(
        layers != tuple(range(shape.num_hidden_layers)),
        f"expected one attention call in each layer, but attention was called in layers {list(layers)}; other layers "
        "may keep a different kind of state",
    )
    expected = (shape.num_key_value_heads, shape.head_dim)
    found = {tuple(keys[1:]) for keys in shapes}
    refuse(found != {expected}, f"expected keys of shape {expected} in every layer, found {found}")
    refuse(set(windows) - real_windows.keys(), "the model has attention windows that its config lacks")
    model.config = dataclasses.replace(shape, layer_windows=windows)
    real = dataclasses.replace(
        model_config(config, is_tied=is_tied),
        layer_windows=tuple(real_windows[window] for window in windows),
        passthrough_weight_patterns=tuple(oracle._keys_to_ignore_on_load_unexpected or ()),
    )
    return real, _compare(model, oracle)


@torch.no_grad()
def _compare(model: Any, oracle: Any) -> bool:
    """Compare the models' logprobs; return whether decoding matches scoring bitwise.

    Raises InputError if the models' logprobs differ.
    """
    engine = Engine(model, max_running_requests=8, cache_tokens=1024, dtype=torch.float32, device=CPU)
    requests = [
        Request(tuple(range(3, 3 + length)), RolloutId(i, 0), i, NUM_NEW, TEMPERATURE, frozenset())
        for i, length in enumerate(PROMPTS)
    ]
    rollouts = sorted(engine.generate(requests), key=lambda rollout: rollout.rollout_id)
    expected = []
    batch = pack(rollouts)
    for tokens in batch.tokens.split(list(batch.lengths)):
        logits = oracle(tokens[None], use_cache=False, return_dict=True).logits[0, -NUM_NEW - 1 : -1]
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        expected.append(logprobs.gather(1, tokens[-NUM_NEW:, None])[:, 0])

    def scored(batch: Batch) -> Tensor:
        return score_batch(model, batch)[0][batch.loss_index]

    packed = scored(batch)
    decoded = batch.sample_logprobs[batch.loss_index]
    # The comparisons are ordered so that the first difference has the simplest explanation.
    for got, wanted, reason in (
        (
            scored(batch.select(batch.sequences[:1])),
            expected[:1],
            "the attention, or changes to the logits after the head",
        ),
        (scored(batch.select(batch.sequences[1:2])), expected[1:2], "later positions (windows or RoPE)"),
        (
            packed,
            expected,
            "sequences depend on each other (a state, ignored positions, or RoPE for the longest)",
        ),
        (decoded, expected, "layers keep state besides keys and values"),
    ):
        error = float((got - torch.cat(wanted)).norm() / torch.cat(wanted).norm())
        refuse(
            not error < MAX_ERROR,
            f"a small model's logprobs differ from transformers' by {error:.0e}: {reason}",
        )
    return torch.equal(decoded, packed)
