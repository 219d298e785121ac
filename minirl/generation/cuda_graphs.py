"""Decode steps replayed as CUDA graphs: one launch from the host instead of some hundreds.

A graph has fixed addresses and serves one number of rows: a step has as many as `padding.graph_batch_size` says, and its inputs are
copied to the graph's own. Block tables are as wide as they can get, since neither cache kernel reads past a row's keys.
Graphs hold the addresses of the cache, so they go with it: each phase captures the buckets it meets again, which costs
about two steps without a graph each; training then has their memory. On the CPU the same buffers feed a plain call.
"""

from typing import Any

import torch
from torch import Tensor

from minirl.generation.decode_step import DecodeStep, decode
from minirl.model.transformer import Transformer


class DecodeGraphs:
    """A graph for each number of rows, made when it is first met; all for one cache."""

    def __init__(self, model: Transformer, *, max_blocks: int):
        """max_blocks: the most columns that a block table will have."""
        self.model, self.max_blocks = model, max_blocks
        self._graphs: dict[int, _Graph] = {}
        self._memory: Any = None  # a handle: graphs run one after another, so they may share what they use

    def decode(self, step: DecodeStep) -> tuple[Tensor, Tensor]:
        """As the function; on CUDA the results are overwritten by the next step of as many rows."""
        rows = len(step.tokens)
        if rows not in self._graphs:
            if step.tokens.is_cuda and self._memory is None:
                self._memory = torch.cuda.graph_pool_handle()
            self._graphs[rows] = _Graph(self.model, step, self.max_blocks, self._memory)
        return self._graphs[rows].decode(step)


class _Graph:
    """The buffers of steps of one number of rows and, on CUDA, the graph that reads them."""

    def __init__(self, model: Transformer, step: DecodeStep, max_blocks: int, memory: Any):
        self.model = model
        self.buffers = [x.new_zeros((len(x), max_blocks) if x.ndim == 2 else len(x)) for x in step.inputs]
        self._fill(step)
        self.captured = self._capture(step.with_inputs(self.buffers), memory) if step.tokens.is_cuda else None

    def decode(self, step: DecodeStep) -> tuple[Tensor, Tensor]:
        self._fill(step)
        if self.captured is None:
            return decode(self.model, step.with_inputs(self.buffers))
        graph, results = self.captured
        graph.replay()
        return results

    def _fill(self, step: DecodeStep) -> None:
        for buffer, x in zip(self.buffers, step.inputs, strict=True):
            (buffer[:, : x.shape[1]] if x.ndim == 2 else buffer).copy_(x)

    def _capture(self, step: DecodeStep, memory: Any) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, Tensor]]:
        """Run once, so that kernels are compiled, then capture; both store the keys that the replay stores again."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            decode(self.model, step)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads (NCCL's watchdog) may use CUDA meanwhile.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            results = decode(self.model, step)
        return graph, results
