"""Packed batches of rollouts, and the exchange that sends each sequence to the rank that trains on it.

Each branch of a `Rollout` is a `SampledSequence`: a prompt and its completion, both in host memory. Most rollouts have
one branch. A `Batch` concatenates N sequences (T tokens in total) on the device, as per-token tensors of shape [T].
Every rank knows every `RolloutInfo` of a step, and thus every `SequenceInfo`, and uses this metadata to plan updates
and to build batches. Only `gather_rollout_infos`, `gather_to_rollouts` and `exchange_rollouts` are collective.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.model import attention
from minirl.model.attention import PackedLayout, concatenated_ranges, to_device
from minirl.ranks.process_group import all_reduce_sum, gather_objects, rank, world_size
from minirl.ranks.time_account import spent_on
from minirl.rollouts import RewardedRollout, Rollout, RolloutId, SampledSequence, all_branches, concat_tokens
from minirl.training.losses import repeat_over_tokens, sequence_sums


class SequenceInfo(NamedTuple):
    """Metadata for a sequence, that is, for a branch of a rollout. Infos are sorted by id.

    num_tokens: the sequence's length, including the prompt. is_truncated: whether a limit truncated this branch.
    owner_rank: the rank that has the rollout in memory. rollout_index: the rollout's index in the step, p * G + g in
    groups [P, G].
    """

    id: RolloutId
    num_tokens: int
    num_prompt_tokens: int = 0
    num_loss_tokens: int = 0
    temperature: float = 1.0  # sampling temperature of the sequence's tokens
    is_truncated: bool = False
    owner_rank: int = 0
    rollout_index: int = 0

    @property
    def prompt_id(self) -> RolloutId:
        """The prompt's id. The first branches of a prompt's rollouts share one id; later branches have unique ids."""
        return self.id if self.id.branch else RolloutId(self.id.prompt_ordinal, 0)


Microbatch = list[SequenceInfo]  # the sequences of one forward-backward pass


class RolloutInfo(NamedTuple):
    """Metadata for a rollout, known to every rank. Infos are sorted by id."""

    sequences: list[SequenceInfo]  # one per branch
    is_truncated: bool  # whether a limit truncated the rollout
    rewards: list[float]  # [K]

    @property
    def id(self) -> RolloutId:
        """The id of the rollout's first branch."""
        return self.sequences[0].id

    @property
    def num_loss_tokens(self) -> int:
        """The number of tokens that the policy sampled in all branches."""
        return sum(sequence.num_loss_tokens for sequence in self.sequences)


def sequence_infos_from_lengths(lengths: Iterable[int]) -> tuple[SequenceInfo, ...]:
    """Return infos for sequences with these lengths, each from its own rollout and prompt."""
    return tuple(SequenceInfo(RolloutId(i, 0), n, rollout_index=i) for i, n in enumerate(lengths))


NOT_COMPUTED: Any = None  # placeholder for a per-token tensor that has not been computed yet
# Maps fields of `Batch` to the fields of `TOKEN` that fill them.
TOKEN_STREAMS = {
    "tokens": "id",
    "loss_mask": "is_sampled",
    "sample_logprobs": "logprob",
    "weight_version": "weight_version",
}


