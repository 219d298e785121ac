"""Continuous batching over the training module itself: submit, step, drain.

Requests are admitted as rows and cache blocks come free; a group's prompt is prefilled once and forked; when the cache
is full the youngest row gives its blocks back and is recomputed later. The engine knows token ids, never text, and has
no collectives: ranks decode on their own. A rollout depends on its request and the weights alone, not on what else is
in the batch. The cache lives from the first `submit` of a phase to its end, so new weights never meet an old cache.

A late engine launches a step before it has read the tokens of the one before, which stay on the device, so that the
device never waits for the host. Limits are known beforehand; a stop token costs one row more, which is thrown away.
"""

import itertools
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from minirl.errors import InputError
from minirl.generation.cuda_graphs import DecodeGraphs
from minirl.generation.decode_step import DecodeStep, decode
from minirl.generation.engine_stats import EngineStats
from minirl.generation.kv_cache import CachedSequence, KVCache
from minirl.generation.running_request import PendingTokens, RunningRequest
from minirl.generation.sampling import sample
from minirl.model import padding
from minirl.model.attention import FLASH_BLOCK, upload
from minirl.model.transformer import Transformer
from minirl.ranks import watchdog
from minirl.rollouts import Request, Rollout, RolloutId


class Engine:
    """Decodes up to `max_running_requests` requests at a time in a cache of `cache_tokens` tokens per layer."""

    def __init__(
        self,
        model: Transformer,
        *,
        max_running_requests: int,
        cache_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        max_prefill_tokens: int = 8192,
        async_decoding: bool | None = None,
        cuda_graphs: bool | None = None,
    ):
        """`dtype` is the weights' (the cache takes the same); a longer prompt than `max_prefill_tokens` goes alone.

        async_decoding: read tokens one step late. graphs: pad decode steps and replay them (`graphs`). By default both on CUDA.
        """
        self.model, self.config, self.dtype, self.device = model, model.config, dtype, device
        self.max_running_requests, self.cache_tokens, self.max_prefill_tokens = (
            max_running_requests,
            cache_tokens,
            max_prefill_tokens,
        )
        self.async_decoding = device.type == "cuda" if async_decoding is None else async_decoding
        self.cuda_graphs = device.type == "cuda" if cuda_graphs is None else cuda_graphs
        self.stats = EngineStats()
        self.weight_version = 0
        self._waiting: deque[Request] = deque()
        self._rows: list[RunningRequest] = []  # oldest first
        self._launches: list[PendingTokens] = []  # not yet read
        self._tokens = torch.empty(
            0, dtype=torch.int64, device=device
        )  # the rows' last, at `RunningRequest.place`
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None
        self._idle: list[
            CachedSequence
        ] = []  # the sequence of padding rows, so that they store in no other's block

    def submit(self, requests: Sequence[Request], *, weight_version: int = 0) -> None:
        """Queue requests. Those of a group, side by side, share one prefill. Not collective.

        Raises InputError for a request that the model's positions or the whole cache could not hold.
        """
        for request in requests:
            longest = len(request.prompt_ids) + request.max_new_tokens
            if not request.prompt_ids or request.max_new_tokens < 1:
                raise InputError(f"{request.rollout_id}: needs a prompt and max_new_tokens >= 1")
            if longest > self.config.max_position_embeddings:
                limit = self.config.max_position_embeddings
                raise InputError(
                    f"prompt + max_new_tokens = {longest} tokens exceed the model's {limit} positions"
                )
            if longest > self.cache_tokens:
                raise InputError(f"a request of {longest} tokens exceeds the cache; raise --cache-tokens")
        if requests and self._cache is None:
            self._begin()
        self.weight_version = weight_version
        self._waiting.extend(requests)

    def step(self) -> list[Rollout]:
        """Admit and prefill what fits, decode one token of every row; returns the rollouts that were seen to finish."""
        watchdog.heartbeat()
        with torch.no_grad():
            self._prefill(self._admit())
            finished = [] if self.async_decoding and self._has_room() else self._read()
            rows = self._make_room()
            if rows:
                self._decode(rows)
            finished += self._read(but=1 if rows and self.async_decoding else 0)
        if not self._rows and not self._waiting:
            self._end()
        return finished

    def abort(self) -> list[Request]:
        """Stop; returns the unfinished requests with what was read of them, to be submitted again."""
        self._discard_unread(self._rows)
        unfinished = [row.unfinished() for row in self._rows] + list(self._waiting)
        self._waiting.clear()
        self._end()
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

    def _begin(self) -> None:
        idle = int(self.cuda_graphs)
        self._cache = cache = KVCache(
            self.config.layer_windows,
            num_kv_heads=self.config.num_key_value_heads,
            head_dim=self.config.head_dim,
            num_query_groups=self.config.num_attention_heads // self.config.num_key_value_heads,
            num_tokens=self.cache_tokens + idle * FLASH_BLOCK,
            max_sequences=self.max_running_requests + idle,
            dtype=self.dtype,
            device=self.device,
        )
        if self.cuda_graphs:
            self._graphs = DecodeGraphs(
                self.model, max_blocks=-(-self.config.max_position_embeddings // cache.block_size)
            )
            sequence = cache.add(1)
            assert sequence is not None
            self._idle = [sequence]

    def _end(self) -> None:
        for launch in self._launches:
            launch.wait()  # what the device still runs is about to go
        self._rows, self._launches, self._tokens = [], [], self._tokens.new_empty(0)
        self._cache, self._graphs, self._idle = None, None, []

    def _admit(self) -> list[tuple[CachedSequence, list[Request]]]:
        """Groups of waiting requests with one prompt, each with its reserved place in the cache."""
        groups: list[tuple[CachedSequence, list[Request]]] = []
        num_rows, num_tokens = len(self._rows), 0
        reserved = 0  # blocks that the forks to come will take
        while self._waiting and num_rows < self.max_running_requests:
            group = self._next_group(self.max_running_requests - num_rows)
            length = len(group[0].prompt_ids) + len(group[0].sampled)
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
            if request.prompt_ids != group[0].prompt_ids or request.sampled:
                break
            group.append(request)
        return group

    def _prefill(self, groups: list[tuple[CachedSequence, list[Request]]]) -> None:
        """Run the groups' prompts end to end, fork, and sample each member's first token."""
        if not groups:
            return
        layout = self._live_cache.prefill_layout([cached for cached, _ in groups])
        prompts = [(*group[0].prompt_ids, *(s.token for s in group[0].sampled)) for _, group in groups]
        tokens = upload(torch.tensor([token for prompt in prompts for token in prompt]), self.device)
        hidden = self.model(tokens, layout.positions, layout)
        self.stats.prefill_tokens += len(tokens)
        rows, last = [], []
        for i, (cached, group) in enumerate(groups):
            for member, request in enumerate(group):
                own = cached if member == 0 else self._live_cache.fork(cached)
                assert own is not None, "admission left no room for a fork"
                rows.append(RunningRequest(request, own, list(request.sampled)))
                last.append(i)
        ends = torch.tensor(layout.lengths).cumsum(0) - 1
        before = self._tokens if self._rows else self._tokens[:0]
        for place, row in enumerate(rows, len(before)):
            row.place = place
        positions = upload(torch.tensor([row.cached.length for row in rows]), self.device)
        hidden, head = hidden[upload(ends[last], self.device)], self.model.lm_head.weight
        keys, temperature = self._keys_and_temperature(rows)
        tokens, logprobs = sample(hidden, head, keys=keys, positions=positions, temperature=temperature)
        self._tokens = torch.cat([before, tokens])
        self._launch(rows, tokens, logprobs)
        self._rows += rows

    def _growing(self) -> list[RunningRequest]:
        """The rows that are not known to be at their end."""
        return [row for row in self._rows if row.num_launched < row.request.max_new_tokens]

    def _has_room(self) -> bool:
        """Whether the next tokens fit without throwing out a row, which one must have read."""
        return not self._rows or self._live_cache.has_room([row.cached for row in self._growing()])

    def _make_room(self) -> list[RunningRequest]:
        """The rows to decode, with room for one more token in each, taken from the youngest where need be."""
        rows, i = self._growing(), 0
        while i < len(rows):
            if self._live_cache.extend(rows[i].cached):
                i += 1
                continue
            assert not self._launches, "a row is thrown out whose tokens were not read"
            youngest = rows.pop()
            self._rows.remove(youngest)
            self._live_cache.free(youngest.cached)
            self._waiting.appendleft(youngest.unfinished())
            self.stats.preemptions += 1
        return rows

    def _decode(self, rows: list[RunningRequest]) -> None:
        idle = (
            padding.graph_batch_size(len(rows), self.max_running_requests) - len(rows) if self._graphs else 0
        )
        layout = self._live_cache.decode_layout([row.cached for row in rows] + self._idle * idle)
        tokens = self._tokens[upload(torch.tensor([row.place for row in rows] + [0] * idle), self.device)]
        step = DecodeStep(tokens, layout, *self._keys_and_temperature(rows, idle))
        tokens, logprobs = self._graphs.decode(step) if self._graphs else decode(self.model, step)
        self._tokens = tokens[: len(rows)]
        for place, row in enumerate(rows):
            row.place = place
        self._launch(rows, self._tokens, logprobs[: len(rows)])
        self.stats.decode_tokens += len(rows)
        self.stats.padding_tokens += padding.num_padded(len(rows) + idle, self.device) - len(rows)
        self.stats.decode_steps += 1

    def _keys_and_temperature(self, rows: list[RunningRequest], idle: int = 0) -> tuple[Tensor, Tensor]:
        keys = torch.tensor([row.request.key for row in rows] + [0] * idle)
        temperature = torch.tensor([row.request.temperature for row in rows] + [0.0] * idle)
        return upload(keys, self.device), upload(temperature, self.device)

    def _launch(self, rows: list[RunningRequest], tokens: Tensor, logprobs: Tensor) -> None:
        self._launches.append(PendingTokens(rows, tokens, logprobs, weight_version=self.weight_version))

    def _read(self, *, but: int = 0) -> list[Rollout]:
        """Read what was launched, `but` for the last so many; returns the rollouts that finished."""
        ready, self._launches = (
            self._launches[: len(self._launches) - but],
            self._launches[len(self._launches) - but :],
        )
        for launch in ready:
            for row, sampled in launch.read():
                row.sampled.append(
                    sampled
                )  # to no effect where the row's rollout was made from the tokens before
        return self._take_finished()

    def _discard_unread(self, rows: list[RunningRequest]) -> None:
        unread = sum(row.num_launched - len(row.sampled) for row in rows)
        self.stats.decode_tokens -= unread
        self.stats.discarded_tokens += unread

    def _take_finished(self) -> list[Rollout]:
        finished = [row for row in self._rows if row.finish_reason is not None]
        if finished:
            self._discard_unread(finished)
            self._rows = [row for row in self._rows if row.finish_reason is None]
            for row in finished:
                self._live_cache.free(row.cached)
            if not self._waiting:  # else the requests that wait will fill the holes
                self._live_cache.compact([row.cached for row in self._rows] + self._idle)
        return [row.rollout() for row in finished]
