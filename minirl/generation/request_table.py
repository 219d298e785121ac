"""The life cycle of a request, from the queue to the finished rollout, and the request's cache blocks along the way.

    queued --- admit ---> running --- turn ends ---------------------> gone
      ^                    |  ^           |
      +----- preempt ------+  |     with `parks_after_turn`
      |                       |           v
      |                     start       parked --- release, evict ---> gone
      |                       |           |
      +----- preempt ----- appended <-- next turn

A row is a sequence's entry in the cache: a table of the blocks that store the sequence's keys and values.

queued    The request waits in a group of requests with the same prompt, the group's prefix. The prefix is prefilled
          once, into a row. Each request is admitted with a fork of that row: full blocks are shared, and a partial
          block is copied. The last request of the group takes over the row itself. A request that already has sampled
          tokens forms a group of one.
running   The request's row caches all tokens except the newest. Each step samples one more token. The turn ends at the
          token limit, or when the host sees a stop token or a completed stop string. With asynchronous decoding, one
          more token is in flight by then, and this token is discarded.
parked    The request keeps its row for the next turn, but occupies no slot in the batch.
appended  The request's next turn was submitted with new tokens. The tokens that are not cached yet are prefilled, one
          cache block per step.

When blocks run out, the table first evicts the prefilled prefix of a waiting group, then parked requests, starting with
the most recently parked request. An evicted prefix is prefilled again, and the tokens of an evicted request are
prefilled again with the request's next turn. If nothing can be evicted, the table preempts the youngest running
request, or the appended request that needs the block. A preempted request gives up its row and returns to the front of
the queue. The request keeps its tokens, so no token is sampled twice.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minirl.generation.block_pool import IntArray, ceil_div
from minirl.generation.engine_stats import EngineStats
from minirl.generation.kv_cache import KVCache
from minirl.generation.request_columns import RequestColumns
from minirl.rollouts import (
    TOKEN,
    Request,
    RolloutId,
    SampledSequence,
    Stream,
    concat_tokens,
    make_token_stream,
)

NO_LIMIT = 1 << 62


class PrefixGroup:
    """Queued requests that share a prefix, in the order of submission.

    prefix: the prompt's token ids, int64. A request that already has sampled tokens is alone in its group, and the
    prefix includes these tokens.
    row: the prefix's row in the cache; None until a request of the group is admitted. hidden: hidden state [D] of the
    prefix's last token, used to sample each request's next token; None until the prefill.
    """

    def __init__(self, *requests: Request):
        self.requests = deque(requests)
        first_request = requests[0]
        self.prefix: IntArray = concat_tokens(
            make_token_stream(first_request.prompt_ids), first_request.sampled
        )["id"]
        self.row: int | None = None
        self.hidden: Tensor | None = None

    def shares_prefix_with(self, request: Request) -> bool:
        """Return whether the group's prefix equals the request's prompt."""
        first_request = self.requests[0]
        return not len(first_request.sampled) and first_request.prompt_ids == request.prompt_ids


class RequestTable:
    """An engine's requests, grouped by state, with their cache rows. The table decides which requests run."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_running: int,
        max_prefill_tokens: int,
        headroom_tokens: int,
    ):
        """See `Engine` for the options."""
        self.cache = cache
        self._blocks = cache.blocks
        self.stats = EngineStats()
        self.weight_version = 0  # recorded with each launched token
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.headroom_tokens = headroom_tokens
        # Whether requests were waiting for cache blocks at the last admission.
        self.lacks_blocks = False
        self.queue: deque[PrefixGroup] = deque()
        self.running: IntArray = np.arange(0)  # rows, oldest first
        self.parked: dict[RolloutId, int] = {}  # rows, in parking order
        self.appended: deque[int] = deque()  # rows
        self._readbacks: deque[Readback] = deque()  # oldest launch first
        # One row per running request, one row for the prefix and one row for padding. Parked requests add rows.
        self._num_rows = max_running + 2
        self.columns = RequestColumns(self._num_rows)

    def release_memory(self) -> None:
        """Drop the stored tokens and the stop-token ids of finished requests."""
        self.columns = RequestColumns(self._num_rows)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether any request is queued, is running, or still has appended tokens to prefill."""
        return bool(len(self.running) or self.queue or self.appended)

    @property
    def num_slots(self) -> int:
        """Number of requests that can run. Parked requests occupy slots if the cache stores states for them."""
        return self.max_running - (len(self.parked) if self.cache.has_states else 0)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue new requests and resume parked requests. Requests with sampled tokens go to the front of the queue."""
        started_groups: list[PrefixGroup] = []
        for request in requests:
            if request.rollout_id in self.parked and self._resume(request):
                continue
            if len(request.sampled):
                started_groups.append(PrefixGroup(request))
            elif self.queue and self.queue[-1].shares_prefix_with(request):
                self.queue[-1].requests.append(request)
            else:
                self.queue.append(PrefixGroup(request))
        self.queue.extendleft(reversed(started_groups))

    def _resume(self, request: Request) -> bool:
        """Resume a parked request with more tokens; return False if the request must be prefilled again."""
        row = self.parked.pop(request.rollout_id)
        self.columns.put_request(row, request)
        if self._blocks.lengths[row] < len(request.prompt_ids) + len(request.sampled):
            self.appended.append(row)
            return True
        # Nothing was appended, and an asynchronous step has already computed the last token, so the hidden state for
        # sampling the next token is gone.
        self._free_request(row)
        return False

    def admit(self) -> dict[PrefixGroup, list[Request]]:
        """Take requests off the queue in order, as long as they fit into the batch, the prefill and the cache.

        Only prefixes get blocks at admission, because final lengths are unknown. However, a request is admitted only if
        every request can then decode `headroom_tokens` more tokens, or up to its limit, because prefilling a request
        that is soon preempted is wasted work.

        Example: four requests share a prompt of 70 tokens, 9 blocks of 32 tokens are free, and the headroom is 32
        tokens. The prefix takes 3 blocks. Each request may need one block for its headroom and one block for its copy
        of the prefix's partial last block. The last request needs no copy, because it takes over the prefix's row.

            request   blocks left   reserved before   needs
            first     9 - 3 = 6     0                 2       the prefix is added
            second    6             2                 2
            third     6             4                 2
            fourth    6             6                 1       it waits, and the prefix stays cached
        """
        admitted: dict[PrefixGroup, list[Request]] = {}
        self.lacks_blocks = False
        if not self.queue:
            return admitted
        num_active_requests = len(self.running) + len(self.appended)
        while num_active_requests == self.num_slots == 0:
            self._evict()
        num_prefill_tokens = 0
        # Number of free blocks that admitted requests may soon need for new tokens and for copies of partial blocks.
        num_reserved_blocks = self._num_headroom_blocks() if num_active_requests or self.parked else 0
        while self.queue and num_active_requests < self.num_slots:
            group = self.queue[0]
            prefix_length = len(group.prefix)
            num_new_tokens = prefix_length if group.row is None else 0
            if admitted and num_prefill_tokens + num_new_tokens > self.max_prefill_tokens:
                break
            request = group.requests[0]
            num_remaining_tokens = request.max_new_tokens - len(request.sampled)
            num_needed_blocks = self._blocks.num_new_blocks(
                prefix_length, min(self.headroom_tokens, num_remaining_tokens - 1)
            )
            if len(group.requests) > 1 and prefix_length % self._blocks.block_size != 0:
                num_needed_blocks += 1
            num_prefix_blocks = ceil_div(num_new_tokens, self._blocks.block_size)
            has_room = len(self._blocks.free) >= num_prefix_blocks + num_reserved_blocks + num_needed_blocks
            if not has_room and num_active_requests > 0:
                self.lacks_blocks = True
                break
            while len(self._blocks.free) < num_prefix_blocks:
                # Nothing is running, so make room for the first group: evict the prefixes of later groups, and then
                # parked requests.
                has_evicted = self._evict()
                assert has_evicted, "a request was submitted that exceeds the cache"
            if group.row is None:
                group.row = self._blocks.add(prefix_length)
                num_prefill_tokens += prefix_length
            admitted.setdefault(group, []).append(group.requests.popleft())
            num_active_requests += 1
            num_reserved_blocks += num_needed_blocks
            if not group.requests:
                self.queue.popleft()
            elif not has_room:
                # The first request is always admitted. If there are not enough free blocks for a fork, this request
                # takes over the prefix's row.
                self.queue[0] = PrefixGroup(*group.requests)
                group.requests.clear()
        return admitted

    def _num_headroom_blocks(self) -> int:
        """Return the number of additional blocks that running, appended and parked requests may need as headroom.

        The headroom of each request is capped by the request's token limit.
        """
        rows = np.array([*self.running, *self.appended, *self.parked.values()], np.int64)
        new_lengths = self.columns["length"][rows] + self.headroom_tokens
        new_lengths = np.minimum(new_lengths, self.columns["max_length"][rows])
        cached_lengths = self._blocks.lengths[rows]
        # The newest token of each request need not be cached.
        num_new_tokens = new_lengths - 1 - cached_lengths
        return int(self._blocks.num_new_blocks(cached_lengths, num_new_tokens.clip(min=0)).sum())

    def assign_rows(self, group: PrefixGroup, requests: Sequence[Request]) -> list[int]:
        """Assign rows to a group's admitted requests after the prefill of the group's prefix; return the rows."""
        assert group.row is not None
        reuses_prefix_row = not group.requests
        rows = self.cache.fork(group.row, len(requests) - reuses_prefix_row)
        if reuses_prefix_row:
            rows.append(group.row)
        for row, request in zip(rows, requests, strict=True):
            self.columns.put_request(row, request)
        return rows

    def add_running(self, rows: IntArray) -> None:
        """Add the requests in these rows [n] to the batch, as the youngest running requests."""
        self.running = np.concatenate([self.running, rows])

    def rows_below_max_length(self) -> IntArray:
        """Return the rows of running requests that are below their limits, counting unread tokens."""
        rows = self.running
        # The last token of a request is never cached.
        return rows[self._blocks.lengths[rows] < self.columns["max_length"][rows] - 1]

    def extend(self, rows: IntArray) -> IntArray:
        """Reserve cache space for one more token per request; return the rows of the requests that are still running.

        If blocks run out and nothing can be evicted, the youngest request is preempted, because it usually has the
        fewest tokens to recompute. The oldest request is preempted last. `Engine.submit` rejects requests that exceed
        the whole cache, so the oldest request always fits, and the engine always makes progress. All of a request's
        tokens must have been read before the request is preempted.
        """
        while not self._blocks.can_extend(rows):
            if not self._evict():
                assert not self._readbacks, "a request with unread tokens cannot be preempted"
                self._preempt(int(rows[-1]))
                rows = rows[:-1]
        self._blocks.extend(rows)
        return rows

    def next_appended_chunks(self) -> dict[int, IntArray]:
        """Take requests off `appended`, and reserve space for each request's next chunk [n]; return chunks keyed by
        row.

        A chunk never crosses a block boundary, and all chunks together have at most `max_prefill_tokens` tokens. A
        request is preempted if no block is free for its chunk.
        """
        chunks: dict[int, IntArray] = {}
        token_budget = self.max_prefill_tokens
        while self.appended and len(self.running) + len(chunks) < self.max_running and token_budget > 0:
            row = self.appended.popleft()
            length = int(self._blocks.lengths[row])
            num_tokens_to_boundary = self.cache.prefill_chunk_size - length % self.cache.prefill_chunk_size
            ids = self.columns.tokens(row, length)["id"][: min(token_budget, num_tokens_to_boundary)]
            rows = np.array([row])
            while not self._blocks.can_extend(rows):
                if not self._evict():
                    self._preempt(row)
                    break
            else:
                self._blocks.extend(rows)
                self._blocks.lengths[row] = length + len(ids)
                chunks[row] = ids
                token_budget -= len(ids)
        return chunks

    def enqueue_readback(self, rows: IntArray, sampled: Tensor) -> None:
        """Enqueue the readback of the tokens sampled for these rows [n], as returned by `sample`."""
        self._readbacks.append(Readback(rows, sampled, self.weight_version))

    def drain_readbacks(self, *, num_unread: int = 0) -> list[SampledSequence]:
        """Drain all readbacks except the newest `num_unread`; return the sequences that finish.

        With asynchronous decoding, a request may already have ended with its previous token; its new token is then
        discarded.
        """
        finished: list[SampledSequence] = []
        while len(self._readbacks) > num_unread:
            readback = self._readbacks.popleft()
            finish_reasons = self.columns.append_tokens(*readback.read())
            if finish_reasons:
                finished += [
                    self.columns.finished_sequence(row, reason) for row, reason in finish_reasons.items()
                ]
                self._end_turns(np.array(list(finish_reasons)))
        return finished

    def release(self, rollout_id: RolloutId) -> None:
        """End a request if it is parked."""
        row = self.parked.pop(rollout_id, None)
        if row is not None:
            self._free_request(row)

    def _end_turns(self, rows: IntArray) -> None:
        """Remove requests [n] from the batch; park requests that await another turn, and free all others."""
        self._remove_running(rows)
        for row in rows.tolist():
            request = self.columns.requests[row]
            if request.parks_after_turn:
                self.parked[request.rollout_id] = row
                # The length of the next turn is unknown, so the full headroom is reserved for the request.
                self.columns["max_length"][row] = NO_LIMIT
            else:
                self._free_request(row)

    def _remove_running(self, rows: IntArray) -> None:
        """Remove the requests in these rows [n] from the batch, and discard their unread tokens."""
        self.running = self.running[~np.isin(self.running, rows)]
        for readback in self._readbacks:
            self.stats.discarded_tokens += readback.discard(rows)

    def _evict(self) -> bool:
        """Evict a queued prefix, or else the most recently parked request; return whether anything was evicted.

        An evicted prefix must be prefilled again for the rest of its group, and an evicted request for its next turn.
        If all replies take equally long, requests resume in the order in which they were parked, so the most recently
        parked request waits the longest.
        """
        for group in self.queue:
            if group.row is not None:
                self._blocks.remove(group.row)
                group.row = group.hidden = None
                return True
        if not self.parked:
            return False
        _, row = self.parked.popitem()
        self._free_request(row)
        self.stats.evictions += 1
        return True

    def _preempt(self, row: int) -> None:
        """Move a request back to the front of the queue. The host must have read all of the request's tokens."""
        self.queue.appendleft(PrefixGroup(self.columns.requeued_request(row)))
        self._remove_running(np.array([row]))
        self._free_request(row)
        self.stats.preemptions += 1

    def _free_request(self, row: int) -> None:
        """Drop a request that is not running, and free its row and blocks.

        With asynchronous decoding, the step in flight may still write keys and values to the request's blocks. The
        blocks can be reused anyway, because the next write to these blocks is launched after that step and runs after
        it.
        """
        del self.columns.requests[row]
        self._blocks.remove(row)


