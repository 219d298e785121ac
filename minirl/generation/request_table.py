"""The life of a request, from the queue to its finished rollout, and the cache blocks that it holds along the way.

    queued --- admit ---> running --- turn ends ---------------------> gone
      ^                    |  ^           |
      +----- preempt ------+  |     with `parks_after_turn`
      |                       |           v
      |                     start       parked --- release, evict ---> gone
      |                       |           |
      +----- preempt ----- appended <-- next turn

A row is the entry of a sequence in the cache: the list of the blocks that hold its keys and values.

queued    Waits in a group of requests that share a prefix, their prompt. The prefix is prefilled once, into a row. Each
          request is admitted with a fork of that row (full blocks are shared, a partly filled one is copied); the last
          of the group takes the row itself. A request that already has tokens forms a group of its own.
running   Its row holds all its tokens but the newest. Each step samples one more token. Its turn ends at its token
          limit, or when the host sees a stop token or a completed stop string. With asynchronous decoding one more
          token is in flight by then; it is discarded.
parked    Keeps its row for its next turn, but takes no slot in the batch.
appended  Its next turn was submitted with new tokens. Those that its row lacks are computed, a block at a time.

When blocks are missing, the prefilled prefix of a group that waits is evicted, then parked requests, the one parked
last first. A prefix is prefilled again; so is the next turn of an evicted request, which is queued with all its tokens.
Failing that, the youngest running request is preempted, or the appended one that needs the block: it gives up its row,
and returns to the front of the queue with its tokens, none of which is sampled again.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from minirl.generation.block_pool import IntArray
from minirl.generation.engine_stats import EngineStats
from minirl.generation.kv_cache import KVCache
from minirl.generation.request_columns import RequestColumns
from minirl.rollouts import (
    TOKEN,
    Request,
    RolloutId,
    SampledSequence,
    Stream,
    join_streams,
    unsampled_stream,
)

NO_LIMIT = 1 << 62


class PrefixGroup:
    """Queued requests that share a prefix, in order.

    prefix: the ids int64 of their prompt; of a request that has tokens, which is alone in its group, these too.
    row: the prefix' row in the cache, once a request of the group is admitted. hidden: the state [D] of its last
    token, which the next tokens are sampled from; None until the prefill.
    """

    def __init__(self, *requests: Request):
        self.requests = deque(requests)
        first = requests[0]
        self.prefix: IntArray = join_streams(unsampled_stream(first.prompt_ids), first.sampled)["id"]
        self.row: int | None = None
        self.hidden: Tensor | None = None

    def shares_prefix_with(self, request: Request) -> bool:
        """Whether the prefix is the request's prompt."""
        first = self.requests[0]
        return not len(first.sampled) and first.prompt_ids == request.prompt_ids


