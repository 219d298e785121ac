"""Compare a small model of a config.json, as minirl runs it, with transformers' eager attention.

What a list of supported features forgets is refused by this measurement: soft caps of logits, states that run from one
sequence into the next, positions that are ignored, ropes that depend on the longest sequence. The small model has all
layers of the config and its kinds of attention. Windows and the original positions of a stretched rope are so
short that the compared sequences pass them.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from minirl.errors import InputError, refuse
from minirl.extras.hf_models.model import HFTransformer, build_on_meta
from minirl.generation.kv_cache import KVCache
from minirl.model.attention import Layout, PackedLayout
from minirl.model.batch_invariance import head_logits
from minirl.model.config import ModelConfig

MAX_ERROR = 1e-4  # relative, of fp32 logits; right models have 5e-7, with sharp attention 3e-5
# The least window.
FIRST_WINDOW = 16
LENGTHS = (36, 14, 94)
PROMPTS = (30, 8, 88)
HEADS = 4
HEAD_DIM = 16
# The sizes of the small model, by patterns of the whole key; the first that fits.
_SIZES = (
    (r"vocab_size.*", 128),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len", 192),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r".*(head_dim|head_size|kv_channels)", HEAD_DIM),
    (r".*(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size)|intermediate_size_mlp", 96),
    (r"hidden_size|n_embd|d_model|dim|embed_dim|embedding_size|word_embed_proj_dim|moe_latent_size", 64),
    (r"((num|n)_)?(local_|routed_)?experts|(n_|num_)routed_experts|moe_num_experts|moe_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_top_?k|moe_k|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|num_expert_group", 1),
    (r"(q|kv)_lora_rank", 32),
)
_WINDOW = r".*(window|window_size|chunk_size|local_attention)"


class Facts(NamedTuple):
    """What the comparison found: windows of layers, the shape of keys, whether decoding has the bits of scoring."""

    windows: tuple[int | None, ...]
    num_kv_heads: int
    head_dim: int
    is_tied: bool
    is_exact: bool


def small_config(config: Any) -> tuple[Any, dict[int | None, int | None]]:
    """A config with small sizes, and the real window for each of its windows."""
    windows: dict[int | None, int | None] = {None: None}
    text = config.get_text_config()
    heads = text.num_attention_heads
    original = 96 if ends_at_original(text) else 32

    def shrink(values: Mapping[str, Any]) -> dict[str, Any]:
        return {key: small(str(key), value) for key, value in values.items()}

    def small(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return shrink(value)
        if key.endswith("_factor") and isinstance(
            value, list
        ):  # longrope: a number for each pair of channels
            return value[: HEAD_DIM // 2]
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            return value
        if key.endswith("token_id"):
            return min(value, 2)
        if key == "original_max_position_embeddings":
            return original
        if re.fullmatch(_WINDOW, key):
            known = [short for short, real in windows.items() if real == value]
            short = known[0] if known else FIRST_WINDOW + len(windows) - 1
            windows[short] = value
            return short
        if re.fullmatch(r".*(heads?|kv_heads|multi_query_group_num)", key):
            return HEADS if value == heads else min(value, HEADS // 2)
        return next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), value)

    return type(config).from_dict(shrink(config.to_dict())), windows


def ends_at_original(config: Any) -> bool:
    """Whether the rope changes all frequencies for sequences beyond the original positions: cached keys lack that."""
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_type") in ("dynamic", "longrope")


@torch.no_grad()
def scramble(hf: Any) -> None:
    """Values at which everything matters: vectors off 0 and 1, and logits that a soft cap would change."""
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


def model_config(config: Any, facts: Facts) -> ModelConfig:
    """The shape of a model of transformers' config."""
    text = config.get_text_config()
    inner_size = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    num_active = getattr(text, "num_experts_per_tok", None) or 1
    inner_size = max(inner_size, num_active * (getattr(text, "moe_intermediate_size", None) or inner_size))
    num_positions = text.max_position_embeddings
    if ends_at_original(text):
        original = text.rope_parameters.get("original_max_position_embeddings") or num_positions
        num_positions = min(num_positions, original)
    return ModelConfig(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        intermediate_size=inner_size,
        num_hidden_layers=text.num_hidden_layers,
        num_attention_heads=text.num_attention_heads,
        num_key_value_heads=facts.num_kv_heads,
        head_dim=facts.head_dim,
        max_position_embeddings=num_positions,
        rms_norm_eps=0.0,
        ropes=(),
        layer_ropes=(),
        layer_windows=facts.windows,
        tie_word_embeddings=facts.is_tied,
    )


def measure(config: Any) -> Facts:
    """Compare, see the module. Raises InputError, naming what differs."""
    try:
        return _measure(config)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"a small model of it does not run: {error!r}") from error


