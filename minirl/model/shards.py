"""Linear layers whose rows the ranks hold together, as FSDP shards them, for decoding without whole weights.

Each rank decodes its own requests, with its own cache, and the ranks pass through the layers together. A linear layer
sends its rank's tokens to all ranks; each multiplies the tokens of all with its rows of the weight, and sends each rank
the columns of its tokens. No sum is split, so the bits are those of whole weights. Nothing here has a gradient.
"""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.ranks.process_group import world_size
from minirl.ranks.time_account import spent_on


class Shards:
    """The ranks, which hold a model together.

    is_done: this rank will have no tokens until all ranks are done. At the last `join`, are_done: all ranks were;
    others_decode: another rank had tokens.
    """

    def __init__(self) -> None:
        self.size = world_size()
        self.is_done = False
        self.are_done = False
        self.others_decode = False
        # The tokens of each rank in this pass.
        self._counts: list[int] = []
        # The last input, and those of all ranks: the next layer often has the same.
        self._gathered: tuple[Tensor, Tensor] | None = None

    @spent_on("wait_ranks")
    def join(self, num_rows: int, *, has_tokens: bool) -> bool:
        """Begin a pass; returns whether any rank has tokens; if not, the layers are not run (collective).

        num_rows: of this rank's activations.
        """
        own = torch.tensor([num_rows, has_tokens, self.is_done])
        of_ranks = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(of_ranks, own)
        self._counts, have_tokens, done = torch.stack(of_ranks, 1).tolist()
        self.others_decode = sum(have_tokens) > has_tokens
        self.are_done = all(done)
        self._gathered = None
        return any(have_tokens)

    def apply(self, product: Callable[[Tensor], Tensor], x: Tensor, num_columns: int) -> Tensor:
        """Return all columns of the rank's tokens x [T, in], from a product with each rank's rows (collective)."""
        if self._gathered is None or self._gathered[0] is not x:
            sent = [len(x)] * self.size
            self._gathered = (x, self._exchange(x.repeat(self.size, 1), sent, self._counts))
        own_columns = product(self._gathered[1])
        columns = self._exchange(own_columns, self._counts, [len(x)] * self.size)
        return columns.unflatten(0, (self.size, -1)).transpose(0, 1).flatten(1)[:, :num_columns]

    @spent_on("decode_comm")
    def _exchange(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its number of rows, in order; returns the rows received (collective)."""
        as_bytes = rows.contiguous().view(torch.uint8)  # gloo does not know every dtype
        result = as_bytes.new_empty(sum(received), as_bytes.shape[1])
        dist.all_to_all_single(result, as_bytes, list(received), list(sent))
        return result.view(rows.dtype)