class RequestTable:
    """All requests of an engine by state, with their rows in the cache. It decides which ones run; nothing computes."""

    def __init__(
        self,
        cache: KVCache,
        *,
        max_running: int,
        max_prefill_tokens: int,
        headroom_tokens: int,
    ):
        """The options are those of `Engine`."""
        self.cache = cache
        self._blocks = cache.blocks
        self.stats = EngineStats()
        self.weight_version = 0  # of tokens that are launched
        self.max_running = max_running
        self.max_prefill_tokens = max_prefill_tokens
        self.headroom_tokens = headroom_tokens
        # Whether requests were waiting for cache blocks at the last admission.
        self.lacks_blocks = False
        self.queue: deque[PrefixGroup] = deque()
        self.running: IntArray = np.arange(0)  # rows, oldest first
        self.parked: dict[RolloutId, int] = {}  # rows, in the order in which they were parked
        self.appended: deque[int] = deque()  # rows
        self._readbacks: deque[Readback] = deque()  # the oldest launch first
        # One row per running request, one for the prefix and one for the padding; parked requests add more.
        self._num_rows = max_running + 2
        self.columns = RequestColumns(self._num_rows)

    def free_memory(self) -> None:
        """Forget the tokens and stop ids of requests, which are gone."""
        self.columns = RequestColumns(self._num_rows)

    @property
    def is_decoding(self) -> bool:
        """Whether any request is queued, running or has appended tokens to compute."""
        return bool(len(self.running) or self.queue or self.appended)

    @property
    def num_slots(self) -> int:
        """How many requests can run. Parked ones take slots if the cache holds states of theirs."""
        return self.max_running - (len(self.parked) if self.cache.has_states else 0)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, and resume the parked ones among them. Requests that have tokens go to the front."""
        begun: list[PrefixGroup] = []
        for request in requests:
            if request.rollout_id in self.parked and self._resume(request):
                continue
            if len(request.sampled):
                begun.append(PrefixGroup(request))
            elif self.queue and self.queue[-1].shares_prefix_with(request):
                self.queue[-1].requests.append(request)
            else:
                self.queue.append(PrefixGroup(request))
        self.queue.extendleft(reversed(begun))

    def _resume(self, request: Request) -> bool:
        """Resume a parked request with more tokens; returns whether it can be resumed."""
        row = self.parked.pop(request.rollout_id)
        self.columns.put_request(row, request)
        if self._blocks.lengths[row] < len(request.prompt_ids) + len(request.sampled):
            self.appended.append(row)
            return True
        # Nothing was appended, and an asynchronous step has computed its last token: the state that the next one is
        # sampled from is gone.
        self._remove(row)
        return False

    def admit(self) -> dict[PrefixGroup, list[Request]]:
        """Take requests off the queue in order, while the batch, the prefill and the cache can hold them.

        Blocks are taken for the prefixes alone: how long requests will be is not known. But a request is admitted only
        if all can then decode `headroom_tokens` more, or up to their limits, because a prefill is wasted on a request
        that is soon preempted.

        Example: a group of four with a prompt of 70 tokens, 9 free blocks of 32, a headroom of 32 tokens. The prefix
        takes 3 blocks. Each request may need one for its headroom, and one for its copy of the prefix' last, partial
        block; but the last request takes the prefix itself.

            request   spare blocks   promised before   needs
            first     9 - 3 = 6      0                 2       the prefix is added
            second    6              2                 2
            third     6              4                 2
            fourth    6              6                 1       it waits, and the prefix stays for it
        """
        admitted: dict[PrefixGroup, list[Request]] = {}
        self.lacks_blocks = False
        if not self.queue:
            return admitted
        num_active = len(self.running) + len(self.appended)
        while num_active == self.num_slots == 0:
            self._evict()
        num_prefill_tokens = 0
        # Free blocks that requests may need soon, for tokens and for the copies of forks.
        num_reserved = self._num_headroom_blocks() if num_active or self.parked else 0
        while self.queue and num_active < self.num_slots:
            group = self.queue[0]
            length = len(group.prefix)
            num_new_tokens = length if group.row is None else 0
            if admitted and num_prefill_tokens + num_new_tokens > self.max_prefill_tokens:
                break
            request = group.requests[0]
            num_left = request.max_new_tokens - len(request.sampled)
            num_blocks = self._blocks.num_new_blocks(length, min(self.headroom_tokens, num_left - 1))
            if len(group.requests) > 1 and length % self._blocks.block_size != 0:
                num_blocks += 1
            has_room = self._blocks.num_free_after(num_new_tokens) - num_reserved >= num_blocks
            if not has_room and num_active > 0:
                self.lacks_blocks = True
                break
            while self._blocks.num_free_after(num_new_tokens) < 0:
                # Nothing is running: a later group's prefix and parked requests make room for the first request.
                has_evicted = self._evict()
                assert has_evicted, "a request was submitted that exceeds the cache"
            if group.row is None:
                group.row = self._blocks.add(length)
                num_prefill_tokens += length
            admitted.setdefault(group, []).append(group.requests.popleft())
            num_active += 1
            num_reserved += num_blocks
            if not group.requests:
                self.queue.popleft()
            elif not has_room:
                # The first request is admitted in any case. It takes the prefix' row, for lack of room for a fork.
                self.queue[0] = PrefixGroup(*group.requests)
                group.requests.clear()
        return admitted

    def _num_headroom_blocks(self) -> int:
        """How many blocks requests with rows may need for `headroom_tokens` more tokens each, up to their limits."""
        rows = np.array([*self.running, *self.appended, *self.parked.values()], np.int64)
        new_lengths = self.columns["length"][rows] + self.headroom_tokens
        new_lengths = np.minimum(new_lengths, self.columns["max_length"][rows])
        lengths = self._blocks.lengths[rows]
        # The cache need not hold the newest of these tokens.
        num_new_tokens = new_lengths - 1 - lengths
        return int(self._blocks.num_new_blocks(lengths, num_new_tokens.clip(min=0)).sum())

    def assign_rows(self, group: PrefixGroup, requests: Sequence[Request]) -> list[int]:
        """Give admitted requests of a group, whose prefix was prefilled, their rows; returns these."""
        assert group.row is not None
        is_last = not group.requests
        rows = self.cache.fork(group.row, len(requests) - is_last)
        if is_last:
            rows.append(group.row)
        for row, request in zip(rows, requests, strict=True):
            self.columns.put_request(row, request)
        return rows

    def add_running(self, rows: IntArray) -> None:
        """Run the requests in these rows [n], as the youngest ones."""
        self.running = np.concatenate([self.running, rows])

    def rows_below_limit(self) -> IntArray:
        """The rows of running requests that have not reached their limits, unread tokens included."""
        rows = self.running
        # The cache never holds the last token.
        return rows[self._blocks.lengths[rows] < self.columns["max_length"][rows] - 1]

    def extend(self, rows: IntArray) -> IntArray:
        """Add cache space for one more token to each of these requests; returns the rows of those that still run.

        If blocks are missing, and none can be evicted, the youngest request is preempted, which usually has the least
        to recompute. The oldest is preempted last and so always advances: the engine makes progress, since `submit`
        refused any request that exceeds the cache on its own. Preemption needs all tokens to be read.
        """
        while not self._blocks.can_extend(rows):
            if not self._evict():
                assert not self._readbacks, "a request is preempted whose tokens were not read"
                self._preempt(int(rows[-1]))
                rows = rows[:-1]
        self._blocks.extend(rows)
        return rows

    def next_appended_chunks(self) -> dict[int, IntArray]:
        """Take requests off `appended`, and reserve space for the tokens [n] to compute of each; returns them by row.

        They end with a block, and are up to `max_prefill_tokens` of all requests. A request without a free block for
        them is preempted.
        """
        taken: dict[int, IntArray] = {}
        max_tokens = self.max_prefill_tokens
        while self.appended and len(self.running) + len(taken) < self.max_running and max_tokens > 0:
            row = self.appended.popleft()
            length = int(self._blocks.lengths[row])
            num_left = self.cache.prefill_chunk_size - length % self.cache.prefill_chunk_size
            ids = self.columns.tokens(row, length)["id"][: min(max_tokens, num_left)]
            rows = np.array([row])
            while not self._blocks.can_extend(rows):
                if not self._evict():
                    self._preempt(row)
                    break
            else:
                self._blocks.extend(rows)
                self._blocks.lengths[row] = length + len(ids)
                taken[row] = ids
                max_tokens -= len(ids)
        return taken

    def enqueue_readback(self, rows: IntArray, sampled: Tensor) -> None:
        """Note a sampled token (the result of `sample`) for each of these rows [n]; starts reading it."""
        self._readbacks.append(Readback(rows, sampled, self.weight_version))

    def drain_readbacks(self, *, num_unread: int = 0) -> list[SampledSequence]:
        """Read launched tokens except the `num_unread` newest launches; returns the sequences that finish with them.

        With asynchronous decoding a request's token before may have been its last: then this one is discarded.
        """
        finished: list[SampledSequence] = []
        while len(self._readbacks) > num_unread:
            readback = self._readbacks.popleft()
            reasons = self.columns.append(*readback.read())
            if reasons:
                finished += [self.columns.finished_sequence(row, reason) for row, reason in reasons.items()]
                self._end_turns(np.array(list(reasons)))
        return finished

    def release(self, rollout_id: RolloutId) -> None:
        """End a request if it is parked."""
        row = self.parked.pop(rollout_id, None)
        if row is not None:
            self._remove(row)

    def _end_turns(self, rows: IntArray) -> None:
        """Take requests [n] out of the batch; those that hold their rows are parked, the others are gone."""
        self._remove_running(rows)
        for row in rows.tolist():
            request = self.columns.requests[row]
            if request.parks_after_turn:
                self.parked[request.rollout_id] = row
                # How long its next turn may be is not known; it should not be evicted for a new request.
                self.columns["max_length"][row] = NO_LIMIT
            else:
                self._remove(row)

    def _remove_running(self, rows: IntArray) -> None:
        """Take requests [n] out of the batch, and discard their unread tokens."""
        self.running = self.running[~np.isin(self.running, rows)]
        for readback in self._readbacks:
            self.stats.discarded_tokens += readback.discard(rows)

    def _evict(self) -> bool:
        """Free the blocks of the queue's prefix, or else of the request that was parked last; returns whether it did.

        The prefix is prefilled again for the rest of its group, and the request for its next turn. If replies take
        equally long, the requests that were parked first get theirs first.
        """
        for group in self.queue:
            if group.row is not None:
                self._blocks.remove(group.row)
                group.row = group.hidden = None
                return True
        if not self.parked:
            return False
        _, row = self.parked.popitem()
        self._remove(row)
        self.stats.evictions += 1
        return True

    def _preempt(self, row: int) -> None:
        """Return a request, all of whose tokens were read, to the front of the queue."""
        self.queue.appendleft(PrefixGroup(self.columns.requeued_request(row)))
        self._remove_running(np.array([row]))
        self._remove(row)
        self.stats.preemptions += 1

    def _remove(self, row: int) -> None:
        """Forget a request that is not running, and free its row and its blocks.

        With asynchronous decoding, the step in flight may still write keys of it. The blocks can be reused all the
        same: whatever writes there next is launched later and runs later.
        """
        del self.columns.requests[row]
        self._blocks.remove(row)


class Readback:
    """One sampled token of each of B running requests, on its way to the host."""

    def __init__(self, rows: IntArray, sampled: Tensor, weight_version: int):
        """Start the copy. It does not wait for the device."""
        self._rows = rows
        self._is_live = np.ones(len(rows), np.bool_)
        self._weight_version = weight_version
        # From CUDA the copy goes to pinned memory, so it runs while the host continues.
        self._sampled = sampled.to("cpu", non_blocking=True)
        self._copy_done: torch.cuda.Event | None = None
        if sampled.is_cuda:
            self._copy_done = torch.cuda.Event()
            self._copy_done.record()

    def discard(self, rows: IntArray) -> int:
        """Discard the tokens of requests [n] that left the batch; returns how many they are."""
        is_discarded = self._is_live & np.isin(self._rows, rows)
        self._is_live &= ~is_discarded
        return int(is_discarded.sum())

    def read(self) -> tuple[IntArray, Stream]:
        """Wait for the copy; returns the rows of the requests [n] that are still in the batch, and their TOKEN [n]."""
        if self._copy_done is not None:  # all work launched until then is done, not later work
            self._copy_done.synchronize()
        ids, logprob_bits = self._sampled.numpy()
        tokens = np.empty(len(ids), TOKEN)
        tokens["id"] = ids
        tokens["logprob"] = logprob_bits.view(np.float32)
        tokens["weight_version"] = self._weight_version
        tokens["is_sampled"] = True
        return self._rows[self._is_live], tokens[self._is_live]
