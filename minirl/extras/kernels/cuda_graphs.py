"""Replay decode steps as CUDA graphs: one launch from the host instead of some hundreds.

A graph is captured with fixed addresses and a fixed batch size. So the engine pads each decode step to one of some
batch sizes (`padding.graph_batch_size`; 22 up to 1,024 requests), and the step's inputs are copied into buffers that
belong to the graph. The buffers of block tables have the largest width a table can have; the kernel does not read
beyond a request's keys.

A graph also holds the addresses of the weights, which never change, and of the key/value cache, so it lives as long as
the cache does. A batch size is captured at its first use, which costs about two steps without a graph. On the
CPU nothing is captured: the same buffers are passed to the eager step, for tests.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class DecodeGraphs:
    """CUDA graphs of the decode step for one cache, one per batch size with and without truncated distributions.

    Each is captured at its first use.
    """

    def __init__(self, max_blocks: int):
        """max_blocks: the largest width of a block table."""
        self._max_blocks = max_blocks
        # By the batch size and the number of inputs.
        self._buffers: dict[tuple[int, int], list[Tensor]] = {}
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        # A handle of a memory pool. Graphs run one after another, so they can share their temporary memory.
        self._memory: Any = None

    def run(self, step: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return what `step` makes of these inputs. On CUDA the next step of the same kind overwrites the result.

        inputs: vectors [B] and block tables [B, n].
        """
        kind = (len(inputs[0]), len(inputs))
        if kind not in self._buffers:
            self._buffers[kind] = list(map(self._buffer_for, inputs))
        buffers = self._buffers[kind]
        for buffer, tensor in zip(buffers, inputs, strict=True):
            # A block table may be narrower than its buffer; the other columns keep old block numbers, never read.
            target = buffer[:, : tensor.shape[1]] if tensor.ndim == 2 else buffer
            target.copy_(tensor)
        if not inputs[0].is_cuda:
            return step(*buffers)
        if kind not in self._graphs:
            self._graphs[kind] = self._capture(step, buffers)
        graph, sampled = self._graphs[kind]
        graph.replay()
        return sampled

    def _buffer_for(self, tensor: Tensor) -> Tensor:
        """Zeros in the shape of an input, or in the largest of a block table."""
        shape = [len(tensor), self._max_blocks] if tensor.ndim == 2 else tensor.shape
        return tensor.new_zeros(shape)

    def _capture(
        self, step: Callable[..., Tensor], buffers: Sequence[Tensor]
    ) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run the step once so that its kernels are compiled, then capture it. Returns graph and result.

        The replay that follows stores the same keys and values in the same places of the cache once more.
        """
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            step(*buffers)
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (NCCL's watchdog) may use CUDA during the capture.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            sampled = step(*buffers)
        return graph, sampled
