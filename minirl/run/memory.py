"""The bytes that a rank needs in each phase of a step, and the sizes that fit into the memory that there is.

The formulas are those of docs/memory.md, and `tests/test_memory.py` measures both. In them: D hidden size, F width of
the MLP, Q and K channels of all query and key heads, H query heads, L layers, V words in the vocabulary, C channels of
a head. Nothing here communicates.
"""

import dataclasses
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from minirl.data.prompts import PromptStream
from minirl.model.attention import FLASH_BLOCK
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.model.logprobs import VOCAB_CHUNK
from minirl.model.padding import next_power_of_two
from minirl.model.portable_attention import BLOCK
from minirl.model.transformer import Transformer
from minirl.model.weights import named_parameters, resolve_folder
from minirl.ranks.process_group import local_world_size
from minirl.run.config import RunConfig
from minirl.training.scoring import TOKEN_CHUNK

# Of the free memory. The rest is for fragments, libraries and what the formulas leave out.
USABLE = 0.9
# What "auto" chooses at most. On the CPU more tokens at a time are no faster.
MOST_REQUESTS = {"cpu": 256, "cuda": 1024}
MOST_CACHE_TOKENS = 65536  # on the CPU
MOST_MICROBATCH_TOKENS = {"cpu": 8192, "cuda": 32768}
PREFILL_TOKENS = 8192  # of a forward pass of the engine
_SWITCHES = ("recompute_layers", "shard_gradients")
_ROUNDING = ("max_tokens_per_microbatch", "shard_gradients")  # how sums round depends on them


@dataclass(frozen=True)
class Sizes:
    """The flags of these names, with a value for each "auto"."""

    max_running_requests: int
    cache_tokens: int
    max_tokens_per_microbatch: int
    recompute_layers: bool
    shard_gradients: bool

    def flags(self) -> str:
        """As on the command line."""
        return (
            f"--max-running-requests {self.max_running_requests} --cache-tokens {self.cache_tokens} "
            f"--max-tokens-per-microbatch {self.max_tokens_per_microbatch} "
            f"--recompute-layers {'on' if self.recompute_layers else 'off'} "
            f"--shard-gradients {'on' if self.shard_gradients else 'off'}"
        )


@dataclass(frozen=True)
class Workload:
    """The models of a run and the most that a step asks of a rank: what the bytes depend on, besides `Sizes`.

    trained: policy, and value model if any; frozen: reference and reward model, by name.
    longest_prompt, longest: tokens of the longest prompt, and of it with the longest completion. longest_prefill: of
    a sequence that generation computes whole: a preempted one has nearly all its tokens.
    num_shards: ranks that hold a model's shards together, of all `num_ranks` or of a node.
    parks_frozen, offloads_optimizer: frozen models between their uses, and the optimizer's state, are in the host's
    memory beside a GPU. On the CPU there is nothing to offload.
    requests: completions that a rank decodes in one phase. update_tokens: tokens that it trains on in one update.
    enough_tokens: see the function of that name.
    """

    trained: tuple[ModelConfig, ...]
    frozen: Mapping[str, ModelConfig]
    dtype: torch.dtype
    device_type: str
    num_ranks: int
    num_shards: int
    parks_frozen: bool
    offloads_optimizer: bool
    longest_prompt: int
    longest: int
    longest_prefill: int
    requests: int
    update_tokens: int
    enough_tokens: int

    @property
    def policy(self) -> ModelConfig:
        """The model that generates."""
        return self.trained[0]

    @property
    def is_cuda(self) -> bool:
        """Whether the models are computed on a GPU, which frozen ones leave between their uses."""
        return self.device_type == "cuda"

    @property
    def can_shard_gradients(self) -> bool:
        """Whether gradients that are summed in each microbatch have another place: on other ranks, or the host."""
        return self.num_shards > 1 or self.offloads_optimizer