class Readback:
    """The newest sampled tokens of B running requests, in transit to the host."""

    def __init__(self, rows: IntArray, sampled: Tensor, weight_version: int):
        """Start copying the tokens to the host, without blocking."""
        self._rows = rows
        self._is_live = np.ones(len(rows), np.bool_)
        self._weight_version = weight_version
        # On CUDA, the copy goes to pinned memory and runs while the host continues.
        self._sampled = sampled.to("cpu", non_blocking=True)
        self._copy_done: torch.cuda.Event | None = None
        if sampled.is_cuda:
            self._copy_done = torch.cuda.Event()
            self._copy_done.record()

    def discard(self, rows: IntArray) -> int:
        """Discard the tokens of requests [n] that left the batch; return the number of discarded tokens."""
        is_discarded = self._is_live & np.isin(self._rows, rows)
        self._is_live &= ~is_discarded
        return int(is_discarded.sum())

    def read(self) -> tuple[IntArray, Stream]:
        """Wait for the copy; return the rows and tokens, TOKEN [n], of the requests that are still in the batch."""
        if self._copy_done is not None:  # waits only for work launched before the copy
            self._copy_done.synchronize()
        ids, logprob_bits = self._sampled.numpy()
        tokens = np.empty(len(ids), TOKEN)
        tokens["id"] = ids
        tokens["logprob"] = logprob_bits.view(np.float32)
        tokens["weight_version"] = self._weight_version
        tokens["is_sampled"] = True
        return self._rows[self._is_live], tokens[self._is_live]
