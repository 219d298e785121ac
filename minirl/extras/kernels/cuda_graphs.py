"""Replay decode steps as CUDA graphs: the host launches one graph instead of hundreds of kernels.

A graph is captured with fixed addresses and a fixed batch size. The engine therefore pads each decode step to one of a
few batch sizes (`padding.graph_batch_size`; 22 sizes up to 1,024 requests), and `DecodeGraphs` copies the step's inputs
into the graph's own buffers. The buffer for the block tables has the maximum width of a table, but the kernel reads no
further than a request's keys.

A graph also stores the addresses of the weights and of the key/value cache. The weights never move, so a graph lives as
long as the cache. Each batch size is captured on first use, which costs about three eager steps. On the CPU, nothing is
captured, but the eager step reads its inputs from the same buffers, so tests cover the buffers. Steps in which the host
reads from the device, as in some transformers modules, cannot be captured and also stay eager.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.ranks.process_group import print0

# A graph and its result tensor; None if the step stays eager.
Captured = tuple[torch.cuda.CUDAGraph, Tensor] | None
# All captures share one stream, because a memory pool's free memory belongs to a stream. A graph cannot be captured on
# the default stream.
_capture_stream = functools.cache(lambda: torch.cuda.Stream())
_print_once = functools.cache(print0)
SYNC_NOTE = "note: each step synchronizes with the host, so decoding cannot use CUDA graphs and is slower"


class DecodeGraphs:
    """CUDA graphs of the decode step for one cache: one per batch size, with and without truncated sampling.

    Each graph is captured on first use.
    """

    def __init__(self, max_blocks: int):
        """max_blocks: maximum width of a block table."""
        self._max_blocks = max_blocks
        # Both dictionaries are keyed by batch size and number of inputs.
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}
        self._graphs: dict[tuple[int, int], Captured] = {}
        # Handle to a memory pool. Graphs run one after another, so they can share temporary memory.
        self._memory_pool: Any = None

    def run(self, step: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return the result of `step` for these inputs. On CUDA, the graph's next replay overwrites the result.

        inputs: vectors [B] and block tables [B, n].
        """
        key = (len(inputs[0]), len(inputs))
        if key not in self._buffers:
            self._buffers[key] = [x.new_zeros([len(x), self._max_blocks][: x.ndim]) for x in inputs]
        buffers = self._buffers[key]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            # Block tables may be narrower than their buffer, whose other columns keep stale ids that are never read.
            buffer[tuple(map(slice, tensor.shape))].copy_(tensor)
        if key not in self._graphs:
            self._graphs[key] = self._capture(step, buffers) if inputs[0].is_cuda else None
        captured = self._graphs[key]
        if captured is None:
            return step(*buffers)
        graph, sampled = captured
        graph.replay()
        return sampled

    def _capture(self, step: Callable[..., Tensor], buffers: Sequence[Tensor]) -> Captured:
        """Run the step to compile its kernels, then capture the step. Return the graph and its result tensor.

        Return None if the host reads from the device during the step. Running the step several times is harmless,
        because each run, and the replay that follows, writes the same keys and values to the same cache slots.

        `torch.cuda.graph` is not used, because each use returns all cached memory to the system, including pinned host
        memory. Allocating this memory again takes seconds.
        """
        step(*buffers)
        # Check a second step for synchronization, because the first step may have synchronized to build tables.
        with warnings.catch_warnings(record=True, action="always") as caught_warnings:
            torch.cuda.set_sync_debug_mode("warn")
            step(*buffers)
            torch.cuda.set_sync_debug_mode("default")
        if "called a synchronizing CUDA operation" in " ".join(map(str, caught_warnings)):
            _print_once(SYNC_NOTE)
            return None
        if self._memory_pool is None:
            torch.cuda.empty_cache()  # a capture cannot use memory that the allocator caches for other work
            self._memory_pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_capture_stream()):
            # thread_local: other threads, such as NCCL's watchdog, may use CUDA during the capture.
            graph.capture_begin(pool=self._memory_pool, capture_error_mode="thread_local")
            try:
                sampled = step(*buffers)
            finally:
                graph.capture_end()
        return graph, sampled
