"""The memory of a rank: one budget, from which the sizes that flags leave open follow (docs/memory.md).

It counts what is large. The rest, such as a microbatch's logits, tables, libraries and fragments, is in the margin.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from minirl.generation.engine import PREFILL_TOKENS
from minirl.model.attention import PAGED_BLOCK
from minirl.model.config import ModelConfig
from minirl.model.transformer import on_meta

USABLE = 0.9  # of the free memory; the rest is the margin
CPU_FACTOR = 2.0  # of activations, relative to CUDA: measured 0.5 to 1.8, with sequences of 4,096 tokens 3.2
MOST_REQUESTS = {"cpu": 256, "cuda": 1024}
CACHE_TOKENS = 65536  # more only where a rank's completions can fill it


@dataclass(frozen=True)
class Sizes:
    """What a rank does at a time, and what it holds. shard_weights: it also shards gradients."""

    max_running_requests: int
    cache_tokens: int
    max_tokens_per_microbatch: int
    recompute_layers: bool
    shard_gradients: bool
    shard_weights: bool = False


@dataclass(frozen=True)
class Workload:
    """What a run asks of a rank, besides `Sizes`.

    trained: the policy, then value models, which with shares_base are adapters on its weights. frozen: by name.
    longest: tokens of the longest prompt with its completion. step_tokens: the most that the rank trains on in a step.
    requests: those that it has at a time. offloads_optimizer: to the memory of a GPU's host, where frozen models are.
    """

    device_type: str
    free: float
    num_ranks: int
    dtype: torch.dtype
    trained: Sequence[ModelConfig]
    frozen: Mapping[str, ModelConfig]
    longest: int
    enough_tokens: int
    step_tokens: int
    requests: int
    trains: bool = True
    shares_base: bool = False
    offloads_optimizer: bool = False


@dataclass(frozen=True)
class Budget:
    """The bytes that a rank needs, by name: always, to score and train, to decode. room: for the last two."""

    room: float
    always: Mapping[str, float]
    training: Mapping[str, float]
    decoding: Mapping[str, float]

    def fits(self, *, keeps_cache: bool = False) -> bool:
        """True if the run fits. keeps_cache: and what decoding needs can stay while the rank trains."""
        phases = sum(self.training.values()), sum(self.decoding.values())
        return (sum(phases) if keeps_cache else max(phases)) <= self.room


@functools.cache
def num_parameters(model: ModelConfig, *, trained: bool = False) -> int:
    """The parameters of a model of this shape, or those that are trained; tied ones count once."""
    return sum(p.numel() for p in on_meta(model).parameters() if p.requires_grad or not trained)


def budget(work: Workload, sizes: Sizes) -> Budget:
    """The bytes that a rank needs with these sizes."""
    always, parked = _held_bytes(work, sizes)
    training = _update_bytes(work, sizes) if work.trains else {}
    if parked > sum(training.values()):
        training = {"a parked model": parked}
    room = USABLE * work.free - sum(always.values())
    return Budget(room, always, training, _decoding_bytes(work, sizes))


def _held_bytes(work: Workload, sizes: Sizes) -> tuple[dict[str, float], float]:
    """The bytes of what stays on the rank, by name, and of the largest model that the host holds between its uses."""
    itemsize = work.dtype.itemsize
    num_shards = work.num_ranks if sizes.shard_weights else 1
    shares_base = work.shares_base and not sizes.shard_weights
    wholly_held = work.trained[:1] if shares_base else work.trained
    held = {"weights": itemsize * sum(_num_held(model, num_shards) for model in wholly_held)}
    if work.trains and not work.offloads_optimizer:
        held["masters and moments"] = 12 * _num_trained(work) / work.num_ranks
    parked = 0.0
    for name, model in work.frozen.items():
        if sizes.shard_weights and name in ("reference", "teacher"):
            held[name] = itemsize * _num_held(model, num_shards)
        elif work.device_type == "cuda":
            parked = max(parked, itemsize * num_parameters(model))
        else:
            held[name] = itemsize * num_parameters(model)
    return held, parked


def _update_bytes(work: Workload, sizes: Sizes) -> dict[str, float]:
    """The bytes of an update, by name."""
    policy = work.trained[0]
    gradients = 4.0 * _num_trained(work)
    if sizes.shard_gradients:
        gradients = 0.0 if work.offloads_optimizer else gradients / work.num_ranks
    activations = max(_activation_bytes(work, sizes, model) for model in work.trained)
    update = {"gradients": gradients, "activations": activations}
    if sizes.shard_weights:
        layer = num_parameters(policy) / policy.num_hidden_layers
        update["gathered weights"] = work.dtype.itemsize * 2 * layer
    return update


def _num_trained(work: Workload) -> int:
    return sum(num_parameters(model, trained=True) for model in work.trained)


def _num_held(model: ModelConfig, num_shards: int) -> float:
    """The parameters that a rank holds: all that are needed whole, and its rows of the layers'."""
    return _num_embeddings(model) + (num_parameters(model) - _num_embeddings(model)) / num_shards


