"""Bytes that a rank and its host need in each phase of a step. Nothing here communicates."""

import dataclasses
from typing import NamedTuple

from minirl.generation.engine import PREFILL_TOKENS
from minirl.model.config import ModelConfig
from minirl.plan.formulas import (
    activation_bytes,
    cached_bytes,
    decode_logits_bytes,
    forward_bytes,
    layer_parameters,
    num_decoding_parameters,
    num_parameters,
    num_trained_parameters,
    pinned_bytes,
    rope_channels,
    state_bytes,
)
from minirl.plan.workload import Sizes, Workload

# Activations and logits on the CPU relative to CUDA, in fp32: measured 0.5 to 1.8 with sequences of up to 1,024
# tokens, 3.2 with 4,096.
CPU_FACTOR = 2.0


def always_bytes(work: Workload) -> dict[str, float]:
    """The bytes that a rank holds in every phase, by name. On the CPU they include a checkpoint's copies."""
    held = {"weights": work.dtype.itemsize * _num_held(work)}
    if work.trains and not work.offloads_optimizer:
        held["masters and moments"] = 12 * num_trained(work) / work.num_shards
    shapes = {dataclasses.replace(config, scalar_head=False) for config in work.trained}
    held["rope tables"] = sum(8.0 * shape.max_position_embeddings * rope_channels(shape) for shape in shapes)
    held |= {name: model.num_bytes for name, model in _frozen(work).items() if not model.is_on_host}
    if not work.is_cuda:
        held["checkpoint copies"] = save_bytes(work)
    return held


def num_trained(work: Workload) -> int:
    """The trained parameters of all models."""
    return sum(map(num_trained_parameters, work.trained))


def _num_held(work: Workload) -> float:
    """Parameters that a rank holds in the compute dtype: those that the policy decodes from, and the value models'.

    With sharded weights, value models have only masters, and if they have adapters, frozen shards of their base.
    """
    if not work.shards_weights:
        own = num_trained_parameters if work.shares_base else num_parameters
        return float(num_parameters(work.policy) + sum(map(own, work.trained[1:])))
    values = () if work.offloads_optimizer else work.trained[1:]
    bases = sum(num_parameters(config) - num_trained_parameters(config) for config in values)
    return num_decoding_parameters(work.policy, work.decode_group) + bases / work.decode_group


class _Frozen(NamedTuple):
    """A frozen model on a rank.

    num_holders: the ranks that hold it together; reward models are whole. num_bytes: of it, or of this rank's shards.
    is_on_host: it is there, whole between its uses, or as shards beside the optimizer's state.
    """

    config: ModelConfig
    num_holders: int
    num_bytes: float
    is_on_host: bool


def _frozen(work: Workload) -> dict[str, _Frozen]:
    """The frozen models by name."""
    found = {}
    for name, config in work.frozen.items():
        num_holders = work.decode_group if name in ("reference", "teacher") else 1
        num_bytes = work.dtype.itemsize * num_parameters(config) / num_holders
        is_parked = work.is_cuda and work.parks_frozen
        is_on_host = work.offloads_optimizer if num_holders > 1 else is_parked
        found[name] = _Frozen(config, num_holders, num_bytes, is_on_host)
    return found


def _gathered(work: Workload, *configs: ModelConfig) -> dict[str, float]:
    """The sharded weights that a rank gathers: those outside of the layers, one layer's and the next one's."""
    if not work.shards_weights:
        return {}
    most = max(num_parameters(c) - (c.num_hidden_layers - 2) * layer_parameters(c) for c in configs)
    return {"gathered weights": float(work.dtype.itemsize * most)}


def phase_bytes(work: Workload, sizes: Sizes, *, keeps_cache: bool = False) -> dict[str, dict[str, float]]:
    """A rank's needs in each phase besides `always_bytes`, by phase and name. Parts that peak apart are one.

    keeps_cache: the cache, and the logits that CUDA graphs keep with it, stay in every phase.
    """
    cache = cached_bytes(
        work.policy, work.dtype, tokens=sizes.cache_tokens, requests=sizes.max_running_requests
    )
    cache /= work.decode_group  # key/value heads
    phases = {"generate": {"cache": cache} | decoding_bytes(work, sizes.max_running_requests)}
    tokens = min(sizes.max_tokens_per_microbatch, max(work.update_tokens, work.longest))
    for name, model in _frozen(work).items():
        phase = {"forward": _forward(work, model.config, tokens)}
        if model.num_holders > 1:
            phase |= _gathered(work, model.config)
        elif model.is_on_host:
            phase[name] = model.num_bytes
        phases[f"score ({name})"] = phase
    if work.taught_tokens:
        # The teacher's states, which a step keeps from scoring to the end of the update.
        states = work.dtype.itemsize * work.taught_tokens * work.frozen["teacher"].hidden_size
        phases["score (teacher)"]["teacher's states"] = states
    if len(work.trained) > 1:
        value = work.trained[1]
        phases["score (value model)"] = {"forward": _forward(work, value, tokens)} | _gathered(work, value)
    if work.trains:
        phases["update"] = {
            "gradients": _gradient_bytes(work, sizes),
            "activations and logits": max(
                _backward_bytes(work, sizes, config, tokens) for config in work.trained
            ),
            **_gathered(work, *work.trained),
        }
    if work.taught_tokens:
        phases["update"] |= {"teacher's states": states, "teacher's head": _teacher_head_bytes(work)}
    if keeps_cache:
        kept = {name: size for name, size in phases["generate"].items() if name != "prefill"}
        phases = {phase: kept | parts for phase, parts in phases.items()}
    return phases


