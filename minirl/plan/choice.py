"""The sizes that fit into a rank's memory, and why a run does not fit. Nothing here communicates."""

import bisect
import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

from minirl.model.attention import FLASH_BLOCK
from minirl.plan.free_memory import gb, sum_of
from minirl.plan.needs import always_bytes, decoding_bytes, host_bytes, peak_bytes, phase_bytes
from minirl.plan.workload import Sizes, Workload

# The share of free memory to use. The rest is for fragments, libraries and everything that the formulas leave out.
USABLE = 0.9
# The largest sizes that "auto" chooses. On the CPU more tokens at a time would not be faster.
MOST_REQUESTS = {"cpu": 256, "cuda": 1024}
MOST_CACHE_TOKENS = 65536  # on the CPU
MOST_MICROBATCH_TOKENS = {"cpu": 8192, "cuda": 32768}


def choose_sizes(work: Workload, free: float, given: Mapping[str, Any]) -> Sizes:
    """The sizes for a rank with `free` bytes before anything is loaded. Given sizes stay.

    If nothing fits, these are the smallest that the longest request needs; `too_large` then says what to change.
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
        if largest("max_tokens_per_microbatch", work, sizes, room, most=tokens) == tokens:
            break
    is_open = given["max_tokens_per_microbatch"] == "auto"
    if is_open:
        tokens = largest("max_tokens_per_microbatch", work, sizes, room, most=tokens)
        sizes = dataclasses.replace(sizes, max_tokens_per_microbatch=max(tokens, work.longest))
    if given["max_running_requests"] == "auto":
        requests = MOST_REQUESTS[work.device_type]
        if work.policy.delta_net is not None:  # each place has a state, whether it is used or not
            requests = min(requests, max(work.requests, work.in_flight))
        # At least half of the room is the cache's.
        while requests > 1 and sum(decoding_bytes(work, requests).values()) > room / 2:
            requests //= 2
        sizes = dataclasses.replace(sizes, max_running_requests=requests)
    if given["cache_tokens"] == "auto":
        sizes = dataclasses.replace(sizes, cache_tokens=max(_auto_cache(work, sizes, room), work.longest))
    if is_open and tokens == work.enough_tokens:
        # More than enough only if the cache can still stay between steps.
        keeps_cache = can_keep_cache(work, sizes, free)
        tokens = largest(
            "max_tokens_per_microbatch", work, sizes, room, most=most_tokens, keeps_cache=keeps_cache
        )
        sizes = dataclasses.replace(sizes, max_tokens_per_microbatch=max(tokens, work.longest))
    return sizes


def _auto_cache(work: Workload, sizes: Sizes, room: float) -> int:
    """Tokens of the cache: on CUDA as many as can stay between steps, unless twice that number would fit."""
    tokens_per_request = work.longest + FLASH_BLOCK
    if not work.is_cuda:
        most = max(MOST_CACHE_TOKENS, work.in_flight * tokens_per_request)
        return largest("cache_tokens", work, sizes, room, most=most)
    # On CUDA it takes its memory at once: no more than all requests can fill.
    requests = max(min(sizes.max_running_requests, work.requests), work.in_flight)
    tokens = largest("cache_tokens", work, sizes, room, most=requests * tokens_per_request)
    kept = largest("cache_tokens", work, sizes, room, most=tokens, keeps_cache=True)
    # An evaluation's reward model scores beside the cache.
    return kept if 2 * kept >= tokens or not work.trains else tokens


def _switches_from_the_cheapest(work: Workload) -> list[tuple[bool, bool]]:
    """Pairs, cheapest first: whether to recompute layers, and whether to shard gradients.

    The sums over ranks in each microbatch overlap with its backward, which recomputation cannot. But backward waits for
    sums on the host.
    """
    if work.offloads_optimizer:
        return [(False, False), (True, False), (False, True), (True, True)]
    return list(itertools.product((False, True), (False, work.can_shard_gradients)))


def room_bytes(work: Workload, free: float) -> float:
    """The part of a rank's free bytes that is left for the phases; negative if not even the models fit."""
    return USABLE * free - sum(always_bytes(work).values())


