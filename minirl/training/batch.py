"""Packed batches of rollouts, and the communication that brings each rollout to the rank that trains on it.

A `Rollout` is one prompt with one completion, on the host; an episode may have several of them, its branches. A
`Batch` holds N branches end to end, T tokens in all, on the device: a stream is a tensor [T] whose element t is
about token t. The `RolloutTable` describes the branches of all ranks to every rank. Only `gather_table`,
`gather_to_table`, `gather_tokens` and `exchange` communicate.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.model.attention import PackedLayout, concatenated_ranges, upload
from minirl.objective.losses import over_tokens, sequence_sums
from minirl.ranks.process_group import all_reduce_sum, gather_objects, world_size
from minirl.ranks.time_account import spent_on
from minirl.rollouts import CUT_OFF, KeptIds, Rollout, RolloutId, all_branches
from minirl.training.assignment import PromptPrefix


@dataclass(frozen=True)
class RolloutTable:
    """The N branches of a step's rollouts, the same on every rank. Host tensors [N], in order of the branches' ids.

    The place of a branch in these tensors is its table index. Most rollouts have a single branch.
    """

    prompt_ordinal: Tensor  # int64, as are the next five
    sample: Tensor
    branch: Tensor
    num_prompt_tokens: Tensor
    num_tokens: Tensor
    num_loss_tokens: Tensor
    is_truncated: Tensor  # bool: a limit cut the branch off
    rewards: Tensor  # fp64 [N, K]: the rollout's rewards, one column each
    branch_rewards: Tensor  # fp64 [N, K]: the branch's rewards, see `rewards.functions.branch_rewards`

    @property
    def ids(self) -> list[RolloutId]:
        """Of the branches."""
        columns = (self.prompt_ordinal, self.sample, self.branch)
        return list(map(RolloutId, *(column.tolist() for column in columns)))

    @functools.cached_property
    def episode(self) -> Tensor:
        """Return int64 [N]: the rollout of each branch. In a step that is p * G + g, from group and place in it."""
        ids = torch.stack([self.prompt_ordinal, self.sample])
        _, episode = ids.unique_consecutive(dim=1, return_inverse=True)
        return episode

    @property
    def prefixes(self) -> list[PromptPrefix]:
        """The prompt of each branch."""
        return list(map(_prefix, self.ids, self.num_prompt_tokens.tolist()))

    def first_branches(self) -> "RolloutTable":
        """The first branch of each rollout."""
        is_first = self.episode.diff(prepend=torch.tensor([-1])) == 1
        return self.select(is_first.nonzero()[:, 0].tolist())

    def sum_branches(self, values: Tensor) -> Tensor:
        """Sums of the values [N] of each rollout's branches, one for each rollout."""
        episode = self.episode
        num_episodes = int(episode.max()) + 1
        return values.new_zeros(num_episodes).index_add(0, episode, values)

    def rewards_by_branch(self) -> Tensor:
        """The branches' rewards fp64 [R, B, K]: of R rollouts, by the branch's number, below B.

        For a branch that a rollout lacks, the mean of its branches stands in.
        """
        episode = self.episode
        firsts = self.first_branches().branch_rewards
        # Relative to the first branch, so that the mean of equal rewards is exact.
        totals = torch.zeros_like(firsts).index_add(0, episode, self.branch_rewards - firsts[episode])
        means = firsts + totals / episode.bincount()[:, None]
        by_branch = means[:, None].repeat(1, max([0, *self.branch.tolist()]) + 1, 1)
        by_branch[episode, self.branch] = self.branch_rewards
        return by_branch

    def select(self, indices: Sequence[int]) -> "RolloutTable":
        """The branches at these table indices, in this order."""
        selected = {}
        for field in dataclasses.fields(self):
            column = getattr(self, field.name)
            selected[field.name] = column[list(indices)]
        return RolloutTable(**selected)

    def indices_of(self, branches: Sequence[Rollout]) -> list[int]:
        """The table indices of these branches. Raises KeyError for a branch that is not in the table."""
        index_of = {rollout_id: i for i, rollout_id in enumerate(self.ids)}
        return [index_of[branch.rollout_id] for branch in branches]


