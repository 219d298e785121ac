"""Continuous batching over the training module itself: submit, step, drain.

Requests are admitted as rows and cache blocks come free; a group's prompt is prefilled once and forked; when the cache
is full the youngest row gives its blocks back and is recomputed later. The engine knows token ids, never text, and has
no collectives: ranks decode on their own. A rollout depends on its request and the weights alone, not on what else is
in the batch. The cache lives from the first `submit` of a phase to its end, so new weights never meet an old cache.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from minirl import numerics, watch
from minirl.batch import Rollout, RolloutId
from minirl.errors import InputError
from minirl.kv_cache import CachedSequence, KVCache
from minirl.model import Transformer
from minirl.sampling import sample


class Sampled(NamedTuple):
    """One sampled token, its logprob at the sampling temperature and the version of the weights it came from."""

    token: int
    logprob: float
    weight_version: int


@dataclass(frozen=True)
class Request:
    """One rollout to make. `sampled` is what an earlier phase has sampled of it (see `Engine.drain`)."""

    prompt: tuple[int, ...]
    rollout_id: RolloutId
    key: int  # `sampling.request_key`
    max_new_tokens: int
    temperature: float  # 0: the likeliest token
    stop_ids: frozenset[int]
    sampled: tuple[Sampled, ...] = ()


@dataclass
class EngineStats:
    """Work done since `take_stats`, in tokens; `decode_steps` and `preemptions` are counts.

    `padding_rows` were computed for nothing in decode steps of few rows (`numerics.pad_rows`).
    """

    prefill_tokens: int = 0
    decode_tokens: int = 0
    padding_rows: int = 0
    decode_steps: int = 0
    preemptions: int = 0

    @property
    def computed_rows(self) -> int:
        """Rows that decode steps computed, the padding too."""
        return self.decode_tokens + self.padding_rows


@dataclass
class _Row:
    """A request in the decode batch. The cache holds all its tokens but the last sampled one."""

    request: Request
    cached: CachedSequence
    sampled: list[Sampled] = field(default_factory=list)


class Engine:
    """Decodes up to `max_rows` requests at a time in a cache of `cache_tokens` tokens per layer."""

    def __init__(
        self,
        model: Transformer,
        *,
        max_rows: int,
        cache_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        max_prefill_tokens: int = 8192,
    ):
        """`dtype` is the weights' (the cache takes the same); a longer prompt than `max_prefill_tokens` goes alone."""
        self.model, self.config, self.dtype, self.device = model, model.config, dtype, device
        self.max_rows, self.cache_tokens, self.max_prefill_tokens = max_rows, cache_tokens, max_prefill_tokens
        self.stats = EngineStats()
        self.weight_version = 0
        self._waiting: deque[Request] = deque()
        self._rows: list[_Row] = []  # oldest first
        self._cache: KVCache | None = None

    def submit(self, requests: Sequence[Request], *, weight_version: int = 0) -> None:
        """Queue requests. Those of a group, side by side, share one prefill. Not collective.

        Raises InputError for a request that the model's positions or the whole cache could not hold.
        """
        for request in requests:
            longest = len(request.prompt) + request.max_new_tokens
            if not request.prompt or request.max_new_tokens < 1:
                raise InputError(f"{request.rollout_id}: needs a prompt and max_new_tokens >= 1")
            if longest > self.config.max_position_embeddings:
                limit = self.config.max_position_embeddings
                raise InputError(f"prompt + max_new_tokens = {longest} tokens exceed the model's {limit} positions")
            if longest > self.cache_tokens:
                raise InputError(f"a request of {longest} tokens exceeds the cache; raise --cache-tokens")
        if requests and self._cache is None:
            self._cache = self._new_cache()
        self.weight_version = weight_version
        self._waiting.extend(requests)

    def step(self) -> list[Rollout]:
        """Admit and prefill what fits, decode one token of every row; returns the rollouts that finished."""
        watch.beat()
        with torch.no_grad():
            self._prefill(self._admit())
            finished = self._take_finished()
            if self._make_room():
                self._decode()
                finished += self._take_finished()
        if not self._rows and not self._waiting:
            self._cache = None
        return finished

    def drain(self) -> list[Request]:
        """Stop; returns the unfinished requests with what they have sampled, to be submitted again."""
        unfinished = [replace(row.request, sampled=tuple(row.sampled)) for row in self._rows] + list(self._waiting)
        self._rows, self._cache = [], None
        self._waiting.clear()
        return unfinished

    def generate(self, requests: Sequence[Request], *, weight_version: int = 0) -> list[Rollout]:
        """Run these requests to their end; rollouts in the order of the requests."""
        self.submit(requests, weight_version=weight_version)
        done: dict[RolloutId, Rollout] = {}
        while self._rows or self._waiting:
            done |= {rollout.rollout_id: rollout for rollout in self.step()}
        return [done[request.rollout_id] for request in requests]

    def take_stats(self) -> EngineStats:
        """The work done since the last call."""
        stats, self.stats = self.stats, EngineStats()
        return stats

    @property
    def _live_cache(self) -> KVCache:
        assert self._cache is not None, "nothing was submitted"
        return self._cache

    def _new_cache(self) -> KVCache:
        return KVCache(
            self.config.layer_windows,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            num_query_groups=self.config.num_attention_heads // self.config.num_key_value_heads,
            num_tokens=self.cache_tokens,
            max_sequences=self.max_rows,
            dtype=self.dtype,
            device=self.device,
        )

    def _admit(self) -> list[tuple[CachedSequence, list[Request]]]:
        """Groups of waiting requests with one prompt, each with its reserved place in the cache."""
        groups: list[tuple[CachedSequence, list[Request]]] = []
        num_rows, num_tokens = len(self._rows), 0
        reserved = 0  # blocks that the forks to come will take
        while self._waiting and num_rows < self.max_rows:
            group = self._next_group(self.max_rows - num_rows)
            length = len(group[0].prompt) + len(group[0].sampled)
            if groups and num_tokens + length > self.max_prefill_tokens:
                break
            room = self._live_cache.spare_blocks(length) - reserved
            if room < 0:
                break
            forks = length % self._live_cache.block_size != 0  # else a fork shares all its blocks
            group = group[: 1 + room] if forks else group
            cached = self._live_cache.add(length)
            assert cached is not None
            reserved += (len(group) - 1) * forks
            groups.append((cached, group))
            num_rows, num_tokens = num_rows + len(group), num_tokens + length
            for _ in group:
                self._waiting.popleft()
        return groups

    def _next_group(self, limit: int) -> list[Request]:
        """The first waiting request and those right behind it that have the same prompt and nothing sampled."""
        group = [self._waiting[0]]
        for request in itertools.islice(self._waiting, 1, limit if not group[0].sampled else 1):
            if request.prompt != group[0].prompt or request.sampled:
                break
            group.append(request)
        return group

    def _prefill(self, groups: list[tuple[CachedSequence, list[Request]]]) -> None:
        """Run the groups' prompts end to end, fork, and sample each member's first token."""
        if not groups:
            return
        layout = self._live_cache.prefill_layout([cached for cached, _ in groups])
        prompts = [(*group[0].prompt, *(s.token for s in group[0].sampled)) for _, group in groups]
        tokens = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        hidden = self.model(tokens, layout.positions, layout)
        self.stats.prefill_tokens += len(tokens)
        rows, last = [], []
        for i, (cached, group) in enumerate(groups):
            for member, request in enumerate(group):
                own = cached if member == 0 else self._live_cache.fork(cached)
                assert own is not None, "admission left no room for a fork"
                rows.append(_Row(request, own, list(request.sampled)))
                last.append(i)
        ends = layout.cu_seqlens[1:] - 1
        self._sample(rows, hidden[ends[last]])
        self._rows += rows

    def _make_room(self) -> bool:
        """Room for one more token in every row, taken from the youngest where need be; False without rows."""
        i = 0
        while i < len(self._rows):
            if self._live_cache.extend(self._rows[i].cached):
                i += 1
                continue
            youngest = self._rows.pop()
            self._live_cache.free(youngest.cached)
            self._waiting.appendleft(replace(youngest.request, sampled=tuple(youngest.sampled)))
            self.stats.preemptions += 1
        return bool(self._rows)

    def _decode(self) -> None:
        layout = self._live_cache.decode_layout([row.cached for row in self._rows])
        tokens = torch.tensor([row.sampled[-1].token for row in self._rows], device=self.device)
        self._sample(self._rows, self.model(tokens, layout.positions, layout))
        self.stats.decode_tokens += len(tokens)
        self.stats.padding_rows += numerics.num_padded(len(tokens), self.device) - len(tokens)
        self.stats.decode_steps += 1

    def _sample(self, rows: list[_Row], hidden: Tensor) -> None:
        requests = [row.request for row in rows]
        tokens, logprobs = sample(
            hidden,
            self.model.lm_head.weight,
            keys=torch.tensor([r.key for r in requests], device=self.device),
            positions=torch.tensor([row.cached.length for row in rows], device=self.device),
            temperature=torch.tensor([r.temperature for r in requests], device=self.device),
        )
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            row.sampled.append(Sampled(token, logprob, self.weight_version))

    def _take_finished(self) -> list[Rollout]:
        finished, running = [], []
        for row in self._rows:
            stopped = row.sampled[-1].token in row.request.stop_ids
            if stopped or len(row.sampled) >= row.request.max_new_tokens:
                self._live_cache.free(row.cached)
                finished.append(_rollout(row, "stop" if stopped else "length"))
            else:
                running.append(row)
        self._rows = running
        if finished and not self._waiting:  # else the requests that wait will fill the holes
            self._live_cache.compact([row.cached for row in running])
        return finished


def _rollout(row: _Row, finish_reason: str) -> Rollout:
    prompt = row.request.prompt
    tokens, logprobs, versions = zip(*row.sampled, strict=True)
    zeros = [0] * len(prompt)
    return Rollout(
        tokens=torch.tensor([*prompt, *tokens]),
        loss_mask=torch.tensor([*map(bool, zeros), *(True for _ in tokens)]),
        sample_logprobs=torch.tensor([*zeros, *logprobs], dtype=torch.float32),
        weight_version=torch.tensor([*zeros, *versions], dtype=torch.int32),
        num_prompt_tokens=len(prompt),
        rollout_id=row.request.rollout_id,
        finish_reason=finish_reason,
    )
