"""Replay decode steps as CUDA graphs: one launch from the host instead of some hundreds.

A graph is captured with fixed addresses and a fixed batch size. So the engine pads each decode step to one of some
batch sizes (`padding.graph_batch_size`; 22 up to 1,024 requests), and the step's inputs are copied into buffers that
belong to the graph. The buffers of block tables have the largest width a table can have; neither CUDA decode kernel
reads beyond a request's keys.

A graph also holds the addresses of the weights, which never change, and of the key/value cache, so it lives as long as
the cache does. A batch size is captured at its first use, which costs about two steps without a graph. On the
CPU nothing is captured: the same buffers are passed to the eager step, for tests.
"""

from typing import Any

import torch
from torch import Tensor

from minirl.generation.decode_step import DecodeStep, decode
from minirl.model.transformer import Transformer


class DecodeGraphs:
    """CUDA graphs of the decode step for one cache, one per batch size with and without truncated distributions.

    Each is captured at its first use.
    """

    def __init__(self, model: Transformer, *, max_blocks: int):
        """max_blocks: the largest number of columns of a block table."""
        self.model = model
        self.max_blocks = max_blocks
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        # A handle of a memory pool. Graphs run one after another, so they can share their temporary memory.
        self._memory: Any = None

    def decode(self, step: DecodeStep) -> Tensor:
        """Run `decode_step.decode`. On CUDA the next step of the same kind overwrites the result."""
        kind = (len(step.tokens), bool(step.truncation))
        graph = self._graphs.get(kind)
        if graph is None:
            if step.tokens.is_cuda and self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            graph = _Graph(self.model, step, self.max_blocks, self._memory)
            self._graphs[kind] = graph
        return graph.decode(step)


class _Graph:
    """Input buffers for decode steps of one batch size and, on CUDA, the graph that reads them."""

    def __init__(self, model: Transformer, step: DecodeStep, max_blocks: int, memory: Any):
        self.model = model
        self.buffers: list[Tensor] = []
        for tensor in step.inputs:
            shape = list(tensor.shape)
            is_block_table = tensor.ndim == 2
            if is_block_table:
                shape[1] = max_blocks
            self.buffers.append(tensor.new_zeros(shape))
        self._fill_buffers(step)
        self._captured: tuple[torch.cuda.CUDAGraph, Tensor] | None = None
        if step.tokens.is_cuda:
            self._captured = self._capture(step.with_inputs(self.buffers), memory)

    def decode(self, step: DecodeStep) -> Tensor:
        self._fill_buffers(step)
        if self._captured is None:
            return decode(self.model, step.with_inputs(self.buffers))
        graph, sampled = self._captured
        graph.replay()
        return sampled

    def _fill_buffers(self, step: DecodeStep) -> None:
        for buffer, tensor in zip(self.buffers, step.inputs, strict=True):
            is_block_table = tensor.ndim == 2
            if is_block_table:
                # It may be narrower than its buffer; the other columns keep old block numbers, never read.
                num_blocks = tensor.shape[1]
                buffer[:, :num_blocks].copy_(tensor)
            else:
                buffer.copy_(tensor)

    def _capture(self, step: DecodeStep, memory: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Run the step once so that its kernels are compiled, then capture it. Returns graph and result.

        The replay that follows stores the same keys and values in the same places of the cache once more.
        """
        # A state would advance twice: it is put back.
        slots = step.layout.slots
        pools = [pool for states in step.layout.states.values() for pool in vars(states).values()]
        before = [pool[slots] for pool in pools]
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            decode(self.model, step)
        torch.cuda.current_stream().wait_stream(side_stream)
        for pool, values in zip(pools, before, strict=True):
            pool[slots] = values
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads (NCCL's watchdog) may use CUDA during the capture.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            sampled = decode(self.model, step)
        return graph, sampled