NOT_MADE: Any = None  # a stream that does not exist yet


@dataclass(frozen=True)
class Batch:
    """N branches of rollouts end to end, T tokens in all. Streams are tensors [T], or None before they exist.

    A subclass may add a stream with one line: `exchange` makes the subclass, and `select`, `to` and `replace` treat all
    streams alike. With `prefixes`, the model computes a prompt once for all its rollouts in the batch.
    """

    lengths: tuple[int, ...]
    tokens: Tensor  # int64
    loss_mask: Tensor  # bool: the policy sampled this token
    sample_logprobs: Tensor = NOT_MADE  # fp32, as are the streams below except the next
    weight_version: Tensor = NOT_MADE  # int32: the version of the weights that sampled this token
    temperature: Tensor = NOT_MADE  # that this token was sampled at; None: 1 for all
    advantages: Tensor = NOT_MADE
    loss_weights: Tensor = NOT_MADE
    old_logprobs: Tensor = NOT_MADE
    ref_logprobs: Tensor = NOT_MADE
    teacher_logprobs: Tensor = NOT_MADE
    # [T, D]: the teacher's hidden states before the sampled tokens; and the KL divergence to it over the vocabulary.
    teacher_states: Tensor = NOT_MADE
    teacher_kl: Tensor = NOT_MADE
    values: Tensor = NOT_MADE
    # The value of the state after the last token, at the last token; 0 elsewhere.
    end_values: Tensor = NOT_MADE
    returns: Tensor = NOT_MADE
    # The weighted rewards that a turn was given, at the turn's last token; 0 elsewhere.
    turn_rewards: Tensor = NOT_MADE
    # Always on the host: the table index of each sequence, int64 [N], and what is kept for each of T tokens.
    table_index: Tensor = NOT_MADE
    kept: KeptIds = NOT_MADE
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
        """The layout of the batch's tokens, for the model."""
        # The first sequence with a prompt is the parent of the others, which share the parent's prompt
        # tokens.
        parent_of: dict[PromptPrefix, int] = {}
        shared = []
        for i, prefix in enumerate(self.prefixes):
            parent = parent_of.setdefault(prefix, i)
            shared.append((parent, 0 if parent == i else prefix.num_tokens))
        if len(parent_of) == len(shared):  # each sequence has another prompt
            shared = []
        return PackedLayout(self.lengths, self.tokens.device, shared=tuple(shared))

    def replace(self, **fields: Tensor) -> Self:
        """A copy with these fields set."""
        return dataclasses.replace(self, **fields)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> Self:
        """A copy with its streams on `device`."""
        moved = {name: stream.to(device) for name, stream in self._streams().items()}
        return self.replace(**moved)

    def token_index(self, indices: Sequence[int]) -> Tensor:
        """Where the tokens of the sequences at these indices are in the streams, int64."""
        return upload(self._token_places(indices), self.tokens.device)

    def _token_places(self, indices: Sequence[int]) -> Tensor:
        """The result of `token_index` on the host."""
        starts = [0, *itertools.accumulate(self.lengths)]
        return concatenated_ranges([starts[i] for i in indices], [self.lengths[i] for i in indices])

    def select(self, indices: Sequence[int]) -> Self:
        """A batch of the sequences at these indices, in this order."""
        lengths = tuple(self.lengths[i] for i in indices)
        prefixes = tuple(self.prefixes[i] for i in indices) if self.prefixes else ()
        places = self._token_places(indices)
        token_index = upload(places, self.tokens.device)
        fields: dict[str, Any] = {name: stream[token_index] for name, stream in self._streams().items()}
        if self.kept is not None:
            fields["kept"] = self.kept[places]
        if self.table_index is not None:
            fields["table_index"] = self.table_index[list(indices)]
        return dataclasses.replace(self, lengths=lengths, prefixes=prefixes, **fields)

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
        return torch.where(self.loss_mask, repeated, torch.zeros_like(repeated))

    def _streams(self) -> dict[str, Tensor]:
        """All streams that exist, by name."""
        streams = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name != "table_index":
                streams[field.name] = value
        return streams


