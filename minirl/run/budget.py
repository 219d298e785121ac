"""Per-rank memory budget, which determines the sizes left at "auto" (docs/memory.md).

The budget counts the large allocations. A margin covers everything else, such as a microbatch's logits, block tables,
libraries and fragmentation.
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
from minirl.model.transformer import make_meta_model

USABLE_FRACTION = 0.9  # usable fraction of free memory; the rest is the margin
# Ratio of activation bytes on the CPU to activation bytes on CUDA. Measured ratios are 0.5 to 1.8, and 3.2 for
# sequences of 4,096 tokens.
CPU_FACTOR = 2.0
MAX_REQUESTS = {"cpu": 256, "cuda": 1024}
# Default cache capacity in tokens; exceeded only if a rank's completions can fill a larger cache.
CACHE_TOKENS = 65536
# Ways to run an update, fastest first: (divisor of the default microbatch size, whether to recompute layers, whether to
# shard gradients). Sharding is tried before recomputation because the gradient reduction overlaps with backward. If the
# optimizer is on the host, backward waits for the reduction, so recomputation is tried first.
UPDATE_OPTIONS = list(itertools.product((1, 2, 4, 8), (False, True), (False, True)))
OFFLOADED_UPDATE_OPTIONS = [(divisor, recompute, shard) for divisor, shard, recompute in UPDATE_OPTIONS]


@dataclass(frozen=True)
class Sizes:
    """A rank's batch and cache sizes, and what the rank shards or recomputes. shard_weights implies shard_gradients."""

    max_running_requests: int
    cache_tokens: int
    max_tokens_per_microbatch: int
    recompute_layers: bool
    shard_gradients: bool
    shard_weights: bool = False


@dataclass(frozen=True)
class Machine:
    """A run's device type, number of ranks and free memory. free_bytes: free memory per rank."""

    device_type: str
    num_ranks: int
    free_bytes: float


@dataclass(frozen=True)
class Workload(Machine):
    """Everything besides `Sizes` that determines a rank's memory use: models, lengths and hardware.

    trained_models: the policy, then any value models; if shares_base_weights, value models are adapters on the policy's
    weights. frozen_models: the frozen models, keyed by name. max_sequence_tokens: length of the longest prompt plus its
    completion. step_tokens: maximum number of tokens that the rank trains on in a step. num_requests: maximum number of
    concurrent requests. offloads_optimizer: whether the optimizer lives in host memory, as offloaded frozen models do.
    """

    dtype: torch.dtype
    trained_models: Sequence[ModelConfig]
    frozen_models: Mapping[str, ModelConfig]
    max_sequence_tokens: int
    default_microbatch_tokens: int
    step_tokens: int
    num_requests: int
    trains: bool = True
    shares_base_weights: bool = False
    offloads_optimizer: bool = False


@dataclass(frozen=True)
class Budget:
    """A rank's sizes and the memory they take: permanently, during scoring and training, and during decoding.

    Each mapping gives sizes in bytes, keyed by purpose. available_bytes: memory left for training and decoding.
    Training and decoding take turns using this memory, or share it if the cache stays allocated during training.
    """

    sizes: Sizes
    available_bytes: float
    always_bytes: Mapping[str, float]
    training_bytes: Mapping[str, float]
    decoding_bytes: Mapping[str, float]

    def fits(self, *, keeps_cache: bool = False) -> bool:
        """Return whether training and decoding fit into the available memory.

        keeps_cache: whether training and decoding must fit in memory at the same time; otherwise, only one of
        them needs to fit at a time.
        """
        phase_bytes = sum(self.training_bytes.values()), sum(self.decoding_bytes.values())
        return (sum(phase_bytes) if keeps_cache else max(phase_bytes)) <= self.available_bytes

    def format_plan(self) -> list[str]:
        """Return the sizes, the memory use per phase and the available memory as lines of text."""
        sizes = ", ".join(f"{name} {value}" for name, value in vars(self.sizes).items())
        sharing_note = "one at a time: each step reallocates the cache"
        if self.fits(keeps_cache=True):
            sharing_note = "both at once: the cache stays allocated"
        return [
            sizes,
            *(self._format_phase(phase) for phase in ("always", "training", "decoding")),
            f"{self.available_bytes / 1e9:.3g} GB are left for training and decoding, {sharing_note}",
        ]

    def advice(self, phase: str) -> str:
        """Return an out-of-memory hint for a phase: the planned memory, and the flags that reduce memory."""
        decoding_advice = f"{self._format_phase('decoding')}; lower --cache-tokens"
        if phase.endswith("generate"):
            return decoding_advice
        if phase.endswith(("score", "update")):
            return f"{self._format_phase('training')}; lower --max-tokens-per-microbatch, or use --recompute-layers on"
        return f"{self._format_phase('always')}; use a smaller --model or more ranks; {decoding_advice}"

    def _format_phase(self, phase: str) -> str:
        parts: dict[str, float] = getattr(self, f"{phase}_bytes")
        breakdown = ", ".join(f"{part} {num_bytes / 1e9:.3g}" for part, num_bytes in parts.items())
        return f"{phase} {sum(parts.values()) / 1e9:.3g} GB: {breakdown}"