def _teacher_head_bytes(work: Workload) -> float:
    """The teacher's head on the device, unless it stays there, and a second gradient of the policy's head."""
    is_copied = work.shards_weights or (work.is_cuda and work.parks_frozen)
    channels = work.policy.hidden_size + is_copied * work.frozen["teacher"].hidden_size
    return work.dtype.itemsize * work.policy.vocab_size * channels


def _gradient_bytes(work: Workload, sizes: Sizes) -> float:
    """Gradients while they are summed over microbatches, all or this rank's share."""
    if not _sums_every_microbatch(work, sizes):
        return 4.0 * num_trained(work)
    if work.offloads_optimizer and work.num_shards == work.num_ranks:
        return 0.0
    # With several nodes, each keeps its sums on the device until the last microbatch adds them up.
    return 4.0 * num_trained(work) / work.num_shards


def _sums_every_microbatch(work: Workload, sizes: Sizes) -> bool:
    return sizes.shard_gradients and work.can_shard_gradients


def _backward_bytes(work: Workload, sizes: Sizes, config: ModelConfig, tokens: int) -> float:
    """The most that forward and backward of a microbatch take, besides the gradients summed so far."""
    activations = _cpu_factor(work) * activation_bytes(
        config, work.dtype, tokens=tokens, recompute_layers=sizes.recompute_layers
    )
    if not _sums_every_microbatch(work, sizes):
        return activations
    # The ranks sum a layer's gradients during backward of the layer before it, and those of embedding and head at the
    # end, when no activations are left.
    layer = layer_parameters(config)
    others = num_parameters(config) - config.num_hidden_layers * layer
    if config.adapters:
        layer, others = num_trained_parameters(config) // config.num_hidden_layers, 0
    # One rank has a unit's gradients three times in fp32: as they come, divided by 1, and as they go to the host.
    sums = 12 * max(layer, others) if work.num_shards == 1 else (work.dtype.itemsize + 4) * others
    return max(activations + 4 * layer, sums)


def decoding_bytes(work: Workload, max_running_requests: int) -> dict[str, float]:
    """The needs of prefills and decode steps, by name. CUDA graphs keep the memory of a step's logits."""
    requests = min(max_running_requests, work.requests)
    # A preempted sequence is prefilled with nearly all its tokens.
    prefill_tokens = min(max(PREFILL_TOKENS, work.longest), requests * work.longest)
    logits = _cpu_factor(work) * requests * decode_logits_bytes(work.policy)
    logits *= 1 + work.shards_weights  # gathered by ranks, then in order
    needed = {"prefill": _forward(work, work.policy, prefill_tokens), "decode logits": logits}
    if work.policy.delta_net is not None:
        needed["states"] = state_bytes(work.policy, work.dtype, requests=max_running_requests)
    return needed


def _forward(work: Workload, config: ModelConfig, tokens: int) -> float:
    return _cpu_factor(work) * forward_bytes(config, work.dtype, tokens=tokens)


def _cpu_factor(work: Workload) -> float:
    return 1.0 if work.is_cuda else CPU_FACTOR


def save_bytes(work: Workload) -> float:
    """Copies on rank 0's host from which it writes a checkpoint: its shards, and the weights."""
    if not work.trains:
        return 0.0
    # The masters of adapters are copied whole.
    whole = 4 if work.policy.adapters else work.dtype.itemsize
    return (12 / work.num_shards + whole) * num_trained(work)


def host_bytes(work: Workload, *, num_ranks: int = 1) -> dict[str, float]:
    """The host memory that `num_ranks` ranks need beside their GPUs, by name. Rank 0 is among them."""
    needed: dict[str, float] = {}
    frozen = [(model.config, model.num_holders) for model in _frozen(work).values() if model.is_on_host]
    if work.shards_weights and work.offloads_optimizer and work.policy.adapters:
        frozen += [(config, work.num_shards) for config in work.trained]
    for config, num_shards in frozen:
        kind = "parked models" if num_shards == 1 else "frozen shards"
        shards = num_ranks * pinned_bytes(config, work.dtype.itemsize, num_shards=num_shards)
        needed[kind] = needed.get(kind, 0.0) + shards
    if work.offloads_optimizer:
        # Masters and gradients are pinned, moments are not.
        pinned = sum(
            2 * pinned_bytes(config, 4, num_shards=work.num_shards, of_trained=True)
            for config in work.trained
        )
        needed["optimizer state and gradients"] = num_ranks * (
            pinned + 8 * num_trained(work) / work.num_shards
        )
    if work.trains:
        copied = 12 * num_trained(work) / work.num_shards
        needed["copies for a checkpoint"] = save_bytes(work) + (num_ranks - 1) * copied
    return needed


def peak_bytes(work: Workload, sizes: Sizes, *, keeps_cache: bool = False) -> float:
    """The most that a rank needs in any phase."""
    phases = phase_bytes(work, sizes, keeps_cache=keeps_cache)
    return sum(always_bytes(work).values()) + max(sum(parts.values()) for parts in phases.values())