def can_keep_cache(work: Workload, sizes: Sizes, free: float) -> bool:
    """Return whether the cache fits beside every other phase, so that the engine can keep it."""
    return peak_bytes(work, sizes, keeps_cache=True) <= USABLE * free


def largest(
    size: str, work: Workload, sizes: Sizes, room: float, *, most: int, keeps_cache: bool = False
) -> int:
    """The most tokens of one of `Sizes`, up to `most` or else a multiple of 256, that fit into `room` bytes.

    cache_tokens: generating fits. max_tokens_per_microbatch: scoring and updates fit. With keeps_cache all phases do.
    """

    def is_too_large(tokens: int) -> bool:
        changed: dict[str, Any] = {size: tokens}
        phases = phase_bytes(work, dataclasses.replace(sizes, **changed), keeps_cache=keeps_cache)
        return any(
            sum(parts.values()) > room
            for phase, parts in phases.items()
            if keeps_cache or (phase == "generate") == (size == "cache_tokens")
        )

    if not is_too_large(most):
        return most
    multiples = range(256, most, 256)
    return 256 * bisect.bisect_left(multiples, True, key=is_too_large)


def too_large(work: Workload, sizes: Sizes, free: float) -> str | None:
    """Why a run with these sizes does not fit into a rank's free memory, with the flags to change; None if it does."""
    usable = USABLE * free
    always = sum(always_bytes(work).values())
    can_offload = work.trains and work.is_cuda and not work.offloads_optimizer
    if always > usable:
        wider = "a greater --decode-group" if work.shards_weights else "--shard-over world"
        over_all = "" if work.num_shards == work.num_ranks else f"{wider}, "
        on_host = "--offload-optimizer, " if can_offload else ""
        by_rows = "" if work.shards_weights or work.num_ranks == 1 else "--shard-decode on, "
        further = f"more ranks (--nproc-per-node), {over_all}{by_rows}{on_host}" if work.trains else ""
        return (
            f"the models need {gb(always)} of the {gb(usable)} that a rank can use: take {further}a smaller --model "
            "or --dtype bfloat16"
        )
    for phase, parts in phase_bytes(work, sizes).items():
        needed = always + sum(parts.values())
        if needed > usable:
            kind = phase.split()[0] if work.trains or phase == "generate" else "judge"
            advice = _ADVICE[kind] + (", or set --offload-optimizer" if can_offload else "")
            return f"phase {phase} needs {gb(needed)} of the {gb(usable)} that a rank can use: {advice}"
    return None


_ADVICE = {
    "generate": "lower --cache-tokens or --max-running-requests; both are at least what one request of "
    "the longest prompt and --max-new-tokens needs",
    "judge": "lower --max-new-tokens or take a smaller --reward-model",
    "score": "lower --max-tokens-per-microbatch or --max-new-tokens, or take more ranks (--nproc-per-node)",
    "update": "lower --max-tokens-per-microbatch (at least the longest prompt and --max-new-tokens), set "
    "--recompute-layers on and --shard-gradients on, or take more ranks (--nproc-per-node)",
}


def host_too_small(work: Workload, *, num_ranks: int, free: float) -> str | None:
    """Why `num_ranks` ranks do not fit into the free memory of their host, beside their GPUs; None if they do."""
    needed = host_bytes(work, num_ranks=num_ranks)
    if not work.is_cuda or sum(needed.values()) <= USABLE * free:
        return None
    advice = ["set --no-park-frozen"] if "parked models" in needed else []
    advice += ["leave out --offload-optimizer"] if work.offloads_optimizer else []
    return (
        f"beside the GPUs {num_ranks} ranks need {sum_of(needed)}, of the {gb(USABLE * free)} of host memory that can "
        f"be used: {', or '.join([*advice, 'take more nodes'])}"
    )
