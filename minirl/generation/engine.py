"""The generation engine: continuous batching with the same module that is trained.

`submit` queues requests, and `step` advances every running request by one token. `request_table` decides which requests
run, wait or stay parked between turns, and how requests share the cache. This file runs the tokens through the model.

The engine handles token ids only, never text; a `StopTest` detects a turn's stop strings. Each rank decodes
independently, and nothing in the engine is collective unless ranks share the model's layers (`model.shards`). Ranks
that share layers start each forward pass together (`_forward`), and a rank without tokens joins the other ranks'
forward passes (`_run_dummy_pass`). A rollout depends only on its request and the weights, not on other requests in
the batch. A generation phase ends when no request is left and the cache is empty, so new weights never read old keys
and values. At the end of a phase, the engine frees the cache memory and the CUDA graphs unless `keeps_cache` is set.

With asynchronous decoding, the engine launches a step before the host has read the tokens of the previous step. The
unread tokens stay on the device as the next step's input, so the device never waits for the host. The engine knows in
advance when a request reaches its token limit. A request that ends with a stop token or stop string is decoded for one
extra token, which is discarded.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minirl.errors import refuse
from minirl.generation.block_pool import IntArray, ceil_div
from minirl.generation.engine_stats import EngineStats
from minirl.generation.kv_cache import KVCache
from minirl.generation.request_table import PrefixGroup, RequestTable
from minirl.generation.sampling import sample
from minirl.model import padding
from minirl.model.attention import PAGED_BLOCK, Layout, PackedLayout, concatenated_ranges, to_device
from minirl.model.shards import PassState
from minirl.model.transformer import Transformer
from minirl.ranks.time_account import spent_on
from minirl.rollouts import Request, RolloutId, SampledSequence

if TYPE_CHECKING:
    from minirl.extras.kernels.cuda_graphs import DecodeGraphs

PREFILL_TOKENS = 8192  # maximum number of tokens per prefill forward pass


class Engine:
    """Decodes up to `max_running_requests` requests concurrently, with a cache of `cache_tokens` tokens per layer."""

    def __init__(
        self,
        model: Transformer,
        *,
        max_running_requests: int,
        cache_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        max_prefill_tokens: int = PREFILL_TOKENS,
        headroom_tokens: int = 112,
        async_decoding: bool | None = None,
        cuda_graphs: bool | None = None,
        keeps_cache: bool = False,
    ):
        """dtype: dtype of the weights and the cache.

        max_prefill_tokens: maximum number of tokens per prefill forward pass; a longer prompt is prefilled alone.
        headroom_tokens: number of tokens that every running request can decode after an admission before any request is
        preempted. With more headroom, fewer requests run concurrently. With 112 tokens, fewer than 2% of requests are
        preempted.
        async_decoding: whether to read tokens one step late (default: only on CUDA).
        cuda_graphs: whether to pad decode steps and replay them as CUDA graphs (default: only on CUDA).
        keeps_cache: whether to keep the cache memory and the graphs between generation phases.
        """
        self.model = model
        self.device = device
        self.max_running_requests = max_running_requests
        self.cache_tokens = cache_tokens
        is_cuda = device.type == "cuda"
        self.async_decoding = is_cuda if async_decoding is None else async_decoding
        self.cuda_graphs = is_cuda if cuda_graphs is None else cuda_graphs
        self.keeps_cache = keeps_cache

        # With CUDA graphs, decode steps include a padding row, which stores keys and values like any request.
        self._cache = KVCache(
            model.config,
            num_tokens=cache_tokens + self.cuda_graphs * PAGED_BLOCK,
            max_sequences=max_running_requests + self.cuda_graphs,
            dtype=dtype,
            device=device,
        )
        if self.cuda_graphs:
            self._padding_row = self._cache.blocks.add(1)
        self._graphs: DecodeGraphs | None = None
        self._table = RequestTable(
            self._cache,
            max_running=max_running_requests,
            max_prefill_tokens=max_prefill_tokens,
            headroom_tokens=headroom_tokens,
        )
        # Each running request's newest token, on the device, indexed by row.
        self._newest_tokens = torch.empty(0, dtype=torch.int32, device=device)
        # State of the last pass (`shards`), used only if ranks share the model's layers.
        self._last_pass = PassState()

    def submit(self, requests: Sequence[Request], *, weight_version: int = 0) -> None:
        """Queue new requests and resume parked requests. Not collective.

        Consecutive requests with the same prompt share one prefill. For a parked request, only the new tokens are
        prefilled, unless the request was evicted. Requests that already have sampled tokens go to the front of the
        queue.
        weight_version: version to record with each token sampled from now on.
        Raises InputError if a request has an empty prompt, has no tokens left to sample, or could grow beyond the
        model's maximum number of positions or the cache. If any request is rejected, no request is queued, and parked
        requests stay parked.
        """
        for request in requests:
            refuse(not request.prompt_ids, "the prompt is empty, so there is no hidden state to sample from")
            refuse(
                request.max_new_tokens <= len(request.sampled),
                f"max_new_tokens {request.max_new_tokens} leaves no token to sample after "
                f"{len(request.sampled)} tokens",
            )
            max_length = len(request.prompt_ids) + request.max_new_tokens
            max_positions = self.model.config.max_position_embeddings
            refuse(
                max_length > max_positions,
                f"prompt + max_new_tokens = {max_length} tokens exceed the model's {max_positions} positions",
            )
            refuse(
                max_length > self.cache_tokens,
                f"a request of {max_length} tokens exceeds the cache; raise --cache-tokens",
            )
        self._table.weight_version = weight_version
        self._table.submit(requests)

    @property
    def is_busy(self) -> bool:
        """Whether any request is queued, running or parked between turns."""
        return self.has_unfinished_requests or bool(self._table.parked)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has work: a request is queued or running, or has appended tokens left to prefill."""
        return self._table.has_unfinished_requests

    @property
    def any_rank_has_work(self) -> bool:
        """Whether `step` has work, or another rank that shares the model's layers had tokens in the last pass."""
        return self.has_unfinished_requests or self._last_pass.other_ranks_have_tokens

    @property
    def lacks_blocks(self) -> bool:
        """Whether requests were waiting for cache blocks at the last step."""
        return self._table.lacks_blocks

    @property
    def stats(self) -> EngineStats:
        """The engine's statistics since the last `take_stats`."""
        return self._table.stats

    def release(self, *rollout_ids: RolloutId) -> None:
        """End the requests with these ids if they are parked; ignore all other ids. Not collective."""
        for rollout_id in rollout_ids:
            self._table.release(rollout_id)
        if not self.is_busy:
            self._end_generation_phase()

    @torch.inference_mode()
    def step(self) -> list[SampledSequence]:
        """Admit and prefill waiting requests, then decode one token for every running request.

        Return the finished sequences. Collective among ranks that share the model's layers.
        """
        if not self.has_unfinished_requests:
            self._run_dummy_pass()
            return []
        table = self._table
        with spent_on("prefill"):
            if table.appended:
                self._prefill_appended()
            admitted = table.admit()
            if admitted:
                self._prefill(admitted)
        with spent_on("decode"):
            finished: list[SampledSequence] = []
            # An asynchronous step can be launched while tokens are unread, unless a request may have to be preempted. A
            # preempted request is recomputed from its tokens, so the host must have read all of them.
            rows = table.rows_below_max_length()
            if not (self.async_decoding and self._cache.blocks.can_extend(rows)):
                finished += table.drain_readbacks()
                rows = table.rows_below_max_length()
            rows = table.extend(rows)
            if len(rows):
                self._decode_step(rows)
            # With asynchronous decoding, the next call reads the tokens of the step just launched. The device runs the
            # launched step while the host handles finished requests and prepares the next step.
            leaves_step_unread = self.async_decoding and len(rows) > 0
            finished += table.drain_readbacks(num_unread=int(leaves_step_unread))
        if not self.is_busy:
            self._end_generation_phase()
        return finished

    def generate(
        self,
        requests: Sequence[Request],
        *,
        weight_version: int = 0,
    ) -> list[SampledSequence]:
        """Run these requests to completion; return one sequence per request, in the same order.

        Not collective, so the model's layers must not be shared among ranks.
        """
        self.submit(requests, weight_version=weight_version)
        finished: dict[RolloutId, SampledSequence] = {}
        while self.has_unfinished_requests:
            finished |= {sequence.rollout_id: sequence for sequence in self.step()}
        return [finished[request.rollout_id] for request in requests]

    def sync_ranks(self) -> None:
        """Take part in forward passes until all ranks that share the model's layers are done.

        Collective among these ranks.
        """
        while not self._run_dummy_pass(is_done=True):
            pass

    def take_stats(self) -> EngineStats:
        """Return the statistics since the last call, and reset them."""
        stats = self.stats
        self._table.stats = EngineStats()
        return stats

    def _to_device(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Copy host arrays to the device without blocking."""
        return [to_device(array, self.device) for array in arrays]

    def _forward(self, tokens: Tensor, layout: Layout, *, is_done: bool = False) -> Tensor:
        """Return the tokens' hidden states [T, D]. Collective among ranks that share the model's layers (`shards`).

        is_done: whether this rank is done, i.e. contributes no more tokens until all ranks are done.
        """
        model = self.model
        if model.shard_group is not None:
            num_rows = max(len(tokens), model.min_rows)
            self._last_pass = model.shard_group.begin_forward_pass(
                num_rows, has_tokens=len(tokens) > 0, is_done=is_done
            )
            if not self._last_pass.any_rank_has_tokens:
                return model.embed_tokens(tokens)
        return model(tokens, layout.positions, layout)

    @torch.inference_mode()
    def _run_dummy_pass(self, *, is_done: bool = False) -> bool:
        """Join a forward pass with no tokens of its own, because the ranks that share the model's layers need this
        rank.

        Return whether all ranks that share the layers are done. Collective among these ranks.
        """
        if self.model.shard_group is None:
            return True
        empty_layout = PackedLayout((), self.device)
        self._forward(empty_layout.positions, empty_layout, is_done=is_done)
        return self._last_pass.all_ranks_done

    def _end_generation_phase(self) -> None:
        """Free the finished requests' memory, and the cache memory unless `keeps_cache` is set."""
        # The device may still be running a step that uses the cache.
        self._table.drain_readbacks()
        self._table.release_memory()
        if not self.keeps_cache:
            self._cache.release_memory()
            self._graphs = None

    def _prefill(self, admitted: Mapping[PrefixGroup, Sequence[Request]]) -> None:
        """Prefill the new prefixes of admitted requests, packed end to end; sample the next token of each request."""
        unprefilled_groups = [group for group in admitted if group.hidden is None]
        if unprefilled_groups:
            prefix_rows = [group.row for group in unprefilled_groups if group.row is not None]
            layout = self._cache.prefill_layout(prefix_rows)
            ids = np.concatenate([group.prefix for group in unprefilled_groups])
            hidden = self._forward(to_device(ids, self.device), layout)
            self.stats.prefill_tokens += len(ids)
            # Indexing copies the last states. A view would keep all hidden states of the prefill alive.
            last_token_indices = to_device(layout.lengths.cumsum() - 1, self.device)
            for group, state in zip(unprefilled_groups, hidden[last_token_indices], strict=True):
                group.hidden = state
        rows: list[int] = []
        states: list[Tensor] = []
        for group, requests in admitted.items():
            rows += self._table.assign_rows(group, requests)
            assert group.hidden is not None
            states += [group.hidden] * len(requests)
        self._start_requests(np.array(rows), torch.stack(states))

    def _prefill_appended(self) -> None:
        """Prefill the appended tokens of resumed requests, each request up to the next cache block boundary.

        Each token is decoded as if it were the newest token of a separate sequence with the request's block table. One
        step prefills up to `max_prefill_tokens` appended tokens, and later steps prefill the rest. Once all of a
        request's tokens are prefilled, the engine samples the next token, and the request enters the running state.

        Example: 70 of a request's 110 tokens are cached, and a block holds 32 tokens. Tokens 70 to 95, the rest of the
        third block, are decoded as 26 sequences of 71 to 96 tokens. The next step decodes tokens 96 to 109 as 14
        sequences, and samples the next token from the hidden state of the last sequence.
        """
        table = self._table
        cache = self._cache
        chunks_by_row = table.next_appended_chunks()
        if not chunks_by_row:
            return
        rows = np.array(list(chunks_by_row))
        chunk_lengths = np.array(list(map(len, chunks_by_row.values())))
        end_positions = cache.blocks.lengths[rows]
        positions = concatenated_ranges(end_positions - chunk_lengths, chunk_lengths)
        token_rows = rows.repeat(chunk_lengths)
        cache_inputs = cache.begin_step(token_rows, positions)
        tokens, *uploaded = self._to_device(np.concatenate(list(chunks_by_row.values())), *cache_inputs)
        layout = cache.decode_layout(*uploaded, tokens_per_sequence=tuple(chunk_lengths.tolist()))
        hidden = self._forward(tokens, layout)
        self.stats.prefill_tokens += len(token_rows)
        is_fully_prefilled = end_positions == table.columns["length"][rows]
        table.appended.extendleft(reversed(rows[~is_fully_prefilled].tolist()))
        if is_fully_prefilled.any():
            last_token_indices = to_device(chunk_lengths.cumsum()[is_fully_prefilled] - 1, self.device)
            self._start_requests(rows[is_fully_prefilled], hidden[last_token_indices])

    def _start_requests(self, rows: IntArray, states: Tensor) -> None:
        """Start the requests in these rows [n]: sample their next tokens from the hidden states `states` [n, D]."""
        table = self._table
        lengths = self._cache.blocks.lengths
        device_rows, positions, *sampling_params = self._to_device(
            rows, lengths[rows], *table.columns.sampling_params(rows)
        )
        sampled_tokens = sample(states, self.model.head, positions, sampling_params)
        self._newest_tokens = padding.pad_rows(self._newest_tokens, len(lengths))
        self._newest_tokens[device_rows] = sampled_tokens[0]
        table.add_running(rows)
        table.enqueue_readback(rows, sampled_tokens)

    def _decode_step(self, rows: IntArray) -> None:
        """Launch one decode step for the requests in these rows [B], padded to a graph's batch size if CUDA graphs are
        on.

        Padding rows decode an arbitrary token at a fixed position, and the results of padding rows are discarded.
        """
        cache = self._cache
        num_requests = len(rows)
        padded_rows = rows
        if self.cuda_graphs:
            batch_size = padding.graph_batch_size(num_requests, self.max_running_requests)
            num_padding_rows = batch_size - num_requests
            padded_rows = np.pad(rows, (0, num_padding_rows), constant_values=self._padding_row)
            self.stats.padding_tokens += num_padding_rows
        inputs = cache.begin_step(padded_rows, cache.blocks.lengths[padded_rows] - 1)
        positions, blocks, device_rows, *sampling_inputs = self._to_device(
            *inputs, *self._table.columns.sampling_params(padded_rows)
        )
        device_inputs = (self._newest_tokens[device_rows], positions, blocks, device_rows, *sampling_inputs)
        if self.cuda_graphs:
            from minirl.extras.kernels.cuda_graphs import DecodeGraphs

            max_blocks_per_sequence = ceil_div(self.model.config.max_position_embeddings, cache.block_size)
            self._graphs = self._graphs or DecodeGraphs(max_blocks_per_sequence)
            sampled = self._graphs.run(self._decode, *device_inputs)
        else:
            sampled = self._decode(*device_inputs)
        self._newest_tokens[device_rows] = sampled[0]
        self._table.enqueue_readback(rows, sampled[:, :num_requests])
        self.stats.decode_tokens += num_requests
        self.stats.peak_running = max(self.stats.peak_running, num_requests)
        self.stats.decode_steps += 1

    def _decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        blocks: Tensor,
        rows: Tensor,
        tables: Tensor,
        *sampling_params: Tensor,
    ) -> Tensor:
        """Run one decode step on the device; return the sampled tokens (see `sample`).

        tokens [B]: each request's newest token. positions, blocks, rows, tables: see `KVCache.decode_layout`.
        """
        layout = self._cache.decode_layout(positions, blocks, rows, tables)
        hidden = self._forward(tokens, layout)
        # The sampled token follows the input token, one position later.
        return sample(hidden, self.model.head, positions + 1, sampling_params)