def _num_embeddings(model: ModelConfig) -> int:
    """The parameters of embedding and head."""
    return model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)


def _layer_bytes(work: Workload, model: ModelConfig) -> float:
    """The bytes that a layer keeps of a token for backward, which are also enough for its forward.

    They are exact for Llama and Qwen2, and up to 14 % off for other families.
    """
    queries = model.num_attention_heads * model.head_dim
    kept = 4 * model.hidden_size + 3 * model.intermediate_size + (4 + 2 * model.qk_norm) * queries
    factor = CPU_FACTOR if work.device_type == "cpu" else 1.0
    if model.norm_adds_one:  # their inputs are kept in fp32
        factor *= 1.35
    if model.other is not None:  # transformers' rotation, gate and other norms keep more (docs/families.md)
        factor *= 1.5
    return factor * work.dtype.itemsize * kept


def _activation_bytes(work: Workload, sizes: Sizes, model: ModelConfig) -> float:
    """The bytes of a microbatch, or those of the sums at its end."""
    itemsize = work.dtype.itemsize
    layer = _layer_bytes(work, model)
    kept = itemsize * model.hidden_size if sizes.recompute_layers else layer
    delta_rule = 80 * model.delta_net.num_channels if model.delta_net else 0  # measured, in one layer
    token = model.num_hidden_layers * kept + (1.4 if sizes.recompute_layers else 0.4) * layer + delta_rule
    activations = min(sizes.max_tokens_per_microbatch, work.step_tokens) * token
    if model.adapters:
        return activations
    # When the activations are gone, gradients of embedding and head are summed over ranks, or on the host.
    summed = 12 if work.num_ranks == 1 else itemsize + 4
    sums = sizes.shard_gradients * summed * _num_embeddings(model)
    return max(activations + itemsize * model.vocab_size * model.hidden_size, sums)


def _decoding_bytes(work: Workload, sizes: Sizes) -> dict[str, float]:
    """The bytes of the cache, of prefills and of the requests in a decode step."""
    policy = work.trained[0]
    cached = 2 * work.dtype.itemsize * policy.num_key_value_heads * policy.head_dim
    request = 16.0 * policy.vocab_size  # logits, logprobs and fp64 probabilities
    if work.device_type == "cuda" and not sizes.shard_weights:
        request *= 2  # the pool of CUDA graphs has its own, besides those of prefills
    if policy.delta_net is not None:
        from minirl.extras.delta_net.states import StateCache

        request += StateCache(policy.delta_net, 1, dtype=work.dtype, device=torch.device("meta")).nbytes
    return {
        "cache": sizes.cache_tokens * len(policy.attention_windows) * cached,
        "prefill": max(PREFILL_TOKENS, work.longest) * _layer_bytes(work, policy),
        "requests": sizes.max_running_requests * request,
    }


def choose_sizes(work: Workload, given: Mapping[str, Any]) -> Sizes:
    """The sizes for a rank: an update's come first, then the requests; the cache gets the rest.

    Given sizes stay, but a microbatch can hold the longest sequence, which may have become longer since the run began.
    If nothing fits, these are the smallest that the longest request needs.
    """
    for share, *switches in itertools.product((1, 2, 4, 8), (False, True), (False, True)):
        # Sums over ranks overlap with backward, which recomputation cannot; but backward waits for sums on the host.
        shard, recompute = switches if work.offloads_optimizer else reversed(switches)
        tokens = max(work.longest, given.get("max_tokens_per_microbatch", work.enough_tokens // share))
        smallest = Sizes(1, work.longest, tokens, recompute, shard)
        sizes = dataclasses.replace(smallest, **{**given, "max_tokens_per_microbatch": tokens})
        needed = budget(work, sizes)
        if needed.fits():
            break
    requests = int(needed.room / 2 / needed.decoding["requests"])  # the cache gets the other half
    requests = min(requests, work.requests, MOST_REQUESTS[work.device_type])
    sizes = dataclasses.replace(sizes, max_running_requests=max(1, requests))
    if "cache_tokens" not in given:
        needed = budget(work, sizes)
        most = max(CACHE_TOKENS, work.requests * (work.longest + PAGED_BLOCK))
        token = needed.decoding["cache"] / work.longest
        rest = needed.room - sum(needed.decoding.values())
        rests = rest - sum(needed.training.values()), rest
        beside, alone = (min(most, work.longest + int(rest / token)) for rest in rests)
        # A cache that stays between steps is worth a third of its tokens.
        tokens = beside if 3 * beside >= 2 * alone else alone
        sizes = dataclasses.replace(sizes, cache_tokens=max(work.longest, tokens))
    return sizes