@dataclass(frozen=True)
class Batch:
    """N concatenated sequences, T tokens in total.

    Every field except `sequences` is a per-token tensor [T], or None until it is computed. A subclass may add a
    per-token field with one line: `exchange_rollouts` builds the subclass, and `select`, `to` and `replace` handle all
    fields alike. The model processes each prompt once for all of its rollouts in the batch.
    """

    sequences: tuple[SequenceInfo, ...]
    tokens: Tensor  # int64
    loss_mask: Tensor  # bool: whether the policy sampled this token
    sample_logprobs: Tensor = NOT_COMPUTED  # fp32, like the fields below except `weight_version`
    weight_version: Tensor = NOT_COMPUTED  # int32: the version of the weights that sampled this token
    advantages: Tensor = NOT_COMPUTED
    loss_weights: Tensor = NOT_COMPUTED
    old_logprobs: Tensor = NOT_COMPUTED
    ref_logprobs: Tensor = NOT_COMPUTED
    teacher_logprobs: Tensor = NOT_COMPUTED
    values: Tensor = NOT_COMPUTED
    # At each sequence's last token, the value of the state after that token; 0 elsewhere.
    end_values: Tensor = NOT_COMPUTED
    returns: Tensor = NOT_COMPUTED

    @property
    def lengths(self) -> tuple[int, ...]:
        """The length of each sequence, [N]."""
        return tuple(sequence.num_tokens for sequence in self.sequences)

    @property
    def rollout_index(self) -> Tensor:
        """The rollout index of each sequence in the step, int64 [N] on the host."""
        return torch.tensor([sequence.rollout_index for sequence in self.sequences], dtype=torch.int64)

    @property
    def is_truncated(self) -> Tensor:
        """Whether each sequence was truncated by a limit, bool [N] on the host."""
        return torch.tensor([sequence.is_truncated for sequence in self.sequences], dtype=torch.bool)

    @functools.cached_property
    def loss_index(self) -> Tensor:
        """The indices of the sampled tokens in the packed batch, int64 [M].

        The indices are computed once, because boolean-mask indexing forces a host-device synchronization.
        """
        return self.loss_mask.nonzero()[:, 0]

    @property
    def last_token_index(self) -> Tensor:
        """The index of each sequence's last token in the packed batch, int64 [N]."""
        return to_device(torch.tensor(self.lengths, dtype=torch.int64).cumsum(0) - 1, self.tokens.device)

    @property
    def policy_logprobs(self) -> Tensor:
        """The policy's logprobs [T] before the update: `old_logprobs` if computed, otherwise `sample_logprobs`."""
        return self.sample_logprobs if self.old_logprobs is None else self.old_logprobs

    def layout(self) -> PackedLayout:
        """Return the packed layout of the batch's tokens for the model.

        Sequences with the same prompt share the prompt tokens of their parent, the first sequence with this prompt.
        Example: sequences 0, 1 and 3 have the same prompt of 5 tokens, so 1 and 3 share 5 tokens with their parent,
        sequence 0.
        """
        sequences = list(map(attention.Sequence, self.lengths))
        parent_of: dict[RolloutId, int] = {}
        for i, sequence in enumerate(self.sequences):
            parent_index = parent_of.setdefault(sequence.prompt_id, i)
            if parent_index != i:
                sequences[i] = attention.Sequence(
                    sequence.num_tokens, parent_index, sequence.num_prompt_tokens
                )
        return PackedLayout(tuple(sequences), self.tokens.device)

    def replace(self, **fields: Any) -> Self:
        """Return a copy with these fields set."""
        return dataclasses.replace(self, **fields)

    def to(self, device: torch.device) -> Self:
        """Return a copy with all per-token tensors on `device`."""
        return self.replace(**{name: stream.to(device) for name, stream in self._per_token_tensors().items()})

    def token_index(self, sequences: Sequence[SequenceInfo]) -> Tensor:
        """Return the indices of these sequences' tokens in the packed batch, int64.

        The sequences are looked up by id.
        """
        starts = itertools.accumulate(self.lengths, initial=0)
        start_by_id = {sequence.id: start for sequence, start in zip(self.sequences, starts, strict=False)}
        token_indices = concatenated_ranges(
            [start_by_id[sequence.id] for sequence in sequences],
            [sequence.num_tokens for sequence in sequences],
        )
        return to_device(token_indices, self.tokens.device)

    def select(self, sequences: Sequence[SequenceInfo]) -> Self:
        """Return a batch of these sequences in this order, looked up by id."""
        token_index = self.token_index(sequences)
        streams = {name: stream[token_index] for name, stream in self._per_token_tensors().items()}
        return self.replace(sequences=tuple(sequences), **streams)

    @property
    def num_loss_tokens(self) -> Tensor:
        """The number of tokens that the policy sampled in each sequence, int64 [N] on the host."""
        return sequence_sums(self.loss_mask, self.lengths).long().cpu()

    def scatter_to_tokens(self, values: Tensor) -> Tensor:
        """Return a per-token tensor [T, ...] with values [M, ...] at the sampled tokens, in order, and 0 elsewhere."""
        token_values = values.new_zeros(len(self.tokens), *values.shape[1:])
        token_values[self.loss_index] = values
        return token_values

    def sequences_to_tokens(self, values: Tensor) -> Tensor:
        """Return a per-token tensor [T] with each sequence's value [N] at its sampled tokens, and 0 elsewhere."""
        token_values = repeat_over_tokens(values.to(self.tokens.device), self.lengths)
        return token_values.masked_fill(~self.loss_mask, 0)

    def rollouts_to_tokens(self, values: Tensor) -> Tensor:
        """Return a per-token tensor [T] with each rollout's value [P, G] at its sampled tokens, and 0 elsewhere."""
        return self.sequences_to_tokens(values.flatten()[self.rollout_index])

    def _per_token_tensors(self) -> dict[str, Tensor]:
        """Return the computed per-token tensors, keyed by field name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def gather_rollout_infos(rewarded: Iterable[RewardedRollout]) -> list[RolloutInfo]:
    """Gather sorted infos for all ranks' rollouts (collective). rewarded: this rank's rollouts."""
    local_infos = [
        RolloutInfo(list(map(make_sequence_info, rollout.branches)), rollout.is_truncated, rewards)
        for rollout, _, rewards in rewarded
    ]
    # Ids are unique, so sorting never compares the other fields.
    return sorted(itertools.chain(*gather_objects(local_infos)))


def gather_to_rollouts(batch: Batch, values: Tensor, num_rollouts: int) -> Tensor:
    """Sum the batch's sequence values [n] over each rollout's branches, across ranks (collective).

    Returns fp64 [num_rollouts] on the host, the same on every rank, with 0 for a rollout that is in no batch.
    """
    sums = torch.zeros(num_rollouts, dtype=torch.float64)
    return all_reduce_sum(sums.index_add(0, batch.rollout_index, values.double().cpu()))


def pack(branches: Sequence[SampledSequence], batch_type: type[Batch] = Batch) -> Batch:
    """Pack branches into a batch on the host, without setting rollout indices. Not collective."""
    packed_token_data = concat_tokens(*(branch.stream for branch in branches))
    streams = {
        name: torch.from_numpy(packed_token_data[field].copy()) for name, field in TOKEN_STREAMS.items()
    }
    return batch_type(sequences=tuple(map(make_sequence_info, branches)), **streams)


def exchange_rollouts(
    rollouts: Sequence[Rollout],
    plan: Sequence[Sequence[Sequence[Microbatch]]],
    streams: Mapping[str, Tensor] | None = None,
    batch_type: type[Batch] = Batch,
) -> Batch:
    """Send each sequence to the rank that trains on it, and return this rank's batch on the host (collective).

    The batch's sequences are sorted by id. rollouts: this rank's rollouts, in any order. plan: the microbatches
    [minibatch][rank] of all ranks; sequences outside the plan are not sent. If rollouts share a prompt ordinal, their
    first branches must begin with the same prompt. streams: extra per-token fields of the batch, each concatenated over
    these rollouts' branches; every rank passes the same names. batch_type: `Batch`, or a subclass with these fields.

    Example: rank 0 has sequences 0 and 4, and rank 1 has sequences 1, 2 and 3; plan = [[[[3]], [[0, 1, 4]]]].

        rank 0 sends sequences 0 and 4 to rank 1, and receives sequence 3
        rank 1 sends sequence 3 to rank 0 and sequence 1 to itself, then receives and sorts sequences 0, 4 and 1
    """
    local_batch = pack(all_branches(rollouts), batch_type).replace(**(streams or {}))
    ranks = range(world_size())
    # The sequences that each rank trains on, in all minibatches.
    planned_sequences_by_rank = [
        [sequence for per_rank in plan for micro in per_rank[r] for sequence in micro] for r in ranks
    ]
    sent_sequences_by_rank = [
        [sequence for sequence in part if sequence.owner_rank == rank()] for part in planned_sequences_by_rank
    ]
    received_sequences = [
        [sequence for sequence in planned_sequences_by_rank[rank()] if sequence.owner_rank == r]
        for r in ranks
    ]
    num_sent, num_received = (
        [sum(sequence.num_tokens for sequence in part) for part in sequences_by_rank]
        for sequences_by_rank in (sent_sequences_by_rank, received_sequences)
    )
    outgoing_batch = local_batch.select(list(itertools.chain(*sent_sequences_by_rank)))
    received_token_tensors = {}
    with spent_on("wait_ranks"):
        for name, stream in outgoing_batch._per_token_tensors().items():
            received_token_tensors[name] = stream.new_empty(sum(num_received), *stream.shape[1:])
            dist.all_to_all_single(received_token_tensors[name], stream, num_received, num_sent)
    unsorted_batch = local_batch.replace(
        sequences=tuple(itertools.chain(*received_sequences)), **received_token_tensors
    )
    batch = unsorted_batch.select(sorted(unsorted_batch.sequences))
    # Shared prompts must be identical, because they go through the model only once.
    sequence_tokens = zip(batch.sequences, batch.tokens.split(batch.lengths), strict=True)
    prompt_token_bytes = {
        (info.prompt_id, tokens[: info.num_prompt_tokens].numpy().tobytes())
        for info, tokens in sequence_tokens
    }
    assert len(prompt_token_bytes) == len(dict(prompt_token_bytes)), "one prompt's rollouts begin differently"
    return batch


def make_sequence_info(branch: SampledSequence) -> SequenceInfo:
    """Return the info for a branch on this rank."""
    return SequenceInfo(
        branch.rollout_id,
        len(branch.stream),
        num_prompt_tokens=branch.num_prompt_tokens,
        num_loss_tokens=branch.num_sampled_tokens,
        temperature=branch.temperature,
        is_truncated=branch.is_truncated,
        owner_rank=rank(),
    )
