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
from minirl.generation.engine import Engine
from minirl.model.attention import PackedLayout
from minirl.model.config import ModelConfig
from minirl.rollouts import Request, Rollout, RolloutId
from minirl.training.batch import pack
from minirl.training.scoring import score_batch

MAX_ERROR = 1e-4  # relative; right models have 5e-7, with sharp attention 3e-5
# The width of feed-forwards is no multiple of a vector, so that functions of it have a scalar tail.
# The least window.
FIRST_WINDOW = 16
PROMPTS = (5, 30, 82)
NUM_NEW = 8
# So high that the tokens are about equally likely.
TEMPERATURE = 16.0
CPU = torch.device("cpu")
HEADS = 4
HEAD_DIM = 16
# The sizes of the small model, by patterns of the whole key; the first that fits.
_SIZES = (
    (r"vocab_size.*", 128),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len", 192),
    (r"qk_head_dim", 2 * HEAD_DIM),
    (r"mamba_n_heads", 8),
    (r"mamba_d_head", HEAD_DIM),
    (r".*(head_dim|head_size|kv_channels)", HEAD_DIM),
    (r".*(intermediate_size|ffn_dim|n_inner|d_ff|ffn_hidden_size)|intermediate_size_mlp", 100),
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
        if isinstance(value, list) and key.endswith("_factor"):  # of each pair of a head's channels
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
        sizes = [size for pattern, size in _SIZES if re.fullmatch(pattern, key)]
        if not sizes and re.fullmatch(r".*heads?", key):
            return HEADS if value == heads else min(value, HEADS // 2)
        return sizes[0] if sizes else value

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


@torch.no_grad()
def measure(config: Any) -> Facts:
    """Compare, see the module. Raises InputError, naming what differs."""
    try:
        return _measure(config)
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"a small model of it does not run: {error!r}") from error


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
    is_tied = oracle.get_output_embeddings().weight is oracle.get_input_embeddings().weight
    kv_heads, head_dim = heads_of(small.get_text_config())
    facts = Facts((), kv_heads, head_dim, is_tied=is_tied, is_exact=False)
    model = HFTransformer(build_on_meta(small), model_config(small, facts))
    model.load_state_dict(oracle.state_dict(), strict=False, assign=True)
    model.tie_weights()
    calls: list[Any] = []
    model.stream.calls = calls
    layout = PackedLayout((8,), CPU)
    model(layout.positions + 5, layout.positions, layout)
    model.stream.calls = None
    layers = [layer for layer, _, _ in calls]
    refuse(
        layers != list(range(model.config.num_hidden_layers)),
        f"attention is called in its layers {layers}, not once in each; others may keep another state",
    )
    shapes = {tuple(shape[1:]) for _, _, shape in calls}
    refuse(shapes != {(kv_heads, head_dim)}, f"its layers have keys of the shapes {shapes}")
    windows = tuple(window for _, window, _ in calls)
    refuse(set(windows) - real_windows.keys(), "it has windows that its config does not say")
    model.config = model_config(small, facts._replace(windows=windows))
    is_exact = _compare(model, oracle)
    windows = tuple(real_windows[window] for window in windows)
    return Facts(windows, *heads_of(config.get_text_config()), is_tied, is_exact)


def _compare(model: Any, oracle: Any) -> bool:
    """Generate with both; returns whether decoding has the bits of scoring. Raises InputError if the models differ."""
    engine = Engine(model, max_running_requests=8, cache_tokens=1024, dtype=torch.float32, device=CPU)
    requests = [
        Request(tuple(range(3, 3 + length)), RolloutId(i, 0), i, NUM_NEW, TEMPERATURE, frozenset())
        for i, length in enumerate(PROMPTS)
    ]
    rollouts = sorted(engine.generate(requests), key=lambda rollout: rollout.rollout_id)
    expected = []
    for rollout in rollouts:
        logits = oracle(rollout.tokens[None], use_cache=False).logits[0, -NUM_NEW - 1 : -1]
        logprobs = (logits / TEMPERATURE).log_softmax(-1)
        expected.append(logprobs.gather(1, rollout.tokens[-NUM_NEW:, None])[:, 0])

    def check(got: Tensor, wanted: Tensor, reason: str) -> None:
        error = float((got - wanted).norm() / wanted.norm())
        refuse(
            not error < MAX_ERROR,
            f"logprobs of a small model of it differ from transformers' by {error:.0e}: {reason}",
        )

    def scored(*rollouts: Rollout) -> Tensor:
        batch = pack(rollouts)
        return score_batch(model, batch)[0][batch.loss_index]

    # In the order in which a difference has the plainest reason.
    check(scored(rollouts[0]), expected[0], "its attention, or what it does to logits after the head")
    check(scored(rollouts[1]), expected[1], "later positions, by windows or ropes")
    packed, wanted = scored(*rollouts), torch.cat(expected)
    check(
        packed,
        wanted,
        "a sequence depends on others, by a state, ignored positions, or a rope of the longest",
    )
    decoded = torch.cat([rollout.sample_logprobs[-NUM_NEW:] for rollout in rollouts])
    check(decoded, wanted, "layers keep another state than keys and values")
    return torch.equal(decoded, packed)


def heads_of(config: Any) -> tuple[int, int]:
    """The number of key heads, and the width of a head's keys."""
    heads = config.num_attention_heads
    width = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None)
    return getattr(config, "num_key_value_heads", None) or heads, width or config.hidden_size // heads
