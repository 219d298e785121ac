"""Rollouts as packed streams, and the one exchange that brings each to the rank that trains on it (`plan`).

`Rollout`: one prompt with one completion, on the host. `Batch`: N rollouts end to end, T tokens, on the device; element
t of every stream is about token t. `gather_table`, `gather_to_table` and `exchange` communicate.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.model.attention import PackedLayout
from minirl.ranks.process_group import all_gather_rows, all_reduce_sum, world_size
from minirl.rollouts import Rollout
from minirl.training.assignment import PromptPrefix


@dataclass(frozen=True)
class RolloutTable:
    """What every rank knows of the step's N rollouts, in order of their ids (host tensors [N])."""

    prompt_ordinal: Tensor
    sample: Tensor
    num_prompt_tokens: Tensor
    num_tokens: Tensor
    num_loss_tokens: Tensor
    is_truncated: Tensor  # bool: the length limit ended it
    rewards: Tensor  # fp64 [N, K], one column per reward

    @property
    def prefixes(self) -> list[PromptPrefix]:
        """The prompt of each rollout."""
        return [
            PromptPrefix(*pair)
            for pair in zip(self.prompt_ordinal.tolist(), self.num_prompt_tokens.tolist(), strict=True)
        ]

    def select(self, rows: Sequence[int]) -> "RolloutTable":
        """The table of these rows."""
        return RolloutTable(**{f.name: getattr(self, f.name)[list(rows)] for f in dataclasses.fields(self)})

    def indices_of(self, rollouts: Sequence[Rollout]) -> list[int]:
        """The rows of these rollouts; KeyError for one that is not in the table."""
        row_of = {
            key: row
            for row, key in enumerate(zip(self.prompt_ordinal.tolist(), self.sample.tolist(), strict=True))
        }
        return [row_of[r.rollout_id.prompt_ordinal, r.rollout_id.sample] for r in rollouts]


NOT_MADE: Any = None  # a stream that does not exist yet


@dataclass(frozen=True)
class Batch:
    """N rollouts end to end. Streams are [T]; those not made yet are None.

    A subclass may add streams, a line each: `select`, `to` and `replace` treat all tensors alike. With `prefixes` the
    model computes a prompt once for all its rollouts in the batch.
    """

    lengths: tuple[int, ...]
    tokens: Tensor  # int64
    loss_mask: Tensor  # bool
    sample_logprobs: Tensor  # fp32, as are the streams below
    advantages: Tensor = NOT_MADE
    loss_weights: Tensor = NOT_MADE
    old_logprobs: Tensor = NOT_MADE
    ref_logprobs: Tensor = NOT_MADE
    values: Tensor = NOT_MADE
    returns: Tensor = NOT_MADE
    table_index: Tensor = (
        NOT_MADE  # int64 [N], which rollout of the table each sequence is: the one that is no stream
    )
    prefixes: tuple[PromptPrefix, ...] = ()

    def layout(self) -> PackedLayout:
        """The layout of this stream for the model."""
        first: dict[PromptPrefix, int] = {}
        parents = [first.setdefault(prompt, i) for i, prompt in enumerate(self.prefixes)]
        shared = tuple((j, self.prefixes[i].num_tokens if i != j else 0) for i, j in enumerate(parents))
        return PackedLayout(
            self.lengths, self.tokens.device, shared=shared if len(first) < len(shared) else ()
        )

    def replace(self, **fields: Tensor) -> "Batch":
        """A copy with these fields set."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> "Batch":
        """A copy on `device`."""
        return self.replace(**{name: value.to(device) for name, value in self._tensors().items()})

    def token_index(self, sequences: Sequence[int]) -> Tensor:
        """Where the tokens of these sequences are in the streams, int64."""
        starts = [0, *itertools.accumulate(self.lengths)]
        spans = [torch.arange(starts[i], starts[i + 1]) for i in sequences]
        return torch.cat([torch.arange(0), *spans]).to(self.tokens.device)

    def select(self, sequences: Sequence[int]) -> "Batch":
        """The sequences with these numbers, in this order."""
        of_sequence = torch.tensor(sequences, dtype=torch.int64, device=self.tokens.device)
        of_token = self.token_index(sequences)
        chosen = {
            name: tensor[of_sequence if name == "table_index" else of_token]
            for name, tensor in self._tensors().items()
        }
        lengths = tuple(self.lengths[i] for i in sequences)
        prefixes = tuple(self.prefixes[i] for i in sequences) if self.prefixes else ()
        return dataclasses.replace(self, lengths=lengths, prefixes=prefixes, **chosen)

    @property
    def num_loss_tokens(self) -> Tensor:
        """How many tokens of each sequence the policy sampled, int64 [N]."""
        parts = self.loss_mask.split(list(self.lengths))
        counts = [int(part.sum()) for part in parts]
        return torch.tensor(counts, dtype=torch.int64)

    def scatter(self, values: Tensor) -> Tensor:
        """Values [M] of the sampled tokens, in order, as a stream [T] that is 0 at the others."""
        stream = torch.zeros(len(self.tokens), dtype=values.dtype, device=values.device)
        stream[self.loss_mask] = values
        return stream

    def spread(self, values: Tensor) -> Tensor:
        """Per-sequence values [N] as a stream [T] that is 0 outside the loss mask."""
        repeated = values.to(self.tokens.device).repeat_interleave(
            torch.tensor(self.lengths, dtype=torch.int64).to(self.tokens.device)
        )
        return torch.where(self.loss_mask, repeated, torch.zeros_like(repeated))

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def gather_table(rollouts: Sequence[Rollout], rewards: Tensor) -> RolloutTable:
    """Lengths, ends, rewards [n_r, K] and ids of all ranks' rollouts, in order of their ids (collective)."""
    facts = [
        [
            r.rollout_id.prompt_ordinal,
            r.rollout_id.sample,
            r.num_prompt_tokens,
            len(r.tokens),
            int(r.loss_mask.sum()),
        ]
        for r in rollouts
    ]
    is_truncated = torch.tensor([[r.finish_reason == "length"] for r in rollouts]).view(-1, 1)
    own = torch.cat([torch.tensor(facts).view(-1, 5), is_truncated, rewards], 1).double()
    table = all_gather_rows(own)
    keys = list(zip(table[:, 0].tolist(), table[:, 1].tolist(), strict=True))
    table = table[sorted(range(len(keys)), key=keys.__getitem__)]
    prompt, sample, num_prompt, num_tokens, num_loss = table[:, :5].long().T
    return RolloutTable(
        prompt, sample, num_prompt, num_tokens, num_loss, table[:, 5].bool(), rewards=table[:, 6:]
    )


