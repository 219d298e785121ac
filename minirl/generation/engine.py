"""The generation engine: continuous batching over the training module itself.

`submit` queues requests and `step` advances all running ones by one token. A waiting request is admitted as
soon as there is a free place in the batch and there are enough free cache blocks. Requests that share a
prompt prefill it once and fork it; it stays in the cache, as their stem, until all of them are admitted. A request
between two turns keeps its blocks, but no place in the batch. When the cache is full, such requests give their blocks
back first, then the youngest running one, which is preempted; they are recomputed later.

The engine handles token ids only, never text: a `StopTest` finds the stop strings of a turn. Each rank decodes on its
own, and nothing in the engine is collective, unless ranks share the model's layers (`model.shards`). A rollout depends
only on its request and the weights, not on the other requests in the batch. At the end of a generation phase, when no
request is left, the cache is empty, so new weights never read old keys and values. The engine also frees its memory,
unless it keeps it with the CUDA graphs that read it.

With asynchronous decoding, the engine launches a step before the host has read the tokens of the step before,
which stay on the device as the next step's input. So the device never waits for the host. The engine knows in
advance which requests reach their token limit. A request that ends with a stop token or by its stop test is decoded
one token too far, and that token is discarded.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minirl.errors import refuse
from minirl.generation.engine_stats import EngineStats
from minirl.generation.kv_cache import KVCache, ceil_div
from minirl.generation.running_requests import PendingTokens, RunningRequests
from minirl.generation.sampling import sample_packed
from minirl.model import padding
from minirl.model.attention import PAGED_BLOCK, PackedLayout, concatenated_ranges, upload
from minirl.model.transformer import Transformer
from minirl.ranks.time_account import spent_on
from minirl.rollouts import Request, Rollout, RolloutId, StopTest, token_tensor

if TYPE_CHECKING:
    from minirl.extras.kernels.cuda_graphs import DecodeGraphs

PREFILL_TOKENS = 8192  # per forward pass


@dataclass(eq=False)
class _Stem:
    """The common start of a group's requests, in a row of the cache. The requests are forks of it.

    hidden: the last token's hidden state [D], which the next tokens are sampled from; None until the prefill.
    """

    first: Request
    row: int
    hidden: Tensor | None = None

    @property
    def tokens(self) -> Tensor:
        """The prompt and the tokens that the request had when it was queued; int64, on the host."""
        return torch.cat([token_tensor(self.first.prompt_ids), self.first.sampled.tokens])


class Engine:
    """Decodes up to `max_running_requests` requests at once in a cache of `cache_tokens` tokens per layer."""

    def __init__(
        self,
        model: Transformer,
        *,
        max_running_requests: int,
        cache_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        max_prefill_tokens: int = PREFILL_TOKENS,
        room_tokens: int = 112,
        async_decoding: bool | None = None,
        cuda_graphs: bool | None = None,
        keeps_cache: bool = False,
        make_stop_test: Callable[[tuple[str, ...]], StopTest] | None = None,
    ):
        """dtype: of the weights and of the cache.

        max_prefill_tokens: limit of one forward pass; a longer prompt is prefilled alone.
        room_tokens: the least number of tokens that every running request can decode after an admission before one is
        preempted. More room means fewer requests at a time: with 112, under 2 % are preempted.
        async_decoding: read tokens one step late. By default on CUDA only.
        cuda_graphs: pad decode steps and replay them (see `cuda_graphs`). By default on CUDA only.
        keeps_cache: keep the memory of the cache, and the graphs, from one phase to the next.
        make_stop_test: makes the test for stop strings, which requests may not have without it.
        """
        self.model = model
        self.config = model.config
        self.dtype = dtype
        self.device = device
        self.max_running_requests = max_running_requests
        self.cache_tokens = cache_tokens
        self.max_prefill_tokens = max_prefill_tokens
        self.room_tokens = room_tokens
        is_cuda = device.type == "cuda"
        self.async_decoding = is_cuda if async_decoding is None else async_decoding
        self.cuda_graphs = is_cuda if cuda_graphs is None else cuda_graphs
        self.keeps_cache = keeps_cache
        self._make_stop_test = make_stop_test and functools.cache(make_stop_test)
        self.stats = EngineStats()
        self.weight_version = 0
        # Were requests waiting for cache blocks at the last step?
        self.lacks_room = False

        self._waiting: deque[Request] = deque()
        self._running = self._no_requests()
        # The stem of the group that is admitted only in part; its other requests are waiting.
        self._stem: _Stem | None = None
        # The rows of requests between two turns, oldest first.
        self._held: dict[RolloutId, int] = {}
        # The rows of resumed requests that have tokens which the cache lacks.
        self._resumed: deque[int] = deque()
        # Launched, but not yet read by the host; oldest first.
        self._pending: deque[PendingTokens] = deque()
        # On the device, the newest token of each running request, at its `RunningRequests.token_index`.
        self._newest_tokens = torch.empty(0, dtype=torch.int32, device=device)
        self._cache: KVCache | None = None
        self._graphs: DecodeGraphs | None = None
        # With CUDA graphs, the row of the padding in decode steps, int64 [1]. Padding stores keys and values like any
        # request, so it needs a block.
        self._padding_row: Tensor

    def submit(self, requests: Sequence[Request], *, weight_version: int = 0) -> None:
        """Queue requests, and continue those that are between two turns. Not collective.

        Neighbours with the same prompt share one prefill. Of a request between two turns, which has more tokens than
        before, only the new ones are computed, unless the cache had to drop the others. Requests that have tokens come
        before the others.
        weight_version: recorded with each token sampled from now on.
        Raises InputError for a request that is longer than the model's positions or the whole cache. Nothing is queued
        then, and requests between two turns stay as they were.
        """
        for request in requests:
            max_length = len(request.prompt_ids) + request.max_new_tokens
            max_positions = self.config.max_position_embeddings
            refuse(
                max_length > max_positions,
                f"prompt + max_new_tokens = {max_length} tokens exceed the model's {max_positions} positions",
            )
            refuse(
                max_length > self.cache_tokens,
                f"a request of {max_length} tokens exceeds the cache; raise --cache-tokens",
            )
        if requests and self._cache is None:
            self._allocate()
        self.weight_version = weight_version
        begun: list[Request] = []  # with tokens that the cache lacks
        for request in requests:
            if request.rollout_id in self._held:
                row = self._held.pop(request.rollout_id)
                self._running.admit(request, row)
                self._resumed.append(row)
            elif request.sampled:
                begun.append(request)
            else:
                self._waiting.append(request)
        self._waiting.extendleft(reversed(begun))

    @property
    def is_busy(self) -> bool:
        """Return whether requests are unfinished, or wait in the cache for another turn."""
        return self.is_decoding or bool(self._held)

    @property
    def is_decoding(self) -> bool:
        """Return whether `step` has work: some request is not waiting for another turn."""
        return bool(self._running or self._waiting or self._resumed)

    @property
    def is_waited_for(self) -> bool:
        """Return whether `step` has work, or ranks that share the model have some, which they do together."""
        shards = self.model.shards
        return self.is_decoding or (shards is not None and shards.others_decode)

    def release(self, *rollout_ids: RolloutId) -> None:
        """End requests that wait for a further turn. Not collective."""
        for rollout_id in rollout_ids:
            if rollout_id in self._held:
                self._forget(self._held.pop(rollout_id))
        if not self.is_busy:
            self._end_phase()

    def step(self) -> list[Rollout]:
        """Admit and prefill waiting requests, then decode one token of every running request.

        Returns the rollouts found to be finished. Not collective.
        """
        if not self.is_decoding:
            self._join_others()
            return []
        # Waiting requests would fill the free blocks anyway, so blocks move only if none waits.
        if not self._waiting:
            self._live_cache.compact()
        with torch.no_grad(), spent_on("prefill"):
            self._compute_appended()
            self._prefill(self._admit())
        with torch.no_grad(), spent_on("decode"):
            finished: list[Rollout] = []
            # An asynchronous step can be launched with tokens still unread, unless a request may be
            # preempted: to be recomputed it must have all its tokens on the host.
            rows = self._below_limit()
            can_stay_unread = self.async_decoding and self._live_cache.can_extend(rows)
            if not can_stay_unread:
                finished += self._read_pending()
                rows = self._below_limit()
            rows = self._extend_or_preempt(rows)
            if len(rows):
                self._decode(rows)
            # With asynchronous decoding the step just launched is read one call later. Until then the device
            # runs it, while the host handles the finished requests and prepares the next step.
            num_unread = 1 if len(rows) and self.async_decoding else 0
            finished += self._read_pending(num_unread=num_unread)
        if not self.is_busy:
            self._end_phase()
        return finished

    def generate(
        self,
        requests: Sequence[Request],
        *,
        weight_version: int = 0,
    ) -> list[Rollout]:
        """Run these requests to their end. Rollouts are in the order of the requests. Not collective."""
        self.submit(requests, weight_version=weight_version)
        finished: dict[RolloutId, Rollout] = {}
        while self.is_decoding:
            for rollout in self.step():
                finished[rollout.rollout_id] = rollout
        return [finished[request.rollout_id] for request in requests]

    def sync(self) -> None:
        """Pass through the model with the ranks that share it until none has tokens (collective among them)."""
        shards = self.model.shards
        if shards is None:
            return
        shards.is_done, shards.are_done = True, False
        while not shards.are_done:
            self._join_others()
        shards.is_done = False

    def take_stats(self) -> EngineStats:
        """The work done since the last call."""
        stats = self.stats
        self.stats = EngineStats()
        return stats

    @property
    def _live_cache(self) -> KVCache:
        assert self._cache is not None, "nothing was submitted"
        return self._cache

    @property
    def _num_places(self) -> int:
        """How many requests can run. Those between two turns take places if the cache holds their states."""
        return self.max_running_requests - (len(self._held) if self.config.delta_net else 0)

    def _upload(self, *tensors: Tensor) -> list[Tensor]:
        """Copy host tensors to the device, without waiting for it."""
        return [upload(tensor, self.device) for tensor in tensors]

    def _no_requests(self) -> RunningRequests:
        """Has a row for each running request, the stem and the padding, and grows when requests wait between turns."""
        return RunningRequests(self.max_running_requests + 2, self._make_stop_test)

    def _allocate(self) -> None:
        """Allocate the cache, with CUDA graphs plus the padding's block."""
        num_padding_rows = int(self.cuda_graphs)
        self._cache = KVCache(
            self.config,
            num_tokens=self.cache_tokens + num_padding_rows * PAGED_BLOCK,
            max_sequences=self.max_running_requests + num_padding_rows,
            dtype=self.dtype,
            device=self.device,
        )
        if self.cuda_graphs:
            max_blocks = ceil_div(self.config.max_position_embeddings, self._cache.block_size)
            from minirl.extras.kernels.cuda_graphs import DecodeGraphs

            self._graphs = DecodeGraphs(max_blocks)
            padding_row = self._cache.add(1)
            assert padding_row is not None
            self._padding_row = torch.tensor([padding_row])

    @torch.no_grad()
    def _join_others(self) -> None:
        """Without own tokens, pass through the model with the ranks that share it, if there are any."""
        if self.model.shards is not None:
            nothing = torch.empty(0, dtype=torch.int64, device=self.device)
            self.model(nothing, nothing, PackedLayout((), self.device))

    def _end_phase(self) -> None:
        """Free the memory of the requests, which are gone, and of the cache, unless the engine keeps it."""
        # The device may still be running a step that uses the cache.
        while self._pending:
            self._pending.popleft().wait()
        self._newest_tokens = self._newest_tokens.new_empty(0)
        self._running = self._no_requests()
        if not self.keeps_cache:
            self._cache = None
            self._graphs = None

    def _admit(self) -> list[tuple[Request, _Stem]]:
        """Take requests off the queue in order, while the batch, the prefill and the cache can hold them.

        Blocks are reserved only for the tokens that exist: lengths are not known in advance. But a request is admitted
        only if all can then decode `room_tokens` more, because a prefill is wasted on a request that is soon
        preempted. `_extend_or_preempt` copes with a full cache.

        Example: a group of four with a prompt of 70 tokens, 10 free blocks of 32, room for 32 tokens. The stem takes 3
        blocks; each request may need one for its room and one for its copy of the stem's last, partial block.

            request   spare blocks   promised before   needs
            first     10 - 3 = 7     0                 2       the stem is added
            second    7              2                 2
            third     7              4                 2
            fourth    7              6                 2       it waits, and the stem stays for it
        """
        admitted: list[tuple[Request, _Stem]] = []
        self.lacks_room = False
        # Resumed requests that are not computed yet take a place, too.
        num_running = len(self._running) + len(self._resumed)
        while self._waiting and num_running == 0 and self._num_places == 0:
            self._free_one()
        if not self._waiting or num_running >= self._num_places:
            return admitted
        cache = self._live_cache
        num_prefill_tokens = 0
        # Reserved free blocks: for tokens that requests may decode soon, and for forks, which are made after the
        # prefill, when the stem's keys exist.
        num_promised = self._blocks_soon()
        while self._waiting and num_running < self._num_places:
            request = self._waiting[0]
            length = len(request.prompt_ids) + len(request.sampled)
            stem = self._stem if self._stem and _have_one_stem(request, self._stem.first) else None
            if stem is None and admitted and num_prefill_tokens + length > self.max_prefill_tokens:
                break
            num_spare = cache.spare_blocks(0 if stem else length)
            num_blocks = cache.num_new_blocks(length, self.room_tokens)
            if length % cache.block_size != 0:
                num_blocks += 1  # a fork's copy of the last, partial block
            has_room = num_spare - num_promised >= max(1, num_blocks)
            if not has_room and num_running > 0:
                self.lacks_room = True
                break
            while num_spare < 0:
                # Nothing is running: a stem of later requests, or requests that wait for another turn, take the room of
                # the first.
                has_freed = self._free_one()
                assert has_freed, "a request was submitted that exceeds the cache"
                num_spare = cache.spare_blocks(length)
            if stem is None:
                row = cache.add(length)
                assert row is not None, "there were spare blocks"
                stem = _Stem(request, row)
                num_prefill_tokens += length
            admitted.append((self._waiting.popleft(), stem))
            num_running += 1
            num_promised += num_blocks
            # If nothing is running, the first request is admitted in any case, without a fork.
            if has_room and self._waiting and _have_one_stem(self._waiting[0], request):
                assert self._stem in (None, stem), "requests of another stem wait further ahead"
                self._stem = stem
            elif stem is self._stem:
                self._stem = None
        return admitted

    def _free_one(self) -> bool:
        """Free the blocks of the stem, or else of the request that has waited the shortest for its next turn.

        The stem is prefilled again for the rest of its group, and the request for its next turn. If replies take
        equally long, those that have waited longest get theirs first. Returns False if there is neither.
        """
        if self._stem is not None:
            self._live_cache.free(self._stem.row)
            self._stem = None
        elif self._held:
            _, row = self._held.popitem()
            self._forget(row)
            self.stats.drops += 1
        else:
            return False
        return True

    def _blocks_soon(self) -> int:
        """How many blocks the admitted requests may need for `room_tokens` more tokens each.

        This includes requests between two turns, so that none has to give way to a new request.
        """
        cache, running = self._live_cache, self._running
        num_in_turn = len(running) + len(self._resumed)
        rows = torch.tensor([*running.rows.tolist(), *self._resumed, *self._held.values()], dtype=torch.int64)
        ends = running.counts[rows] + self.room_tokens
        ends[:num_in_turn].clamp_(max=running.limits[rows[:num_in_turn]])
        # The cache need not hold the newest of these tokens.
        num_more = running.prompt_lengths[rows] + ends - 1 - cache.lengths[rows]
        return int(cache.num_new_blocks(cache.lengths[rows], num_more.clamp(min=0)).sum())

    def _prefill(self, admitted: list[tuple[Request, _Stem]]) -> None:
        """Run the new stems packed end to end, fork them, and sample the next token of each request."""
        if not admitted:
            return
        stems = list(dict.fromkeys(stem for _, stem in admitted))
        new_stems = [stem for stem in stems if stem.hidden is None]
        if new_stems:
            layout = self._live_cache.prefill_layout([stem.row for stem in new_stems])
            tokens = upload(torch.cat([stem.tokens for stem in new_stems]), self.device)
            hidden = self.model(tokens, layout.positions, layout)
            self.stats.prefill_tokens += len(tokens)
            ends = torch.tensor(layout.lengths).cumsum(0)
            for stem, end in zip(new_stems, ends.tolist(), strict=True):
                stem.hidden = hidden[end - 1].clone()  # a view would keep the states of the whole prefill

        # The last request of a stem takes its row, unless others still wait for it; the rest take forks. Every one of
        # them samples from the stem's hidden state.
        rows: list[int] = []
        states: list[Tensor] = []
        last_of = {stem: request for request, stem in admitted if stem is not self._stem}
        for request, stem in admitted:
            assert stem.hidden is not None
            row = stem.row if last_of.get(stem) is request else self._live_cache.fork(stem.row)
            assert row is not None, "admission reserved no block for a fork"
            self._running.admit(request, row)
            rows.append(row)
            states.append(stem.hidden)
        self._join(torch.tensor(rows), torch.stack(states))

    def _compute_appended(self) -> None:
        """Compute appended tokens of resumed requests: for each request, up to the end of one cache block.

        Each token is decoded like the newest token of a separate sequence, all with the request's block table. A step
        computes up to `max_prefill_tokens`, later steps the rest. A request whose tokens are all computed samples the
        next one and runs.

        Example: of a request of 110 tokens, 70 are in the cache, and blocks have 32. Tokens 70 to 95, the rest of its
        third block, are decoded as 26 sequences of 71 to 96 tokens; in the next step tokens 96 to 109 as 14, and the
        state of the last one gives the next token.
        """
        cache = self._live_cache
        num_places = self.max_running_requests - len(self._running)
        num_tokens = self.max_prefill_tokens
        computed: list[int] = []
        tokens: list[Tensor] = []
        while self._resumed and len(computed) < num_places and num_tokens > 0:
            row = self._resumed.popleft()
            part = self._reserve_appended(row, num_tokens)
            if len(part):
                computed.append(row)
                tokens.append(part)
                num_tokens -= len(part)
        if not computed:
            return
        rows = torch.tensor(computed)
        counts = torch.tensor(list(map(len, tokens)))
        repeated = rows.repeat_interleave(counts)
        each_length = concatenated_ranges(cache.lengths[rows] + 1 - counts, counts)
        layout = cache.decode_layout(repeated, lengths=each_length)
        hidden = self.model(upload(torch.cat(tokens), self.device), layout.positions, layout)
        self.stats.prefill_tokens += len(repeated)
        is_ready = cache.lengths[rows] == self._running.lengths(rows)
        self._resumed.extendleft(reversed(rows[~is_ready].tolist()))
        if is_ready.any():
            last = upload(counts.cumsum(0)[is_ready] - 1, self.device)
            self._join(rows[is_ready], hidden[last])

    def _reserve_appended(self, row: int, max_tokens: int) -> Tensor:
        """Reserve space for up to `max_tokens` of a request's uncomputed appended tokens, within one block.

        Returns these tokens, int64; if no block is free it returns none, and preempts the request.
        """
        cache = self._live_cache
        tokens = self._running.tokens_after(row, int(cache.lengths[row]))[:max_tokens]
        while not (count := cache.extend_by(row, len(tokens))):
            if not self._free_one():
                self._preempt(row)
                break
        return tokens[:count]

    def _join(self, rows: Tensor, states: Tensor) -> None:
        """Start the requests in these rows int64 [n]: sample the next token of each from its hidden state [D]."""
        old_tokens = self._newest_tokens if self._running else self._newest_tokens[:0]
        positions, *sampling = self._upload(self._live_cache.lengths[rows], *self._running.sampling(rows))
        packed = sample_packed(states, self.model.head, positions, sampling)

        # Append the new tokens to those of the running requests, whose `token_index` stays valid.
        self._running.token_index[rows] = torch.arange(len(old_tokens), len(old_tokens) + len(rows))
        self._newest_tokens = torch.cat([old_tokens, packed[0]])
        self._running.run(rows)
        self._start_reading(rows, packed)

    def _below_limit(self) -> Tensor:
        """The rows of running requests that have not reached `max_new_tokens`, unread tokens included."""
        rows = self._running.rows
        return rows[self._live_cache.lengths[rows] < self._running.last_lengths]

    def _extend_or_preempt(self, rows: Tensor) -> Tensor:
        """Add cache space for one more token to each of these requests; returns the rows of those that still run.

        If a block is missing, and `_free_one` frees none, the youngest request is preempted: it goes back to the front
        of the queue with the tokens sampled so far, and will be prefilled again with them. The youngest usually has the
        least to recompute. The oldest is preempted last and so always advances: the engine makes progress, since
        `submit` refused any request that exceeds the cache on its own.
        """
        cache = self._live_cache
        needs_blocks = cache.needs_blocks(rows)
        num_left = len(rows)
        for i in needs_blocks.nonzero()[:, 0].tolist():
            # The youngest may be request i itself. If not, its blocks are now free, so try request i again.
            while i < num_left and not cache.extend(int(rows[i])):
                if self._free_one():
                    continue
                # `step` has read all tokens, since `can_extend` was false.
                assert not self._pending, "a request is preempted whose tokens were not read"
                num_left -= 1
                self._preempt(int(rows[num_left]))
        rows = rows[:num_left]
        cache.lengths[rows[~needs_blocks[:num_left]]] += 1
        return rows

    def _preempt(self, row: int) -> None:
        """Put a request, which has no unread tokens, back at the front of the queue."""
        self._waiting.appendleft(self._running.unfinished(row))
        self._forget(row)
        self.stats.preemptions += 1

    def _decode(self, rows: Tensor) -> None:
        """Launch one decode step of these requests, padded to a batch size of the CUDA graphs, if any.

        Padding decodes any token, with any key, always at the same position of its sequence. Its results are
        discarded.
        """
        running = self._running
        num_requests = len(rows)
        padded = rows
        if self._graphs is not None:
            batch_size = padding.graph_batch_size(num_requests, self.max_running_requests)
            padded = torch.cat([rows, self._padding_row.expand(batch_size - num_requests)])
        sampling = running.sampling(padded)
        inputs = [running.token_index[padded], *sampling, *self._live_cache.decode_inputs(padded)]
        token_index, *uploaded = self._upload(*inputs)

        def step(tokens: Tensor, *uploaded: Tensor) -> Tensor:
            layout = self._live_cache.decode_layout(padded, uploaded[len(sampling) :])
            hidden = self.model(tokens, layout.positions, layout)
            # The sampled token comes one position after the token put in.
            positions = layout.positions + 1
            return sample_packed(hidden, self.model.head, positions, uploaded[: len(sampling)])

        run = step if self._graphs is None else functools.partial(self._graphs.run, step)
        sampled = run(self._newest_tokens[token_index], *uploaded)[:, :num_requests]
        self._newest_tokens = sampled[0]
        running.token_index[rows] = torch.arange(num_requests)
        self._start_reading(rows, sampled)
        self.stats.decode_tokens += num_requests
        self.stats.most_running = max(self.stats.most_running, num_requests)
        num_computed = padding.num_padded(len(padded), self.device)
        self.stats.padding_tokens += num_computed - num_requests
        self.stats.decode_steps += 1

    def _start_reading(self, rows: Tensor, sampled: Tensor) -> None:
        """Start copying these requests' sampled tokens (the result of `sample_packed`) to the host."""
        past_requests = self._running.past_requests[rows]
        self._pending.append(PendingTokens(rows, past_requests, sampled, self.weight_version))

    def _read_pending(self, *, num_unread: int = 0) -> list[Rollout]:
        """Read the pending tokens except the `num_unread` newest launches; returns the finished rollouts."""
        finished: list[Rollout] = []
        while len(self._pending) > num_unread:
            for row, reason in self._running.read(self._pending.popleft()).items():
                finished.append(self._running.rollout(row, reason))
                self._end_turn(row)
        return finished

    def _end_turn(self, row: int) -> None:
        """Remove a request from the batch, and from the cache unless it waits for another turn."""
        # The newest token is not in the cache yet.
        num_launched = int(self._live_cache.lengths[row]) + 1
        self.stats.discarded_tokens += num_launched - int(self._running.lengths(torch.tensor(row)))
        request = self._running.requests[row]
        if request.holds:
            self._running.pause(row)
            self._held[request.rollout_id] = row
        else:
            self._forget(row)

    def _forget(self, row: int) -> None:
        """Stop a request, and free its row and its blocks.

        With asynchronous decoding, the step under way may still write keys of it. The blocks can be reused all the
        same: whatever writes there next is launched later and runs later.
        """
        self._running.remove(row)
        self._live_cache.free(row)


def _have_one_stem(request: Request, other: Request) -> bool:
    """Return whether two requests can fork one stem: they have the same prompt and no sampled tokens."""
    return request.prompt_ids == other.prompt_ids and not request.sampled and not other.sampled