def gather_table(
    rollouts: Sequence[Rollout], rewards: Tensor, branch_rewards: Tensor | None = None
) -> RolloutTable:
    """Make the table of all ranks' rollouts (collective). rewards [n, K] belong to this rank's n rollouts.

    branch_rewards [m, K] belong to their m branches, end to end; None: each branch has its rollout's rewards.
    """
    num_branches = torch.tensor([len(rollout.branches) for rollout in rollouts], dtype=torch.int64)
    of_rollouts = rewards.repeat_interleave(num_branches, 0)
    of_branches = of_rollouts if branch_rewards is None else branch_rewards
    own = []
    for branch, *both_rewards in zip(
        all_branches(rollouts), of_rollouts.tolist(), of_branches.tolist(), strict=True
    ):
        lengths = branch.num_prompt_tokens, len(branch.tokens), int(branch.loss_mask.sum())
        own.append((*branch.rollout_id, *lengths, branch.own_end in CUT_OFF, *both_rewards))
    # No two branches have the same id.
    rows = sorted(itertools.chain(*gather_objects(own)))
    integers = torch.tensor([row[:6] for row in rows], dtype=torch.int64).view(-1, 6)
    is_truncated = torch.tensor([row[6] for row in rows], dtype=torch.bool)
    all_rewards = torch.tensor([row[7:] for row in rows], dtype=torch.float64)
    by_kind = all_rewards.view(len(rows), 2, rewards.shape[1]).unbind(1)
    columns = [*integers.T, is_truncated, *by_kind]
    return RolloutTable(*columns)


def gather_to_table(batch: Batch, values: Tensor, num_branches: int) -> Tensor:
    """Gather one number per sequence from the ranks' batches, in table order (collective).

    values [n] belong to the n sequences of this rank's batch. Returns fp64 [num_branches] on the host, the
    same on every rank, with 0 for a branch that is in no batch.
    """
    return _gather(values, batch.table_index, num_branches)


def gather_tokens(batch: Batch, values: Tensor, table: RolloutTable) -> tuple[Tensor, Tensor]:
    """Gather numbers of the tokens that the policy sampled from the ranks' batches, in table order (collective).

    values [M, ...] belong to the sampled tokens of this rank's batch. Returns them with those of the other ranks, fp64
    [M of the step, ...] on the host, the same for every split and 0 for a token in no batch; and where this rank's
    tokens are in them, int64 [M].
    """
    counts, index = table.num_loss_tokens, batch.table_index
    places = concatenated_ranges((counts.cumsum(0) - counts)[index], counts[index])
    return _gather(values, places, int(counts.sum())), places


def _gather(values: Tensor, places: Tensor, size: int) -> Tensor:
    """Put the ranks' values [n, ...] at their places in one tensor fp64 [size, ...] of zeros (collective)."""
    gathered = torch.zeros(size, *values.shape[1:], dtype=torch.float64)
    gathered[places] = values.double().cpu()
    return all_reduce_sum(gathered)


def pack(branches: Sequence[Rollout], batch_type: type[Batch] = Batch) -> Batch:
    """The batch of these branches, on the host. Not collective."""
    prefixes = [_prefix(branch.rollout_id, branch.num_prompt_tokens) for branch in branches]
    lengths = tuple(len(branch.tokens) for branch in branches)
    temperatures = torch.tensor([branch.temperature for branch in branches], dtype=torch.float32)
    return batch_type(
        lengths=lengths,
        tokens=_join(branches, "tokens", torch.int64),
        loss_mask=_join(branches, "loss_mask", torch.bool),
        sample_logprobs=_join(branches, "sample_logprobs", torch.float32),
        weight_version=_join(branches, "weight_version", torch.int32),
        temperature=over_tokens(temperatures, lengths),
        prefixes=tuple(prefixes),
        kept=KeptIds.join([KeptIds.none(0), *(branch.kept for branch in branches)]),
    )


