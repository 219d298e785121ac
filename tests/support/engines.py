"""Engines over tiny random models, and requests for them."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minirl.generation.engine import Engine, Request
from minirl.generation.sampling import request_key
from minirl.model import attention
from minirl.model.attention import PackedLayout
from minirl.model.config import Adapters
from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer
from minirl.rollouts import RolloutId, SampledSequence, make_token_stream
from minirl.training.batch import Batch, pack
from minirl.training.scoring import score_batch
from support.models import RAW_CONFIG

CPU = torch.device("cpu")
VOCAB = 48
STOP_IDS = frozenset({3, 11, 29})
WINDOWS = {"full": (None, None), "windowed": (150, 150), "mixed": (None, 20), "states": (None, None)}
DELTA_NET = {
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 3,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 40,
}


def make_model(
    attention: str, dtype: torch.dtype, *, seed: int = 0, adapters: Adapters | None = None
) -> Transformer:
    """Return a random model whose next-token distribution depends on the whole context, neither flat nor peaked."""
    raw = {
        **RAW_CONFIG,
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 131,
    }
    raw |= {
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        **(DELTA_NET if attention == "states" else {}),
    }
    config = config_from_dict(raw)
    config = replace(config, layer_windows=WINDOWS[attention], adapters=adapters)
    model = Transformer(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if param.ndim >= 2:
                gain = 1.0 if "embed" in name else (1.3 if "lm_head" in name else 1.5) / param.shape[1] ** 0.5
                param.copy_(torch.randn(param.shape, generator=generator) * gain)
    return model.to(dtype)


cached_model = functools.cache(make_model)


def make_engine(
    model: Transformer,
    *,
    max_running_requests: int = 64,
    cache_tokens: int = 8192,
    headroom_tokens: int = 0,
    **kwargs: int | bool,
) -> Engine:
    """Return an engine without headroom tokens, so that full caches preempt short requests too."""
    dtype = model.lm_head.weight.dtype
    return Engine(
        model,
        max_running_requests=max_running_requests,
        cache_tokens=cache_tokens,
        headroom_tokens=headroom_tokens,
        dtype=dtype,
        device=CPU,
        **kwargs,
    )


def has_memory(engine: Engine) -> bool:
    """Return whether the cache, or a CUDA graph that reads the cache, is allocated."""
    return "pool" in vars(engine._cache) or engine._graphs is not None


def make_request(
    prompt: Sequence[int],
    *,
    number: int = 0,
    member: int = 0,
    max_new_tokens: int = 32,
    temperature: float = 1.0,
    stop_ids: frozenset[int] = STOP_IDS,
) -> Request:
    key = request_key(7, purpose="train", prompt_ordinal=number, sample=member)
    return Request(tuple(prompt), RolloutId(number, member), key, max_new_tokens, temperature, stop_ids)


def make_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, VOCAB, (length,), generator=generator).tolist()


def next_turn(
    request: Request, rollout: SampledSequence, reply: Sequence[int], num_tokens: int, **changes
) -> Request:
    """Return the request for another turn of up to `num_tokens` after a reply."""
    sampled = np.concatenate([rollout.tokens_after_prompt, make_token_stream(reply)])
    start = len(sampled)
    return replace(request, sampled=sampled, turn_start=start, max_new_tokens=start + num_tokens, **changes)


def mixed_requests() -> list[Request]:
    """Return pairs of requests at two temperatures, with short prompts and prompts around a cache block's size."""
    return [
        make_request(make_prompt(length), number=number, member=member, temperature=(1.0, 0.7)[number % 2])
        for number, length in enumerate((5, 117, 126, 127, 128, 129, 150))
        for member in range(2)
    ]


def finish(engine: Engine, count: int) -> list[SampledSequence]:
    rollouts: list[SampledSequence] = []
    for _ in range(4000):
        rollouts += engine.step()
        if len(rollouts) == count:
            return rollouts
    raise AssertionError(f"{len(rollouts)} of {count} rollouts after 4000 steps")


def run(engine: Engine, requests: Sequence[Request], *, weight_version: int = 0) -> list[SampledSequence]:
    """Generate like `Engine.generate`, but fail instead of hanging without progress."""
    engine.submit(requests, weight_version=weight_version)
    return finish(engine, len(requests))


def hidden_states(model: Transformer, *sequences: Tensor) -> Tensor:
    """Return the hidden states [T, D] of packed sequences."""
    layout = PackedLayout(tuple(attention.Sequence(len(tokens)) for tokens in sequences), CPU)
    return model(torch.cat(sequences), layout.positions, layout)


def scores_of(model: Transformer, rollouts: Sequence[SampledSequence]) -> Tensor:
    """Return the scoring path's logprobs of packed rollouts."""
    return score_batch(model, with_infos(pack(rollouts), num_prompt_tokens=0))[0]


def score_at(model: Transformer, batch: Batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Return `score_batch` of tokens that were all sampled at one temperature."""
    return score_batch(model, with_infos(batch, temperature=temperature))


def with_infos(batch: Batch, **fields: Any) -> Batch:
    """Return a copy of the batch with these fields replaced in all sequences."""
    return batch.replace(sequences=tuple(sequence._replace(**fields) for sequence in batch.sequences))
