"""Weights by slices: each rank of a group holds its rows of every matrix, as FSDP shards them, and no others.

A row of a weight makes a column of the activations. A rank computes its own columns, and gathers the others' when the
next product needs all of them: four times in a layer. No sum is split, so the bits are those of whole weights. Only for
decoding: nothing here has a gradient.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from minirl.ranks.process_group import all_gather_flat
from minirl.ranks.time_account import spent_on


@dataclass(frozen=True)
class Slices:
    """This rank's place in a group of `size` ranks that hold a model together. All shares but the last are equal."""

    index: int
    size: int
    group: dist.ProcessGroup

    def width(self, total: int) -> int:
        """Return how many of `total` rows a slice has; the last slices may have fewer, or none."""
        return -(-total // self.size)

    def own(self, total: int) -> slice:
        """Return this rank's rows, or columns, of `total`."""
        width = self.width(total)
        first = min(total, self.index * width)
        return slice(first, min(total, first + width))

    def num_own(self, total: int) -> int:
        """Return how many rows of `total` are this rank's."""
        own = self.own(total)
        return own.stop - own.start

    @spent_on("decode_comm")
    def gather(self, own: Tensor, total: int) -> Tensor:
        """Gather all columns [T, total] from the ranks' columns [T, n] (collective in the group).

        Columns beyond the rank's own, from padded weights, are dropped.
        """
        width = self.width(total)
        padded = F.pad(own[:, :width], (0, max(0, width - own.shape[1])))
        gathered = own.new_empty(self.size * padded.numel())
        all_gather_flat(gathered, padded.flatten(), self.group)
        by_rank = gathered.view(self.size, *padded.shape)
        return by_rank.transpose(0, 1).flatten(1)[:, :total]

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a tensor with that of the group's first rank (collective in the group)."""
        dist.broadcast(tensor, dist.get_global_rank(self.group, 0), self.group)

    @spent_on("decode_comm")
    def combine(self, rows: Tensor) -> Tensor:
        """Return rows [T, D], each of which one rank has and the others have as 0 (collective in the group).

        It adds their bytes as integers, which changes none.
        """
        dist.all_reduce(rows.view(torch.uint8), group=self.group)
        return rows