def exchange(
    rollouts: Sequence[Rollout],
    table: RolloutTable,
    rank_of: Sequence[int | None],
    streams: Mapping[str, Tensor] | None = None,
    batch_type: type[Batch] = Batch,
) -> Batch:
    """Send each branch to rank_of[its table index]; returns this rank's batch, in table order, on the host.

    Collective. A branch with rank None is not sent. The first branches of rollouts with the same prompt ordinal must
    begin with the same prompt. streams: more fields of the batch, each over the branches of these rollouts end to
    end; every rank passes the same names. batch_type: `Batch`, or a subclass that has these fields.
    """
    branches = all_branches(rollouts)
    table_index = torch.tensor(table.indices_of(branches), dtype=torch.int64)
    own = pack(branches, batch_type).replace(table_index=table_index, **(streams or {}))
    ranks = [rank_of[index] for index in table_index.tolist()]
    parts = []
    for receiver in range(world_size()):
        parts.append(own.select([i for i, rank in enumerate(ranks) if rank == receiver]))
    # How many indices, elements of each stream and kept ids every rank sends this one.
    counts = torch.tensor([[len(part.lengths), len(part.tokens), len(part.kept.ids)] for part in parts])
    received_counts = torch.empty_like(counts)
    with spent_on("wait_ranks"):
        dist.all_to_all_single(received_counts, counts)
    num_indices, num_tokens, num_ids = received_counts.T.tolist()
    # Indices and streams arrive in the same order, that of the sending ranks.
    arrived_index = _all_to_all([part.table_index for part in parts], num_indices)
    streams_of = [part._streams() for part in parts]
    received = {}
    for name in streams_of[0]:
        received[name] = _all_to_all([streams[name] for streams in streams_of], num_tokens)
    kept = KeptIds(
        _all_to_all([part.kept.counts for part in parts], num_tokens),
        _all_to_all([part.kept.ids for part in parts], num_ids),
    )
    indices = arrived_index.tolist()
    arrived = dataclasses.replace(
        own,
        lengths=tuple(table.num_tokens[indices].tolist()),
        prefixes=tuple(table.select(indices).prefixes),
        table_index=arrived_index,
        kept=kept,
        **received,
    )
    batch = arrived.select(arrived_index.argsort().tolist())
    _check_shared_prompts(batch)
    return batch


def _check_shared_prompts(batch: Batch) -> None:
    """Assert that rollouts of one prompt begin with the same tokens, as the batch's layout presumes."""
    sequences = batch.tokens.split(batch.lengths)
    # `shared` is empty if no two rollouts have one prompt.
    for tokens, (parent, num_shared) in zip(sequences, batch.layout().shared, strict=False):
        is_same = torch.equal(tokens[:num_shared], sequences[parent][:num_shared])
        assert is_same, "one prompt's rollouts begin differently"


def _prefix(rollout_id: RolloutId, num_prompt_tokens: int) -> PromptPrefix:
    """The prompt of a branch: the first branches of a prompt's rollouts share one, every other branch has its own."""
    own = (rollout_id.sample, rollout_id.branch) if rollout_id.branch else ()
    return PromptPrefix(rollout_id.prompt_ordinal, num_prompt_tokens, own)


def _join(branches: Sequence[Rollout], name: str, dtype: torch.dtype) -> Tensor:
    """One stream of the branches, end to end; empty without branches."""
    empty = torch.empty(0, dtype=dtype)
    return torch.cat([empty, *(getattr(branch, name) for branch in branches)])


@spent_on("wait_ranks")
def _all_to_all(parts: list[Tensor], received_counts: list[int]) -> Tensor:
    """Send parts[r] to rank r; returns the received parts, end to end in rank order (collective).

    received_counts: how many elements each rank sends this one.
    """
    received = parts[0].new_empty(sum(received_counts), *parts[0].shape[1:])
    dist.all_to_all_single(received, torch.cat(parts), received_counts, [len(part) for part in parts])
    return received