def gather_to_table(batch: Batch, values: Tensor, num_rows: int) -> Tensor:
    """A number per sequence of each rank's batch [n_r], as [num_rows] in table order on every rank (collective)."""
    return all_reduce_sum(
        torch.zeros(num_rows, dtype=torch.float64).index_put(
            (batch.table_index.cpu(),), values.double().cpu()
        )
    )


def exchange(rollouts: Sequence[Rollout], table: RolloutTable, rank_of: Sequence[int]) -> Batch:
    """Send each rollout to rank_of[its row in the table]; returns this rank's, in table order, on the host.

    Collective. Rollouts with one prompt ordinal must begin with the same prompt.
    """
    mine = list(zip(table.indices_of(rollouts), rollouts, strict=True))
    sent = {rank: [pair for pair in mine if rank_of[pair[0]] == rank] for rank in range(world_size())}
    rows = _all_to_all([torch.tensor([row for row, _ in sent[r]], dtype=torch.int64) for r in sent])
    streams = {
        name: _all_to_all([_cat([getattr(x, name) for _, x in sent[r]], dtype) for r in sent])
        for name, dtype in (
            ("tokens", torch.int64),
            ("loss_mask", torch.bool),
            ("sample_logprobs", torch.float32),
        )
    }
    lengths, prefixes = tuple(table.num_tokens[rows].tolist()), tuple(table.select(rows.tolist()).prefixes)
    batch = Batch(lengths, **streams, table_index=rows, prefixes=prefixes).select(rows.argsort().tolist())
    layout = batch.layout()
    assert torch.equal(batch.tokens[layout.computed_tokens][layout.hidden_index], batch.tokens), (
        "one prompt's rollouts begin differently"
    )
    return batch


def _cat(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([torch.empty(0, dtype=dtype), *parts])


def _all_to_all(parts: list[Tensor]) -> Tensor:
    """Send parts[r] to rank r; what came, end to end in rank order (collective)."""
    counts = torch.tensor([len(part) for part in parts])
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    out = parts[0].new_empty(int(received.sum()))
    dist.all_to_all_single(out, torch.cat(parts), received.tolist(), counts.tolist())
    return out