@torch.no_grad()
def _measure(config: Any) -> Facts:
    from transformers import AutoModelForCausalLM

    small, real_windows = small_config(config)
    oracle = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager").eval()
    if oracle._can_set_experts_implementation():
        oracle.set_experts_implementation("eager")
    scramble(oracle)
    refuse(
        not oracle._can_set_attn_implementation(),
        "its attention does not use transformers' AttentionInterface",
    )
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(3, 100, (length,), generator=generator) for length in LENGTHS]
    expected = [oracle(sequence[None], use_cache=False).logits[0] for sequence in sequences]
    text = small.get_text_config()
    is_tied = oracle.get_output_embeddings().weight is oracle.get_input_embeddings().weight
    unknown = Facts((), 1, 1, is_tied=is_tied, is_exact=False)
    model = HFTransformer(build_on_meta(small), model_config(small, unknown))
    model.load_state_dict(oracle.state_dict(), strict=False, assign=True)
    model.tie_weights()

    # In the order in which a difference has the plainest reason.
    calls: list[Any] = []
    model.stream.calls = calls
    _check(model, sequences[1:2], expected[1:2], "its attention, or what it does to logits after the head")
    model.stream.calls = None
    _check(model, sequences[:1], expected[:1], "windows, or ropes at later positions")
    _check(model, [*sequences[1::-1]], expected[1::-1], "a sequence sees another, or positions are ignored")
    packed = _check(model, sequences, expected, "it depends on the longest sequence")
    shapes = {shapes for _, _, shapes in calls}
    refuse(len(shapes) != 1, f"its layers have keys of several shapes: {sorted(shapes)}")
    layers = [layer for layer, _, _ in calls]
    refuse(
        layers != list(range(text.num_hidden_layers)), f"its layers {layers} have attention, not each once"
    )
    ((query, key, _),) = shapes
    kv_heads, head_dim = heads_of(text)
    refuse(tuple(key[1:]) != (kv_heads, head_dim), f"its keys have the shape {tuple(key[1:])}")
    small_windows = [window for _, window, _ in calls]
    refuse(set(small_windows) - real_windows.keys(), "it has windows that its config does not say")
    decoded = _decoded(model, sequences, dict(enumerate(small_windows)), query[1] // kv_heads)
    of_packed = torch.cat([part[n:] for part, n in zip(packed, PROMPTS, strict=True)])
    refuse(
        _error(decoded, of_packed) > MAX_ERROR,
        "cached decoding: layers keep another state than keys and values",
    )
    windows = tuple(real_windows[window] for window in small_windows)
    return Facts(windows, *heads_of(config.get_text_config()), is_tied, torch.equal(decoded, of_packed))


def heads_of(config: Any) -> tuple[int, int]:
    """The number of key heads, and the width of a head's keys."""
    heads = config.num_attention_heads
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    return getattr(config, "num_key_value_heads", None) or heads, width or config.hidden_size // heads


def _run(model: HFTransformer, tokens: Tensor, layout: Layout) -> Tensor:
    """Logits [T, V] of the stream."""
    return head_logits(model(tokens, layout.positions, layout), model.lm_head.weight)


def _check(
    model: HFTransformer, sequences: list[Tensor], expected: list[Tensor], reason: str
) -> tuple[Tensor, ...]:
    """The logits of packed sequences. Raises InputError, with the reason, if they differ from the expected ones."""
    lengths = tuple(map(len, sequences))
    got = _run(model, torch.cat(sequences), PackedLayout(lengths, torch.device("cpu")))
    error = _error(got, torch.cat(expected))
    refuse(
        not error < MAX_ERROR,
        f"a small model of it differs from transformers' by {error:.0e} of the logits: {reason}",
    )
    return got.split(lengths)


def _error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def _decoded(
    model: HFTransformer, sequences: list[Tensor], windows: dict[int, int | None], num_groups: int
) -> Tensor:
    """The logits of the tokens after PROMPTS, decoded one after another with a cache, sequence by sequence."""
    kv_heads, head_dim = heads_of(model._hf.config.get_text_config())
    cache = KVCache(
        windows,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        num_query_groups=num_groups,
        num_tokens=1024,
        max_sequences=len(sequences),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    rows = [row for row in map(cache.add, PROMPTS) if row is not None]
    prompts = torch.cat([sequence[:n] for sequence, n in zip(sequences, PROMPTS, strict=True)])
    _run(model, prompts, cache.prefill_layout(rows))
    steps = []
    for i in range(LENGTHS[0] - PROMPTS[0]):
        for row in rows:
            cache.extend(row)
        tokens = torch.stack([sequence[n + i] for sequence, n in zip(sequences, PROMPTS, strict=True)])
        steps.append(_run(model, tokens, cache.decode_layout(torch.tensor(rows))))
    return torch.stack(steps, 1).flatten(0, 1)
