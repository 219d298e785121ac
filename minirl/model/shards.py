"""Linear layers sharded by rows across ranks, as in FSDP. Decoding never gathers the full weights.

Each rank decodes its own requests with its own cache, but the ranks run the layers together. Before each forward, the
ranks begin a pass (`ShardGroup.begin_forward_pass`). In a pass, a `ShardedLinear` sends its rank's tokens to all ranks;
each rank multiplies all ranks' tokens by its own rows of the weight, and returns the output columns to the tokens'
ranks. No sum is split, so the outputs match those of unsharded layers bitwise. This module has no backward.

Shapes: T tokens on this rank, A tokens across all ranks, R weight rows per rank.
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
    """The state of a pass, after all ranks have exchanged their states.

    any_rank_has_tokens: whether any rank has tokens; if not, no rank runs the layers.
    other_ranks_have_tokens: whether any rank other than this one has tokens.
    all_ranks_done: whether no rank has more tokens in this generation phase.
    """

    any_rank_has_tokens: bool = False
    other_ranks_have_tokens: bool = False
    all_ranks_done: bool = False


class ShardGroup:
    """The ranks that jointly hold the linear layers of one model."""

    def __init__(self) -> None:
        self._num_ranks = world_size()
        # Number of activation rows per rank in this pass.
        self._num_rows: list[int] = []
        # The last input and its gathered rows, kept because the next layer often gets the same input.
        self._gathered: tuple[Tensor, Tensor] | None = None

    @spent_on("wait_ranks")
    def begin_forward_pass(self, num_rows: int, *, has_tokens: bool, is_done: bool) -> PassState:
        """Begin a pass through the layers (collective); if no rank has tokens, the ranks skip the layers.

        num_rows: number of this rank's activation rows, including padding.
        is_done: whether this rank is done, i.e. contributes no more tokens until all ranks are done.
        """
        local_pass_state = torch.tensor([num_rows, has_tokens, is_done])
        pass_state_per_rank = [torch.empty_like(local_pass_state) for _ in range(self._num_ranks)]
        dist.all_gather(pass_state_per_rank, local_pass_state)
        self._num_rows, have_tokens, are_done = torch.stack(pass_state_per_rank, 1).tolist()
        self._gathered = None
        return PassState(any(have_tokens), sum(have_tokens) > has_tokens, all(are_done))

    def gather_tokens(self, x: Tensor) -> Tensor:
        """Gather the rows of all ranks, [A, in], given this rank's x [..., in]. Collective."""
        if self._gathered is None or self._gathered[0] is not x:
            rows = x.reshape(-1, x.shape[-1])  # [T, in]
            sent_rows = rows.repeat(self._num_ranks, 1)
            input_splits = [len(rows)] * self._num_ranks
            gathered_rows = self._exchange(sent_rows, input_splits, self._num_rows)
            self._gathered = (x, gathered_rows)
        return self._gathered[1]

    def scatter_columns(self, columns: Tensor) -> Tensor:
        """Send each rank the columns [A, R] of its tokens; return all columns [T, ranks x R] of this rank's tokens.

        Collective.
        """
        num_own_rows = self._num_rows[rank()]
        output_splits = [num_own_rows] * self._num_ranks
        received_columns = self._exchange(columns, self._num_rows, output_splits)
        columns_per_rank = received_columns.unflatten(0, (self._num_ranks, -1))  # [ranks, T, R]
        return columns_per_rank.transpose(0, 1).flatten(1)

    @spent_on("decode_comm")
    def _exchange(self, rows: Tensor, num_sent: Sequence[int], num_received: Sequence[int]) -> Tensor:
        """Send the first num_sent[0] rows to rank 0, the next rows to rank 1, etc.; return the received rows.

        Collective.
        """
        send_bytes = rows.contiguous().view(torch.uint8)  # gloo does not support every dtype
        received = send_bytes.new_empty(sum(num_received), send_bytes.shape[1])
        dist.all_to_all_single(received, send_bytes, list(num_received), list(num_sent))
        return received.view(rows.dtype)


class ShardedLinear(Linear):
    """A linear layer whose rows are sharded across ranks. The forward is collective.

    Every rank has the same number of weight rows, rounded up. The last ranks' shards are padded with zero rows, and the
    corresponding output columns are dropped.
    """

    def __init__(self, full_layer: Linear, shard_group: ShardGroup, adapters: Adapters | None):
        """Allocate this rank's rows of `full_layer`, and of its adapter if `adapters` is given."""
        num_rows = -(-full_layer.out_features // world_size())
        has_bias = full_layer.bias is not None
        super().__init__(full_layer.in_features, num_rows, has_bias, device=full_layer.weight.device)
        self.num_columns = full_layer.out_features
        self.shard_group = shard_group
        if adapters is not None:
            self.add_adapter(adapters)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs [..., out] for x [..., in] (collective)."""
        gathered_x = self.shard_group.gather_tokens(x)
        own_columns = super().forward(gathered_x)
        output = self.shard_group.scatter_columns(own_columns)[:, : self.num_columns]
        return output.unflatten(0, x.shape[:-1])


def shard_layers(layers: nn.Module, adapters: Adapters | None) -> ShardGroup:
    """Replace each linear layer with a `ShardedLinear`; return the shard group. Not collective."""
    shard_group = ShardGroup()
    for module in list(layers.modules()):
        for name, child in module.named_children():
            if isinstance(child, Linear):
                setattr(module, name, ShardedLinear(child, shard_group, adapters))
    return shard_group