@functools.cache
def num_parameters(model: ModelConfig, *, trained: bool = False) -> int:
    """Count the parameters of a model, or only the trained parameters. Tied parameters count once."""
    return sum(p.numel() for p in make_meta_model(model).parameters() if p.requires_grad or not trained)


def compute_budget(work: Workload, sizes: Sizes) -> Budget:
    """Return a rank's memory budget with these sizes."""
    models_with_own_weights = work.trained_models
    if work.shares_base_weights and not sizes.shard_weights:
        models_with_own_weights = models_with_own_weights[:1]
    always_bytes = {
        "weights": sum(_weight_bytes(work, model, sizes.shard_weights) for model in models_with_own_weights)
    }
    num_trained_parameters = sum(num_parameters(model, trained=True) for model in work.trained_models)
    if work.trains and not work.offloads_optimizer:
        # On a single rank in fp32, the weights are the masters.
        parameter_bytes = 8 if work.num_ranks == 1 and work.dtype.itemsize > 2 else 12
        always_bytes["masters and moments"] = parameter_bytes * num_trained_parameters / work.num_ranks
    training_bytes = _update_bytes(work, sizes, num_trained_parameters) if work.trains else {}
    for name, model in work.frozen_models.items():
        is_sharded = sizes.shard_weights and name in ("reference", "teacher")
        weight_bytes = _weight_bytes(work, model, is_sharded)
        if is_sharded or work.device_type == "cpu":
            always_bytes[name] = weight_bytes
        elif weight_bytes > sum(
            training_bytes.values()
        ):  # scoring and the update take turns using this memory
            training_bytes = {"a frozen model": weight_bytes}
    available_bytes = USABLE_FRACTION * work.free_bytes - sum(always_bytes.values())
    return Budget(sizes, available_bytes, always_bytes, training_bytes, _decoding_bytes(work, sizes))


def _weight_bytes(work: Workload, model: ModelConfig, is_sharded: bool) -> float:
    """Return the size in bytes of a model's weights on one rank.

    The rank holds all weights or, if the model is sharded, only the embedding, the head and a shard of the layers.
    """
    num_local_parameters: float = num_parameters(model)
    if is_sharded:
        num_embedding_parameters = _num_embeddings(model)
        num_local_parameters = (
            num_embedding_parameters + (num_local_parameters - num_embedding_parameters) / work.num_ranks
        )
    return work.dtype.itemsize * num_local_parameters


def _num_embeddings(model: ModelConfig) -> int:
    """Return the number of parameters in the embedding and the head."""
    return model.vocab_size * model.hidden_size * (1 if model.tie_word_embeddings else 2)


def _update_bytes(work: Workload, sizes: Sizes, num_trained: int) -> dict[str, float]:
    """Return the number of bytes needed for an update, keyed by purpose."""
    gradient_bytes = 4.0 * num_trained
    if sizes.shard_gradients:
        gradient_bytes = 0.0 if work.offloads_optimizer else gradient_bytes / work.num_ranks
    update_bytes = {
        "gradients": gradient_bytes,
        "activations": max(_activation_bytes(work, sizes, model) for model in work.trained_models),
    }
    if sizes.shard_weights:
        policy = work.trained_models[0]
        num_layer_parameters = num_parameters(policy) / policy.num_hidden_layers
        update_bytes["gathered weights"] = work.dtype.itemsize * 2 * num_layer_parameters
    return update_bytes


def _layer_bytes_per_token(work: Workload, model: ModelConfig) -> float:
    """Return the activation bytes per token that a layer saves for backward.

    The peak memory of a layer's forward pass does not exceed this number. The number is exact for Llama and
    Qwen2, and up to 14% off for other families.
    """
    q_size = model.num_attention_heads * model.head_dim
    num_saved_elements = (
        4 * model.hidden_size + 3 * model.intermediate_size + (4 + 2 * model.qk_norm) * q_size
    )
    activation_factor = CPU_FACTOR if work.device_type == "cpu" else 1.0
    if model.norm_adds_one:  # norms that scale by 1 + weight save their inputs in fp32
        activation_factor *= 1.35
    # transformers' rotary embedding, gated activation and norms save more for backward (docs/families.md).
    if model.hf_backend is not None:
        activation_factor *= 1.5
    return activation_factor * work.dtype.itemsize * num_saved_elements