def workload(
    config: RunConfig,
    *,
    policy_folder: Path,
    value_folder: Path | None,
    streams: Sequence[PromptStream],
    dtype: torch.dtype,
    device_type: str,
    num_ranks: int,
    num_shards: int,
) -> Workload:
    """The workload of a run. Reads the models' config.json only.

    value_folder: of a run that is resumed; None: --value-model, or the policy's. streams: training prompts, and
    held-out ones. Raises InputError for models that cannot be used.
    """
    policy = read_config(policy_folder)
    trained = [policy]
    if config.has_value_model:
        named = getattr(config, "value_model", None)
        if value_folder is None and named:
            value_folder = resolve_folder(named, flag="--value-model", with_weights=not config.dry_run)
        value_config = read_config(value_folder or policy_folder)
        trained.append(dataclasses.replace(value_config, scalar_head=True))
    frozen = {"reference": policy} if config.has_reference else {}
    if config.reward_model:
        reward_folder = resolve_folder(
            config.reward_model, flag="--reward-model", with_weights=not config.dry_run
        )
        frozen["reward model"] = read_config(reward_folder, scalar_head=True)
    prompts, held_out = streams
    longest_prompt = max(stream.longest_prompt for stream in streams)
    longest = min(longest_prompt + prompts.max_new_tokens, prompts.max_tokens)
    num_rollouts = config.prompts_per_step * config.group_size
    # With a decode budget, as many prompts as the collector begins before their rollouts are taken.
    is_partial = config.decode_budget is not None
    num_prompts = config.prompts_per_step * (1 + config.max_staleness if is_partial else 1)
    # A rank samples whole groups, with a greedy completion on top of each perhaps.
    requests_in_training = math.ceil(num_prompts / num_ranks) * (config.group_size + 1)
    rollouts_per_update = math.ceil(num_rollouts / config.minibatches_per_epoch / num_ranks)
    return Workload(
        trained=tuple(trained),
        frozen=frozen,
        dtype=dtype,
        device_type=device_type,
        num_ranks=num_ranks,
        num_shards=num_shards,
        parks_frozen=config.park_frozen,
        offloads_optimizer=config.offload_optimizer and device_type == "cuda",
        longest_prompt=longest_prompt,
        longest=longest,
        longest_prefill=longest,
        requests=max(requests_in_training, math.ceil(held_out.num_prompts / num_ranks)),
        update_tokens=rollouts_per_update * longest,
        enough_tokens=enough_tokens(prompts.max_new_tokens),
    )


@functools.cache
def num_parameters(config: ModelConfig) -> int:
    """Parameters of a model of this shape; tied ones count once."""
    with torch.device("meta"):
        model = Transformer(config)
    return sum(parameter.numel() for parameter in named_parameters(model).values())


@functools.cache
def pinned_bytes(config: ModelConfig, itemsize: int, *, num_shards: int = 1) -> int:
    """A rank's shards of a model's parameters in pinned memory: torch rounds each up to a power of two."""
    with torch.device("meta"):
        model = Transformer(config)
    shards = [math.ceil(len(p) / num_shards) * p[0].numel() for p in named_parameters(model).values()]
    return sum(next_power_of_two(itemsize * num_values) for num_values in shards)


@functools.cache
def layer_parameters(config: ModelConfig) -> int:
    """Parameters of one layer of a model of this shape."""
    with torch.device("meta"):
        model = Transformer(config)
    return sum(parameter.numel() for parameter in model.model.layers[0].parameters())


