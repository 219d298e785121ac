"""Replay decode steps as CUDA graphs: one launch from the host instead of some hundreds.

A graph is captured with fixed addresses and a fixed batch size. So the engine pads each decode step to one of some
batch sizes (`padding.graph_batch_size`; 22 up to 1,024 requests), and the step's inputs are copied into buffers that
belong to the graph. The buffers of block tables have the largest width a table can have; the kernel does not read
beyond a request's keys.

A graph also holds the addresses of the weights, which never change, and of the key/value cache, so it lives as long as
the cache does. A batch size is captured at its first use, which costs about three steps without a graph. On the
CPU nothing is captured: the same buffers are passed to the eager step, for tests. Steps in which the host reads from
the device, as in some of transformers' modules, cannot be captured and stay eager, too.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from minirl.ranks.process_group import print0

# A graph and its result; None: the step stays eager.
Captured = tuple[torch.cuda.CUDAGraph, Tensor] | None
# One for all captures, which cannot use the default stream: the free memory of a pool belongs to a stream.
_capture_stream = functools.cache(lambda: torch.cuda.Stream())
_print_once = functools.cache(print0)
NOTE = "note: no CUDA graphs, so decoding is slower: in each step the host reads from the device"


class DecodeGraphs:
    """CUDA graphs of the decode step for one cache, one per batch size with and without truncated distributions.

    Each is captured at its first use.
    """

    def __init__(self, max_blocks: int):
        """max_blocks: the largest width of a block table."""
        self._max_blocks = max_blocks
        # By the batch size and the number of inputs.
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}
        self._graphs: dict[tuple[int, int], Captured] = {}
        # A handle of a memory pool. Graphs run one after another, so they can share their temporary memory.
        self._memory: Any = None

    def run(self, step: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return what `step` makes of these inputs. On CUDA the next step of the same kind overwrites the result.

        inputs: vectors [B] and block tables [B, n].
        """
        kind = (len(inputs[0]), len(inputs))
        if kind not in self._buffers:
            self._buffers[kind] = [x.new_zeros([len(x), self._max_blocks][: x.ndim]) for x in inputs]
        buffers = self._buffers[kind]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            # A block table may be narrower than its buffer; the other columns keep old block numbers, never read.
            buffer[tuple(map(slice, tensor.shape))].copy_(tensor)
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(step, buffers) if inputs[0].is_cuda else None
        captured = self._graphs[kind]
        if captured is None:
            return step(*buffers)
        graph, sampled = captured
        graph.replay()
        return sampled

    def _capture(self, step: Callable[..., Tensor], buffers: Sequence[Tensor]) -> Captured:
        """Run the step so that its kernels are compiled, then capture it. Returns graph and result.

        None if the host reads from the device in it. Each run, and the replay that follows, stores the same keys and
        values in the same places of the cache.

        Not by `torch.cuda.graph`, which each time returns all cached memory to the system, also the pinned memory of
        the host: to get that again takes seconds.
        """
        step(*buffers)
        # Run another step: the first one may have made tables.
        with warnings.catch_warnings(record=True, action="always") as caught:
            torch.cuda.set_sync_debug_mode("warn")
            step(*buffers)
            torch.cuda.set_sync_debug_mode("default")
        if "called a synchronizing CUDA operation" in " ".join(map(str, caught)):
            _print_once(NOTE)
            return None
        if self._memory is None:
            torch.cuda.empty_cache()  # a capture cannot use the memory that the allocator keeps for other work
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(_capture_stream()):
            # thread_local: other threads (NCCL's watchdog) may use CUDA during the capture.
            graph.capture_begin(pool=self._memory, capture_error_mode="thread_local")
            try:
                sampled = step(*buffers)
            finally:
                graph.capture_end()
        return graph, sampled
