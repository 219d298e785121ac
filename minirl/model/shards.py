"""Linear layers whose rows the ranks hold together, as FSDP shards them, for decoding without whole weights.

Each rank decodes its own requests, with its own cache, and the ranks pass through the layers together: before each
forward they begin the pass (`ShardGroup.begin_pass`). In it a `SharedLinear` sends its rank's tokens to all ranks; each
multiplies the tokens of all with its rows of the weight, and sends each rank the columns of its tokens. No sum is
split, so the bits are those of whole weights. Nothing here has a gradient.

In shapes: T tokens of this rank, A of all ranks together, R rows of a weight that this rank holds.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from minirl.model.config import Adapters
from minirl.model.layers import Linear
from minirl.ranks.process_group import rank, world_size
from minirl.ranks.time_account import spent_on


class PassState(NamedTuple):
    """What the ranks know of a pass that they begin together.

    any_has_tokens: without tokens on any rank, none runs the layers.
    others_have_tokens: a rank besides this one has some.
    all_are_done: no rank will have tokens again in this phase.
    """

    any_has_tokens: bool = False
    others_have_tokens: bool = False
    all_are_done: bool = False


class ShardGroup:
    """The ranks that hold the linear layers of one model together."""

    def __init__(self) -> None:
        self._num_ranks = world_size()
        # How many rows of activations each rank has in this pass.
        self._num_rows: list[int] = []
        # The last input, and the rows of all ranks: the next layer often has the same input.
        self._gathered: tuple[Tensor, Tensor] | None = None

    @spent_on("wait_ranks")
    def begin_pass(self, num_rows: int, *, has_tokens: bool, is_done: bool) -> PassState:
        """Begin a pass through the layers, or find that no rank needs one (collective).

        num_rows: of this rank's activations, with padding.
        is_done: this rank will have no tokens until all ranks are done.
        """
        own = torch.tensor([num_rows, has_tokens, is_done])
        per_rank = [torch.empty_like(own) for _ in range(self._num_ranks)]
        dist.all_gather(per_rank, own)
        self._num_rows, have_tokens, are_done = torch.stack(per_rank, 1).tolist()
        self._gathered = None
        return PassState(any(have_tokens), sum(have_tokens) > has_tokens, all(are_done))

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Return the rows [A, in] of all ranks, given this rank's x [..., in] (collective)."""
        if self._gathered is None or self._gathered[0] is not x:
            rows = x.reshape(-1, x.shape[-1])  # [T, in]
            copies = rows.repeat(self._num_ranks, 1)
            num_sent = [len(rows)] * self._num_ranks
            gathered = self._exchange(copies, num_sent, self._num_rows)
            self._gathered = (x, gathered)
        return self._gathered[1]

    def scatter_columns(self, columns: Tensor) -> Tensor:
        """Send each rank these columns [A, R] of its tokens; returns all columns [T, ranks x R] of this rank's.

        Collective.
        """
        num_own_rows = self._num_rows[rank()]
        num_received = [num_own_rows] * self._num_ranks
        received = self._exchange(columns, self._num_rows, num_received)
        per_rank = received.unflatten(0, (self._num_ranks, -1))  # [ranks, T, R]
        return per_rank.transpose(0, 1).flatten(1)

    @spent_on("decode_comm")
    def _exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send each rank its number of rows, in order; returns the rows received (collective)."""
        as_bytes = rows.contiguous().view(torch.uint8)  # gloo does not know every dtype
        received = as_bytes.new_empty(sum(num_received), as_bytes.shape[1])
        dist.all_to_all_single(received, as_bytes, list(num_received), list(num_sent))
        return received.view(rows.dtype)


class SharedLinear(Linear):
    """A linear layer whose rows the ranks share. Its forward communicates.

    Each rank holds equally many rows, rounded up: the last ranks have rows of zeros, whose columns are cut off.
    """

    def __init__(self, full: Linear, shard_group: ShardGroup, adapters: Adapters | None):
        """Make room for the rows of `full`, and with `adapters` for those of an adapter."""
        num_rows = -(-full.out_features // world_size())
        has_bias = full.bias is not None
        super().__init__(full.in_features, num_rows, has_bias, device=full.weight.device)
        self.num_columns = full.out_features
        self.shard_group = shard_group
        if adapters is not None:
            self.add_adapter(adapters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of x [..., in] (collective)."""
        tokens = self.shard_group.gather_tokens(x)
        own_columns = super().forward(tokens)
        columns = self.shard_group.scatter_columns(own_columns)[:, : self.num_columns]
        return columns.unflatten(0, x.shape[:-1])


def share_layers(layers: nn.Module, adapters: Adapters | None) -> ShardGroup:
    """Replace each linear layer by a `SharedLinear`; returns the ranks that they share. Not collective."""
    shard_group = ShardGroup()
    for module in list(layers.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, SharedLinear(child, shard_group, adapters))
    return shard_group