def cached_bytes(config: ModelConfig, dtype: torch.dtype, *, tokens: int, requests: int) -> float:
    """The key/value cache. A layer with a window keeps no more blocks than the requests' windows touch."""
    channels = config.num_key_value_heads * config.head_dim
    cached = 0
    for window in config.layer_windows:
        in_windows = tokens if window is None else requests * ((window - 1) // BLOCK + 2) * BLOCK
        cached += min(tokens, in_windows)
    return 2 * dtype.itemsize * channels * cached


def decode_logits_bytes(config: ModelConfig, device_type: str) -> float:
    """Logits of a decode step, each request. On CUDA there are besides 16 bytes for each 512 of them."""
    return config.vocab_size * (24 if device_type == "cpu" else 4 + 16 / 512)


def layer_bytes(config: ModelConfig, dtype: torch.dtype, device_type: str, *, length: int) -> float:
    """What a layer keeps of a token for backward (A), in sequences of this length."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = _channels(config)
    if device_type == "cuda":
        return dtype.itemsize * (4 * hidden + 3 * inner + 4 * queries)
    scores = 4 * config.num_attention_heads + keys / 8
    return 24 * hidden + 16 * inner + 8 * queries + _mean_seen(config, length) * scores


def activation_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    device_type: str,
    *,
    tokens: int,
    length: int,
    recompute_layers: bool,
) -> float:
    """The most that forward and backward of a microbatch take, besides the gradients.

    It peaks either in the head, with what all layers keep, or in the last layer, with the head's gradient.
    """
    num_layers, hidden = config.num_hidden_layers, config.hidden_size
    layer = tokens * layer_bytes(config, dtype, device_type, length=length)
    kept = num_layers * layer
    in_layer = 0.4 * layer
    if recompute_layers:
        kept = tokens * dtype.itemsize * num_layers * hidden
        in_layer = 1.4 * layer
    if config.scalar_head:
        return kept + in_layer
    head_gradient = dtype.itemsize * config.vocab_size * hidden
    return kept + head_gradient + max(in_layer, _head_backward_bytes(config, dtype, device_type, tokens))


def _head_backward_bytes(config: ModelConfig, dtype: torch.dtype, device_type: str, tokens: int) -> float:
    """Gradients in fp32 of the states and of one vocabulary chunk of the head, and logits in fp32.

    On CUDA the chunk's gradient is made when the logits are gone, and that of the logits is in the head's dtype.
    """
    states = 4 * tokens * config.hidden_size
    logits = _logits_bytes(config, device_type, tokens)
    if device_type == "cuda":
        from minirl.kernels.fused_head import chunk_width

        width = chunk_width(tokens, config.vocab_size)
        logit_gradient = dtype.itemsize * tokens * width
        return states + logit_gradient + max(logits, states, 4 * width * config.hidden_size)
    chunk = 4 * min(config.vocab_size, VOCAB_CHUNK) * config.hidden_size
    return states + chunk + 2 * logits + max(logits, chunk)


def forward_bytes(
    config: ModelConfig, dtype: torch.dtype, device_type: str, *, tokens: int, length: int
) -> float:
    """The most that a forward pass without gradient takes: in the MLP or the attention of a layer, or in the head."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = _channels(config)
    tables = 12.0 * config.head_dim
    mlp = 3 * inner + 4 * hidden
    attention = 2 * hidden + queries + 2 * keys + 12 * queries / dtype.itemsize
    if device_type == "cpu":
        attention = 2 * hidden + 3.5 * queries + 5.5 * keys + 448 * config.num_attention_heads
        tables += 4 * _mean_seen(config, length)
    layers = tokens * (dtype.itemsize * max(mlp, attention) + tables)
    if config.scalar_head:
        return layers
    num_logits_tensors = 3 if device_type == "cpu" else 1
    logits = num_logits_tensors * _logits_bytes(config, device_type, tokens)
    head = 2 * tokens * dtype.itemsize * hidden + logits
    return max(layers, head)


def _channels(config: ModelConfig) -> tuple[int, int]:
    """Channels of all query heads together, and of all key heads."""
    return config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim


def _mean_seen(config: ModelConfig, length: int) -> float:
    """Tokens that a token of a sequence of this length sees on average. A block of queries sees what any of it does."""
    seen = [min(window or length, length / 2) + 32 for window in config.layer_windows]
    return sum(seen) / len(seen)


def _logits_bytes(config: ModelConfig, device_type: str, tokens: int) -> float:
    """One fp32 tensor of the logits that exist at a time."""
    if device_type == "cuda":
        from minirl.kernels.fused_head import chunk_width

        return 4 * tokens * chunk_width(tokens, config.vocab_size)
    return 4 * min(tokens, TOKEN_CHUNK) * min(config.vocab_size, VOCAB_CHUNK)


def always_bytes(work: Workload) -> dict[str, float]:
    """What a rank holds in every phase, by name. On the CPU also a checkpoint's copies, written meanwhile."""
    held = {"weights": float(work.dtype.itemsize * num_trained(work))}
    if not work.offloads_optimizer:
        held["masters and moments"] = 12 * num_trained(work) / work.num_shards
    shapes = {dataclasses.replace(config, scalar_head=False) for config in work.trained}
    held["rope tables"] = sum(8.0 * shape.max_position_embeddings * shape.head_dim for shape in shapes)
    if not work.is_cuda or not work.parks_frozen:
        held |= _frozen_bytes(work)
    if not work.is_cuda:
        held["checkpoint copies"] = save_bytes(work)
    return held


def num_trained(work: Workload) -> int:
    """Parameters of all models that are trained."""
    return sum(map(num_parameters, work.trained))


def _frozen_bytes(work: Workload) -> dict[str, float]:
    return {name: work.dtype.itemsize * num_parameters(config) for name, config in work.frozen.items()}


def phase_bytes(work: Workload, sizes: Sizes, *, keeps_cache: bool = False) -> dict[str, dict[str, float]]:
    """What a rank needs in each phase besides `always_bytes`, by phase and name. Parts that peak apart are one.

    keeps_cache: the cache, and on CUDA the graphs that read it, are there in every phase.
    """
    cache = cached_bytes(
        work.policy, work.dtype, tokens=sizes.cache_tokens, requests=sizes.max_running_requests
    )
    phases = {"generate": {"cache": cache} | _decoding_bytes(work, sizes.max_running_requests)}
    tokens = min(sizes.max_tokens_per_microbatch, max(work.update_tokens, work.longest))
    unparked = _frozen_bytes(work) if work.is_cuda and work.parks_frozen else {}
    for name, config in work.frozen.items():
        phase = {"forward": _forward(work, config, tokens)}
        if name in unparked:
            phase[name] = unparked[name]
        phases[f"score ({name})"] = phase
    if len(work.trained) > 1:
        phases["score (value model)"] = {"forward": _forward(work, work.trained[1], tokens)}
    phases["update"] = {
        "gradients": _gradient_bytes(work, sizes),
        "activations and logits": max(
            _backward_bytes(work, sizes, config, tokens) for config in work.trained
        ),
    }
    if keeps_cache:
        kept = {name: size for name, size in phases["generate"].items() if name in ("cache", "graphs")}
        phases = {phase: kept | parts for phase, parts in phases.items()}
    return phases


def _gradient_bytes(work: Workload, sizes: Sizes) -> float:
    """Gradients while they are summed over microbatches, all or this rank's share."""
    if not _sums_every_microbatch(work, sizes):
        return 4.0 * num_trained(work)
    if work.offloads_optimizer and work.num_shards == work.num_ranks:
        return 0.0
    # Of several nodes each keeps its sums on the device, until they are added up in the last microbatch.
    return 4.0 * num_trained(work) / work.num_shards


def _sums_every_microbatch(work: Workload, sizes: Sizes) -> bool:
    return sizes.shard_gradients and work.can_shard_gradients


def _backward_bytes(work: Workload, sizes: Sizes, config: ModelConfig, tokens: int) -> float:
    """The most that forward and backward of a microbatch take, besides the gradients summed so far."""
    activations = activation_bytes(
        config,
        work.dtype,
        work.device_type,
        tokens=tokens,
        length=work.longest,
        recompute_layers=sizes.recompute_layers,
    )
    if not _sums_every_microbatch(work, sizes):
        return activations
    # A layer's gradients are summed over the ranks while the layer before it is in backward; those of embedding and
    # head at the end, when no activations are left.
    layer = layer_parameters(config)
    others = num_parameters(config) - config.num_hidden_layers * layer
    # One rank has a unit's gradients three times in fp32: as they come, divided by 1, and as they go to the host.
    sums = 12 * max(layer, others) if work.num_shards == 1 else (work.dtype.itemsize + 4) * others
    return max(activations + 4 * layer, sums)


def _decoding_bytes(work: Workload, max_running_requests: int) -> dict[str, float]:
    """What prefills and decode steps take, by name. CUDA graphs keep the memory of a step's logits."""
    requests = min(max_running_requests, work.requests)
    prefill_tokens = min(max(PREFILL_TOKENS, work.longest_prefill), requests * work.longest_prefill)
    prefill = _forward(work, work.policy, prefill_tokens)
    logits = requests * decode_logits_bytes(work.policy, work.device_type)
    if work.is_cuda:
        return {"prefill": prefill, "graphs": logits}
    return {"prefill or logits": max(prefill, logits)}


def _forward(work: Workload, config: ModelConfig, tokens: int) -> float:
    return forward_bytes(config, work.dtype, work.device_type, tokens=tokens, length=work.longest)


def save_bytes(work: Workload) -> float:
    """Copies on the host that a checkpoint is written from, on rank 0, which also has the weights'."""
    shards = 12 / work.num_shards
    return sum((shards + work.dtype.itemsize) * num_parameters(config) for config in work.trained)


def host_bytes(work: Workload, *, num_ranks: int = 1) -> dict[str, float]:
    """What so many ranks, the first among them, need of their host's memory beside GPUs, by name."""
    needed = {}
    if work.parks_frozen and work.frozen:
        parked = sum(pinned_bytes(config, work.dtype.itemsize) for config in work.frozen.values())
        needed["parked models"] = float(num_ranks * parked)
    if work.offloads_optimizer:
        # Masters and gradients are pinned, moments are not.
        pinned = sum(2 * pinned_bytes(config, 4, num_shards=work.num_shards) for config in work.trained)
        needed["optimizer state and gradients"] = num_ranks * (
            pinned + 8 * num_trained(work) / work.num_shards
        )
    shards = 12 * num_trained(work) / work.num_shards
    needed["copies for a checkpoint"] = save_bytes(work) + (num_ranks - 1) * shards
    return needed


def host_too_small(work: Workload, *, num_ranks: int, free: float) -> str | None:
    """Why so many ranks on one host do not fit into its free memory beside their GPUs; None if they do."""
    needed = host_bytes(work, num_ranks=num_ranks)
    if not work.is_cuda or sum(needed.values()) <= USABLE * free:
        return None
    advice = ["set --no-park-frozen"] if "parked models" in needed else []
    advice += ["leave out --offload-optimizer"] if work.offloads_optimizer else []
    return (
        f"beside the GPUs {num_ranks} ranks need {sum_of(needed)}, of the {gb(USABLE * free)} of host memory that can "
        f"be used: {', or '.join([*advice, 'take more nodes'])}"
    )


def peak_bytes(work: Workload, sizes: Sizes, *, keeps_cache: bool = False) -> float:
    """The most that a rank needs in any phase."""
    phases = phase_bytes(work, sizes, keeps_cache=keeps_cache)
    return sum(always_bytes(work).values()) + max(sum(parts.values()) for parts in phases.values())


def can_keep_cache(work: Workload, sizes: Sizes, free: float) -> bool:
    """Whether the cache fits beside what each other phase needs, so that the engine can keep it."""
    return peak_bytes(work, sizes, keeps_cache=True) <= USABLE * free


def can_score_beside_cache(work: Workload, sizes: Sizes, free: float) -> bool:
    """Whether reference and value model fit beside the cache, so that they can score while rollouts wait for replies.

    A reward model scores when generation has ended.
    """
    phases = phase_bytes(work, sizes, keeps_cache=True)
    early = [phases.get(f"score ({name})", {}) for name in ("reference", "value model")]
    return max(sum(parts.values()) for parts in early) <= room_bytes(work, free)


def given_sizes(config: RunConfig, *, recorded: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """`Sizes` by name as the flags give them, "auto" where they leave one open.

    recorded: what the run that is resumed has chosen. Of it those are taken with which sums round as they did.
    """
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(Sizes)}
    for name in _SWITCHES:
        if given[name] != "auto":
            given[name] = given[name] == "on"
    for name in _ROUNDING:
        if given[name] == "auto":
            given[name] = recorded.get(name, "auto")
    return given


def choose_sizes(work: Workload, free: float, given: Mapping[str, Any]) -> Sizes:
    """The sizes for a rank with so many free bytes before anything is loaded; what is given stays as it is.

    If nothing fits, they are the least that the longest request needs; `too_large` then says what to change.
    """
    room = room_bytes(work, free)
    sizes = Sizes(1, work.longest, work.longest, recompute_layers=False, shard_gradients=False)
    sizes = dataclasses.replace(sizes, **{name: value for name, value in given.items() if value != "auto"})
    most_tokens = max(MOST_MICROBATCH_TOKENS[work.device_type], work.enough_tokens)
    tokens = work.enough_tokens
    if given["max_tokens_per_microbatch"] != "auto":
        tokens = sizes.max_tokens_per_microbatch
    for recompute, shard in _switches_from_the_cheapest(work):
        open_switches = {"recompute_layers": recompute, "shard_gradients": shard}
        switches = {name: value for name, value in open_switches.items() if given[name] == "auto"}
        sizes = dataclasses.replace(sizes, **switches)
        if largest_microbatch(work, sizes, room, most=tokens) == tokens:
            break
    is_open = given["max_tokens_per_microbatch"] == "auto"
    if is_open:
        tokens = largest_microbatch(work, sizes, room, most=tokens)
        sizes = dataclasses.replace(sizes, max_tokens_per_microbatch=max(tokens, work.longest))
    if given["max_running_requests"] == "auto":
        requests = MOST_REQUESTS[work.device_type]
        # At least half of the room is the cache's.
        while requests > 1 and sum(_decoding_bytes(work, requests).values()) > room / 2:
            requests //= 2
        sizes = dataclasses.replace(sizes, max_running_requests=requests)
    if given["cache_tokens"] == "auto":
        sizes = dataclasses.replace(sizes, cache_tokens=max(_auto_cache(work, sizes, room), work.longest))
    if is_open and tokens == work.enough_tokens:
        # More than enough only where it does not take the cache from step to step.
        keeps_cache = can_keep_cache(work, sizes, free)
        tokens = largest_microbatch(work, sizes, room, most=most_tokens, keeps_cache=keeps_cache)
        sizes = dataclasses.replace(sizes, max_tokens_per_microbatch=max(tokens, work.longest))
    return sizes


def _auto_cache(work: Workload, sizes: Sizes, room: float) -> int:
    """Tokens of the cache: on CUDA such as can be kept from step to step, if that is half of what fits or more."""
    if not work.is_cuda:
        return largest_cache(work, sizes, room, most=MOST_CACHE_TOKENS)
    # There it is memory from the first token on: no more than all requests can fill.
    requests = min(sizes.max_running_requests, work.requests)
    tokens = largest_cache(work, sizes, room, most=requests * (work.longest + FLASH_BLOCK))
    kept = largest_cache(work, sizes, room, most=tokens, keeps_cache=True)
    return kept if 2 * kept >= tokens else tokens


def _switches_from_the_cheapest(work: Workload) -> list[tuple[bool, bool]]:
    """Whether to recompute layers, and whether to shard gradients.

    Sums over the ranks in each microbatch hide behind its backward, recomputation cannot. But backward waits for sums
    on the host.
    """
    if work.offloads_optimizer:
        return [(False, False), (True, False), (False, True), (True, True)]
    return list(itertools.product((False, True), (False, work.can_shard_gradients)))


def room_bytes(work: Workload, free: float) -> float:
    """What is left for the phases of a rank's free bytes; negative if not even the models fit."""
    return USABLE * free - sum(always_bytes(work).values())


def largest_microbatch(
    work: Workload, sizes: Sizes, room: float, *, most: int, keeps_cache: bool = False
) -> int:
    """The most tokens of a microbatch, up to `most`, with which scoring and updates fit into so many bytes."""

    def fits(tokens: int) -> bool:
        tried = dataclasses.replace(sizes, max_tokens_per_microbatch=tokens)
        phases = phase_bytes(work, tried, keeps_cache=keeps_cache)
        return all(sum(parts.values()) <= room for phase, parts in phases.items() if phase != "generate")

    return _largest(most, fits)


def largest_cache(work: Workload, sizes: Sizes, room: float, *, most: int, keeps_cache: bool = False) -> int:
    """The most tokens of the cache, up to `most`, with which generating fits into so many bytes.

    keeps_cache: and all other phases beside it.
    """

    def fits(tokens: int) -> bool:
        tried = dataclasses.replace(sizes, cache_tokens=tokens)
        phases = phase_bytes(work, tried, keeps_cache=keeps_cache)
        return all(
            sum(parts.values()) <= room
            for phase, parts in phases.items()
            if keeps_cache or phase == "generate"
        )

    return _largest(most, fits)


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits: `most`, or else a multiple of 256, which may be 0."""
    if fits(most):
        return most
    low, high = 0, math.ceil(most / 256)  # times 256; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if fits(256 * middle):
            low = middle
        else:
            high = middle
    return 256 * low


def enough_tokens(max_new_tokens: int) -> int:
    """Tokens of a microbatch from which on more of them are not worth the recomputation of layers."""
    return max(8192, 2 * max_new_tokens)


def max_request_tokens(config: RunConfig, model_config: ModelConfig, max_new_tokens: int) -> int:
    """The most tokens of a prompt with its completion. It does not depend on the memory that there is."""
    limits = [model_config.max_position_embeddings]
    for given in (config.cache_tokens, config.max_tokens_per_microbatch):
        limits.append(enough_tokens(max_new_tokens) if given == "auto" else given)
    return min(limits)


def too_large(work: Workload, sizes: Sizes, free: float) -> str | None:
    """Why a run with these sizes does not fit into a rank's free memory, with the flags to change; None if it does."""
    usable = USABLE * free
    always = sum(always_bytes(work).values())
    can_offload = work.is_cuda and not work.offloads_optimizer
    if always > usable:
        over_all = "" if work.num_shards == work.num_ranks else "--shard-over world, "
        on_host = "--offload-optimizer, " if can_offload else ""
        return (
            f"the models need {gb(always)} of the {gb(usable)} that a rank can use: take more ranks "
            f"(--nproc-per-node), {over_all}{on_host}a smaller --model or --dtype bfloat16"
        )
    for phase, parts in phase_bytes(work, sizes).items():
        needed = always + sum(parts.values())
        if needed > usable:
            advice = _ADVICE[phase.split()[0]] + (", or set --offload-optimizer" if can_offload else "")
            return f"phase {phase} needs {gb(needed)} of the {gb(usable)} that a rank can use: {advice}"
    return None


_ADVICE = {
    "generate": "lower --cache-tokens or --max-running-requests; both are at least what one request of "
    "the longest prompt and --max-new-tokens needs",
    "score": "lower --max-tokens-per-microbatch or --max-new-tokens, or take more ranks (--nproc-per-node)",
    "update": "lower --max-tokens-per-microbatch (at least the longest prompt and --max-new-tokens), set "
    "--recompute-layers on and --shard-gradients on, or take more ranks (--nproc-per-node)",
}


def sum_of(parts: Mapping[str, float]) -> str:
    """The sum of bytes, and its parts, for a reader."""
    return f"{gb(sum(parts.values()))}: {listed(parts)}"


def listed(parts: Mapping[str, float]) -> str:
    """Bytes by name, for a reader."""
    return ", ".join(f"{name} {gb(num_bytes)}" for name, num_bytes in parts.items())


def gb(num_bytes: float) -> str:
    """So many bytes for a reader, in GB (1e9) or MB (1e6)."""
    if num_bytes < 1e8:
        return f"{num_bytes / 1e6:.3g} MB"
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes < 1e12 else f"{num_bytes / 1e9:,.0f} GB"


def free_bytes(device: torch.device) -> int:
    """The memory that this rank can take now: of its GPU, or its share of the host's. Not collective."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_host_bytes() // local_world_size()


def free_host_bytes() -> int:
    """The host's free memory, or what is left of the control group's limit if that is less."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    available = 1024 * int(found[1]) if found else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup")
    limit = group / "memory.max"
    if limit.is_file() and limit.read_text().strip().isdecimal():
        # Pages of files that were read are given up when memory is short.
        inactive = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        used = int((group / "memory.current").read_text()) - int(inactive[1] if inactive else 0)
        available = min(available, int(limit.read_text()) - used)
    return available