def _activation_bytes(work: Workload, sizes: Sizes, model: ModelConfig) -> float:
    """Return a microbatch's peak memory in bytes: activations, or the gradient reduction at the end of backward."""
    itemsize = work.dtype.itemsize
    layer_bytes_per_token = _layer_bytes_per_token(work, model)
    bytes_per_token = model.num_hidden_layers * layer_bytes_per_token + 0.4 * layer_bytes_per_token
    if sizes.recompute_layers:
        bytes_per_token = model.num_hidden_layers * itemsize * model.hidden_size + 1.4 * layer_bytes_per_token
    if model.delta_net:
        bytes_per_token += 80 * model.delta_net.num_channels  # measured for one layer
    activation_bytes = min(sizes.max_tokens_per_microbatch, work.step_tokens) * bytes_per_token
    if model.adapters:
        return activation_bytes
    activation_bytes += itemsize * model.vocab_size * model.hidden_size  # the head's gradient
    if not sizes.shard_gradients:
        return activation_bytes
    # Once the activations are freed, the embedding and head gradients are summed, either across ranks or on the host.
    reduced_grad_itemsize = 12 if work.num_ranks == 1 else itemsize + 4
    return max(activation_bytes, reduced_grad_itemsize * _num_embeddings(model))


def _decoding_bytes(work: Workload, sizes: Sizes) -> dict[str, float]:
    """Return the number of bytes needed for the cache, for prefill and for the requests in a decode step."""
    policy = work.trained_models[0]
    cache_token_bytes = 2 * work.dtype.itemsize * policy.num_key_value_heads * policy.head_dim  # per layer
    request_bytes = 16.0 * policy.vocab_size  # logits, logprobs and fp64 probabilities
    if work.device_type == "cuda" and not sizes.shard_weights:
        request_bytes *= 2  # the CUDA graph pool needs its own buffers, in addition to the prefill buffers
    if policy.delta_net is not None:
        from minirl.extras.delta_net.states import StateCache

        request_bytes += StateCache(policy.delta_net, 1, dtype=work.dtype, device=torch.device("meta")).nbytes
    return {
        "cache": sizes.cache_tokens * len(policy.attention_windows) * cache_token_bytes,
        "prefill": max(PREFILL_TOKENS, work.max_sequence_tokens) * _layer_bytes_per_token(work, policy),
        "requests": sizes.max_running_requests * request_bytes,
    }


def choose_sizes(work: Workload, given: Mapping[str, Any]) -> Budget:
    """Choose a rank's sizes: first the update's sizes, then the number of requests, and last the cache's capacity.

    Sizes in `given` are kept. If nothing fits, return the smallest sizes that can hold the longest request.
    """
    for divisor, recompute, shard in OFFLOADED_UPDATE_OPTIONS if work.offloads_optimizer else UPDATE_OPTIONS:
        num_tokens = max(work.max_sequence_tokens, work.default_microbatch_tokens // divisor)
        min_sizes = Sizes(1, work.max_sequence_tokens, num_tokens, recompute, shard)
        chosen_budget = compute_budget(work, dataclasses.replace(min_sizes, **given))
        if chosen_budget.fits():
            break
    # Requests may take up to half of the memory; the cache gets what is left.
    max_running_requests = int(chosen_budget.available_bytes / 2 / chosen_budget.decoding_bytes["requests"])
    max_running_requests = max(
        1, min(max_running_requests, work.num_requests, MAX_REQUESTS[work.device_type])
    )
    chosen_budget = compute_budget(
        work, dataclasses.replace(chosen_budget.sizes, max_running_requests=max_running_requests)
    )
    if "cache_tokens" in given:
        return chosen_budget
    max_tokens = max(CACHE_TOKENS, work.num_requests * (work.max_sequence_tokens + PAGED_BLOCK))
    bytes_per_token = chosen_budget.decoding_bytes["cache"] / work.max_sequence_tokens
    free_bytes = chosen_budget.available_bytes - sum(chosen_budget.decoding_bytes.values())
    in_turns, side_by_side = (
        min(max_tokens, work.max_sequence_tokens + int(cache_bytes / bytes_per_token))
        for cache_bytes in (free_bytes, free_bytes - sum(chosen_budget.training_bytes.values()))
    )
    # Keeping the cache allocated between steps is worth giving up a third of its capacity.
    num_tokens = side_by_side if 3 * side_by_side >= 2 * in_turns else in_turns
    return compute_budget(
        work, dataclasses.replace(chosen_budget.sizes, cache_tokens=max(work.max_sequence_tokens, num_tokens))
    )
