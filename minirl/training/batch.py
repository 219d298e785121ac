"""Packed batches of rollouts, and the communication that brings each rollout to the rank that trains on it.

A `Rollout` is one prompt with one completion, on the host; an episode may have several of them, its branches. Each is
a sequence of a `Batch`, which holds N of them end to end, T tokens in all, on the device: a stream is a tensor [T]
whose element t is about token t. The `RolloutTable` describes the sequences of all ranks to every rank. Only
`gather_table`, `gather_to_rollouts` and `exchange` communicate.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from minirl.model import attention
from minirl.model.attention import PackedLayout, concatenated_ranges, upload
from minirl.ranks.process_group import all_reduce_sum, gather_objects, rank, world_size
from minirl.ranks.time_account import spent_on
from minirl.rollouts import CUT_OFF, Rollout, RolloutId, all_branches, join_streams
from minirl.training.assignment import PromptPrefix
from minirl.training.losses import over_tokens, sequence_sums

Column = NDArray[np.int64]  # of a table


@dataclass(frozen=True)
class RolloutTable:
    """The S sequences of R rollouts, the same on every rank, in order of their ids. Arrays [S].

    A rollout is one sequence, or one for each of its branches. Example: two prompts, two rollouts of each, of which the
    second has two branches.

        prompt_ordinal  7  7  7  9  9
        sample          0  1  1  0  1
        branch          0  0  1  0  0
        rollout         0  1  1  2  3
        holder          0  1  1  1  0
    """

    prompt_ordinal: Column
    sample: Column
    branch: Column
    holder: Column  # the rank that has the rollout
    num_prompt_tokens: Column
    num_tokens: Column
    num_loss_tokens: Column
    is_truncated: NDArray[np.bool_]  # whether a limit cut off the rollout
    rewards: NDArray[np.float64]  # [S, K], those of the rollout

    @property
    def ids(self) -> list[RolloutId]:
        """One id per sequence."""
        columns = (self.prompt_ordinal, self.sample, self.branch)
        return list(map(RolloutId, *(column.tolist() for column in columns)))

    @property
    def is_first(self) -> NDArray[np.bool_]:
        """Whether each sequence is the first of its rollout, [S]."""
        is_new = np.diff([self.prompt_ordinal, self.sample], prepend=-1) != 0
        return is_new.any(0)

    @functools.cached_property
    def rollout(self) -> Column:
        """The rollout of each sequence, 0 to R - 1, [S]. In a step's groups [P, G] that is p * G + g."""
        return self.is_first.cumsum() - 1

    @property
    def prefixes(self) -> list[PromptPrefix]:
        """The prompt of each sequence."""
        return list(map(_prefix, self.ids, self.num_prompt_tokens.tolist()))

    def by_rollout(self) -> "RolloutTable":
        """The R rows of the rollouts' first sequences, with the tokens that the policy sampled in all of them."""
        firsts = self.is_first.nonzero()[0]
        sums = np.add.reduceat(self.num_loss_tokens, firsts)
        return dataclasses.replace(self[firsts], num_loss_tokens=sums)

    def __getitem__(self, rows: NDArray[Any]) -> "RolloutTable":
        """The sequences in these rows: indices, in this order, or a mask [S]."""
        return RolloutTable(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


NOT_MADE: Any = None  # a stream that does not exist yet
# The fields of a `Batch` that come from those of `TOKEN`.
STREAMS_OF_ROLLOUTS = {
    "tokens": "id",
    "loss_mask": "is_sampled",
    "sample_logprobs": "logprob",
    "weight_version": "weight_version",
}


@dataclass(frozen=True)
class Batch:
    """N sequences of rollouts end to end, T tokens in all. Streams are tensors [T], or None before they exist.

    A subclass may add a stream with one line: `exchange` makes the subclass, and `select`, `to` and `replace` treat all
    streams alike. With `prefixes`, the model computes a prompt once for all its rollouts in the batch.
    """

    lengths: tuple[int, ...]
    tokens: Tensor  # int64
    loss_mask: Tensor  # bool: the policy sampled this token
    sample_logprobs: Tensor = NOT_MADE  # fp32, as are the streams below except two
    weight_version: Tensor = NOT_MADE  # int32: the version of the weights that sampled this token
    temperature: Tensor = NOT_MADE  # that this token was sampled at; None: 1 for all
    is_truncated: Tensor = NOT_MADE  # bool: a limit cut off the sequence of this token
    advantages: Tensor = NOT_MADE
    loss_weights: Tensor = NOT_MADE
    old_logprobs: Tensor = NOT_MADE
    ref_logprobs: Tensor = NOT_MADE
    teacher_logprobs: Tensor = NOT_MADE
    values: Tensor = NOT_MADE
    # The value of the state after the last token, at the last token; 0 elsewhere.
    end_values: Tensor = NOT_MADE
    returns: Tensor = NOT_MADE
    # Always on the host: the rollout of each sequence, int64 [N], see `RolloutTable.rollout`.
    rollout: Tensor = NOT_MADE
    prefixes: tuple[PromptPrefix, ...] = ()

    @functools.cached_property
    def loss_index(self) -> Tensor:
        """Where the tokens that the policy sampled are in the streams, int64 [M].

        On CUDA the host waits for this, as it does whenever a mask serves as an index: so it is done once.
        """
        return self.loss_mask.nonzero()[:, 0]

    @property
    def last_index(self) -> Tensor:
        """Where the last token of each sequence is in the streams, int64 [N]."""
        return upload(torch.tensor(self.lengths, dtype=torch.int64).cumsum(0) - 1, self.tokens.device)

    def layout(self) -> PackedLayout:
        """The layout of the batch's tokens, for the model.

        The first sequence with a prompt is the parent of the others, which share the parent's prompt tokens. Example:
        sequences 0, 1 and 3 have one prompt of 5 tokens; 0 is the parent of 1 and 3, which share 5 tokens with it.
        """
        sequences = list(map(attention.Sequence, self.lengths))
        parent_of: dict[PromptPrefix, int] = {}
        for i, prefix in enumerate(self.prefixes):
            parent = parent_of.setdefault(prefix, i)
            if parent != i:
                sequences[i] = attention.Sequence(self.lengths[i], parent, prefix.num_tokens)
        return PackedLayout(tuple(sequences), self.tokens.device)

    def replace(self, **fields: Any) -> Self:
        """A copy with these fields set."""
        return dataclasses.replace(self, **fields)

    def to(self, device: torch.device) -> Self:
        """A copy with its streams on `device`."""
        moved = {name: stream.to(device) for name, stream in self._streams().items()}
        return self.replace(**moved)

    def token_index(self, indices: Sequence[int]) -> Tensor:
        """Where the tokens of the sequences at these indices are in the streams, int64."""
        starts = [0, *itertools.accumulate(self.lengths)]
        places = concatenated_ranges([starts[i] for i in indices], [self.lengths[i] for i in indices])
        return upload(places, self.tokens.device)

    def select(self, indices: Sequence[int]) -> Self:
        """A batch of the sequences at these indices, in this order."""
        lengths = tuple(self.lengths[i] for i in indices)
        prefixes = tuple(self.prefixes[i] for i in indices) if self.prefixes else ()
        token_index = self.token_index(indices)
        fields = {name: stream[token_index] for name, stream in self._streams().items()}
        if self.rollout is not None:
            fields["rollout"] = self.rollout[list(indices)]
        return self.replace(lengths=lengths, prefixes=prefixes, **fields)

    @property
    def num_loss_tokens(self) -> Tensor:
        """How many tokens of each sequence the policy sampled, int64 [N] on the host."""
        return sequence_sums(self.loss_mask, self.lengths).long().cpu()

    def scatter(self, values: Tensor) -> Tensor:
        """A stream [T, ...] with the values [M, ...] at the sampled tokens, in order, and 0 elsewhere."""
        stream = values.new_zeros(len(self.tokens), *values.shape[1:])
        stream[self.loss_index] = values
        return stream

    def spread(self, values: Tensor) -> Tensor:
        """A stream [T] with each sequence's value [N] at its sampled tokens, and 0 elsewhere."""
        repeated = over_tokens(values.to(self.tokens.device), self.lengths)
        return repeated.masked_fill(~self.loss_mask, 0)

    def spread_rollouts(self, values: Tensor) -> Tensor:
        """A stream [T] with each rollout's value [P, G] at its sampled tokens, and 0 elsewhere."""
        return self.spread(values.flatten()[self.rollout])

    def _streams(self) -> dict[str, Tensor]:
        """All streams that exist, by name."""
        streams = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name != "rollout":
                streams[field.name] = value
        return streams


def gather_table(rollouts: Sequence[Rollout], rewards: Tensor) -> RolloutTable:
    """Make the table of all ranks' rollouts (collective). rewards [n, K] belong to this rank's n rollouts."""
    own = []
    holder = rank()
    for rollout, rewards_of_rollout in zip(rollouts, rewards.tolist(), strict=True):
        for branch in rollout.branches:
            num_sampled = int(np.count_nonzero(branch.loss_mask))
            lengths = branch.num_prompt_tokens, len(branch.stream), num_sampled
            own.append((*branch.rollout_id, holder, *lengths, rollout.is_truncated, *rewards_of_rollout))
    # No two branches have the same id.
    rows = sorted(itertools.chain(*gather_objects(own)))
    # fp64 has every integer of the table.
    numbers = np.array(rows, np.float64).reshape(-1, 8 + rewards.shape[1])
    columns = [*numbers[:, :7].astype(np.int64).T, numbers[:, 7] == 1, numbers[:, 8:]]
    return RolloutTable(*columns)


def gather_to_rollouts(batch: Batch, values: Tensor, num_rollouts: int) -> Tensor:
    """Sum the values [n] of the sequences of the ranks' batches by their R rollouts (collective).

    Returns fp64 [R] on the host, the same on every rank, with 0 for a rollout that is in no batch.
    """
    sums = torch.zeros(num_rollouts, dtype=torch.float64)
    return all_reduce_sum(sums.index_add(0, batch.rollout, values.double().cpu()))


def pack(branches: Sequence[Rollout], batch_type: type[Batch] = Batch) -> Batch:
    """The batch of these branches, on the host, without their rollouts. Not collective."""
    prefixes = tuple(_prefix(branch.rollout_id, branch.num_prompt_tokens) for branch in branches)
    lengths = tuple(len(branch.stream) for branch in branches)
    temperatures = torch.tensor([branch.temperature for branch in branches], dtype=torch.float32)
    is_truncated = torch.tensor([branch.own_end in CUT_OFF for branch in branches], dtype=torch.bool)
    packed = join_streams(*(branch.stream for branch in branches))
    streams = {name: torch.from_numpy(packed[field].copy()) for name, field in STREAMS_OF_ROLLOUTS.items()}
    return batch_type(
        lengths=lengths,
        temperature=over_tokens(temperatures, lengths),
        is_truncated=over_tokens(is_truncated, lengths),
        prefixes=prefixes,
        **streams,
    )


def exchange(
    rollouts: Sequence[Rollout],
    table: RolloutTable,
    rank_of: Sequence[int | None],
    streams: Mapping[str, Tensor] | None = None,
    batch_type: type[Batch] = Batch,
) -> Batch:
    """Send each branch to rank_of[its row in the table]; returns this rank's batch, in table order, on the host.

    Collective. rollouts: this rank's, in the table's order. A branch with rank None is not sent. The first branches of
    rollouts with the same prompt ordinal must begin with the same prompt. streams: more fields of the batch, each over
    the branches of these rollouts end to end; every rank passes the same names. batch_type: `Batch`, or a subclass that
    has these fields.

    Example: the table of `RolloutTable`, whose ranks hold rows 0, 4 and 1, 2, 3; rank_of = [1, 1, None, 0, 1].

        rank 0 sends rows 0, 4 to rank 1, and receives row 3
        rank 1 sends row 3 to rank 0 and row 1 to itself, and receives rows 0, 4 and 1, which it sorts
    """
    branches = all_branches(rollouts)
    own = pack(branches, batch_type).replace(**(streams or {}))
    own_rows = (table.holder == rank()).nonzero()[0]
    assert table[own_rows].ids == [branch.rollout_id for branch in branches], (
        "rollouts are not in the table's order"
    )
    receivers = np.array(rank_of)
    is_received = receivers == rank()
    # Indices into `own` for each rank, and rows from each rank.
    sent_indices = [(receivers[own_rows] == other).nonzero()[0] for other in range(world_size())]
    received_rows = [(is_received & (table.holder == other)).nonzero()[0] for other in range(world_size())]
    outgoing = own.select(np.concatenate(sent_indices).tolist())
    num_sent = [int(table.num_tokens[own_rows[indices]].sum()) for indices in sent_indices]
    num_received = [int(table.num_tokens[rows].sum()) for rows in received_rows]
    received = {}
    with spent_on("wait_ranks"):
        for name, stream in outgoing._streams().items():
            received[name] = stream.new_empty(sum(num_received), *stream.shape[1:])
            dist.all_to_all_single(received[name], stream, num_received, num_sent)
    rows = np.concatenate(received_rows)
    unsorted = own.replace(
        lengths=tuple(table.num_tokens[rows].tolist()),
        prefixes=tuple(table[rows].prefixes),
        rollout=torch.from_numpy(table.rollout[rows]),
        **received,
    )
    batch = unsorted.select(rows.argsort().tolist())
    # The model computes the tokens of a shared prompt once.
    tokens, starts = batch.tokens.numpy(), itertools.accumulate(batch.lengths, initial=0)
    prompts = {
        (prefix, tokens[start : start + prefix.num_tokens].tobytes())
        for prefix, start in zip(batch.prefixes, starts, strict=False)
    }
    assert len(prompts) == len({*batch.prefixes}), "one prompt's rollouts begin differently"
    return batch


def _prefix(rollout_id: RolloutId, num_prompt_tokens: int) -> PromptPrefix:
    """The prompt of a branch: the first branches of a prompt's rollouts share one, every other branch has its own."""
    own = (rollout_id.sample, rollout_id.branch) if rollout_id.branch else ()
    return PromptPrefix(rollout_id.prompt_ordinal, num_prompt_tokens, own)
