"""Rollouts as packed streams, the plan of who trains on what, and the one exchange that carries it out.

`Rollout`: one prompt with one completion, on the host. `Batch`: N rollouts end to end, T tokens, on the device; element
t of every stream is about token t. Plans are pure functions of lengths that every rank holds: `plan_microbatches`
balances tokens, `plan_updates` plans a whole step. `gather_table`, `gather_by_row` and `exchange` communicate.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.attention import PackedLayout
from minirl.distributed import all_gather_rows, all_reduce_sum, world_size


@dataclass(frozen=True)
class RolloutId:
    """Which rollout of the run: the `prompt`-th prompt served since its start, and the `sample`-th of its group."""

    prompt: int
    sample: int


@dataclass(frozen=True)
class Rollout:
    """One prompt with one completion as one aligned stream of L tokens (host tensors)."""

    tokens: Tensor  # int64 [L]
    loss_mask: Tensor  # bool [L]: the policy sampled this token
    sample_logprobs: Tensor  # fp32 [L], by the engine when sampling; 0 where loss_mask is false
    weight_version: Tensor  # int32 [L], optimizer steps behind the weights that sampled the token
    num_prompt_tokens: int
    rollout_id: RolloutId
    finish_reason: str  # "stop" or "length"

    @property
    def completion(self) -> list[int]:
        """The sampled token ids, the stop token included."""
        return self.tokens[self.num_prompt_tokens :].tolist()


@dataclass(frozen=True)
class RolloutTable:
    """What every rank knows of the step's N rollouts, in order of their ids (host tensors [N])."""

    prompt: Tensor
    sample: Tensor
    num_tokens: Tensor
    num_loss_tokens: Tensor
    is_truncated: Tensor  # bool: the length limit ended it
    rewards: Tensor  # fp64 [N, K], one column per reward

    def select(self, rows: Sequence[int]) -> "RolloutTable":
        """The table of these rows."""
        return RolloutTable(**{f.name: getattr(self, f.name)[list(rows)] for f in dataclasses.fields(self)})

    def rows_of(self, rollouts: Sequence[Rollout]) -> list[int]:
        """The rows of these rollouts; KeyError for one that is not in the table."""
        row_of = {key: row for row, key in enumerate(zip(self.prompt.tolist(), self.sample.tolist(), strict=True))}
        return [row_of[r.rollout_id.prompt, r.rollout_id.sample] for r in rollouts]


def _later(*, per_sequence: bool = False) -> Tensor:
    """A field that is None until it is made."""
    return dataclasses.field(default=None, metadata={"per_sequence": per_sequence})  # type: ignore[return-value]


@dataclass(frozen=True)
class Batch:
    """N rollouts end to end. Streams are [T], per-sequence fields [N]; those not made yet are None.

    A new stream is one more line here: `select`, `to` and `replace` iterate over the fields.
    """

    lengths: tuple[int, ...]
    tokens: Tensor  # int64
    loss_mask: Tensor  # bool
    sample_logprobs: Tensor  # fp32, as are the streams below
    advantages: Tensor = _later()  # noqa: RUF009 - makes a dataclass field
    loss_weights: Tensor = _later()  # noqa: RUF009
    old_logprobs: Tensor = _later()  # noqa: RUF009
    ref_logprobs: Tensor = _later()  # noqa: RUF009
    values: Tensor = _later()  # noqa: RUF009
    returns: Tensor = _later()  # noqa: RUF009
    row: Tensor = _later(per_sequence=True)  # noqa: RUF009 - int64 [N], the rollout's row in the table

    def layout(self) -> PackedLayout:
        """The layout of this stream for the model."""
        return PackedLayout(self.lengths, self.tokens.device)

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
        """The sequences with these places, in this order."""
        places = torch.tensor(sequences, dtype=torch.int64, device=self.tokens.device)
        index = {True: places, False: self.token_index(sequences)}
        chosen = {name: x[index[_PER_SEQUENCE[name]]] for name, x in self._tensors().items()}
        return dataclasses.replace(self, lengths=tuple(self.lengths[i] for i in sequences), **chosen)

    def spread(self, values: Tensor) -> Tensor:
        """Per-sequence values [N] as a stream [T] that is 0 outside the loss mask."""
        repeated = values.to(self.tokens.device).repeat_interleave(
            torch.tensor(self.lengths, dtype=torch.int64).to(self.tokens.device)
        )
        return torch.where(self.loss_mask, repeated, torch.zeros_like(repeated))

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _PER_SEQUENCE if getattr(self, name) is not None}


_PER_SEQUENCE = {
    f.name: f.metadata.get("per_sequence", False) for f in dataclasses.fields(Batch) if f.name != "lengths"
}


@dataclass(frozen=True)
class Plan:
    """Who trains on what in one step; the same on every rank. Numbers are rows of the table.

    minibatches[i]: the rollouts of one optimizer step, contiguous rows. microbatches[i][rank][j]: one forward-backward.
    """

    minibatches: list[list[int]]
    microbatches: list[list[list[list[int]]]]

    @property
    def rank_of(self) -> list[int]:
        """The rank that trains on each rollout."""
        owner = {row: r for ranks in self.microbatches for r, micros in enumerate(ranks) for m in micros for row in m}
        return [owner[row] for row in range(len(owner))]

    def of_rank(self, rank: int) -> list[list[list[int]]]:
        """This rank's [minibatch][microbatch], as places in the batch that `exchange` gives it."""
        rows = sorted(row for ranks in self.microbatches for micro in ranks[rank] for row in micro)
        place = {row: i for i, row in enumerate(rows)}
        return [[[place[row] for row in micro] for micro in ranks[rank]] for ranks in self.microbatches]


def plan_updates(lengths: Sequence[int], *, num_minibatches: int, num_ranks: int, max_tokens: int) -> Plan:
    """Cut the rollouts into minibatches in their order, and each into balanced microbatches. Pure."""
    cuts = [len(lengths) * i // num_minibatches for i in range(num_minibatches + 1)]
    minibatches = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
    microbatches = []
    for rows in minibatches:
        bins = plan_microbatches([lengths[row] for row in rows], num_ranks=num_ranks, max_tokens=max_tokens)
        microbatches.append([[[rows[i] for i in micro] for micro in per_rank] for per_rank in bins])
    return Plan(minibatches, microbatches)


def plan_microbatches(lengths: Sequence[int], *, num_ranks: int, max_tokens: int) -> list[list[list[int]]]:
    """Microbatches of sequence numbers, [rank][microbatch][...]: at most `max_tokens` each, tokens balanced over ranks.

    Longest first to the emptiest rank, then on each rank into the emptiest of m bins, for the least m that fits all
    ranks: counts are equal, and a microbatch may be empty. Pure. Raises ValueError for a sequence over `max_tokens`.
    """
    if max(lengths, default=0) > max_tokens:
        raise ValueError(f"a rollout has {max(lengths)} tokens; raise --max-tokens-per-microbatch {max_tokens}")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    ranks = _longest_first(order, lengths, num_ranks)
    num_bins = max(1, -(-max(sum(lengths[i] for i in members) for members in ranks) // max_tokens))
    while True:
        plan = [_longest_first(members, lengths, num_bins) for members in ranks]
        if all(sum(lengths[i] for i in micro) <= max_tokens for micros in plan for micro in micros):
            return [[sorted(micro) for micro in micros] for micros in plan]
        num_bins += 1


def _longest_first(order: Sequence[int], lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Sequences, longest first in `order`, each into the bin with the fewest tokens so far."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, b) for b in range(num_bins)]
    for i in order:
        load, b = heap[0]
        bins[b].append(i)
        heapq.heapreplace(heap, (load + lengths[i], b))
    return bins


def gather_table(rollouts: Sequence[Rollout], rewards: Tensor) -> RolloutTable:
    """Lengths, ends, rewards [n_r, K] and ids of all ranks' rollouts, in order of their ids (collective)."""
    facts = [
        (r.rollout_id.prompt, r.rollout_id.sample, len(r.tokens), int(r.loss_mask.sum()), r.finish_reason == "length")
        for r in rollouts
    ]
    own = torch.cat([torch.tensor(facts, dtype=torch.float64).view(-1, 5), rewards.double()], 1)
    table = all_gather_rows(own)
    keys = list(zip(table[:, 0].tolist(), table[:, 1].tolist(), strict=True))
    table = table[sorted(range(len(keys)), key=keys.__getitem__)]
    prompt, sample, num_tokens, num_loss_tokens = table[:, :4].long().T
    return RolloutTable(prompt, sample, num_tokens, num_loss_tokens, table[:, 4].bool(), rewards=table[:, 5:])


def gather_by_row(batch: Batch, values: Tensor, num_rows: int) -> Tensor:
    """A number per sequence of each rank's batch [n_r], as [num_rows] in table order on every rank (collective)."""
    return all_reduce_sum(
        torch.zeros(num_rows, dtype=torch.float64).index_put((batch.row.cpu(),), values.double().cpu())
    )


def exchange(rollouts: Sequence[Rollout], table: RolloutTable, rank_of: Sequence[int]) -> Batch:
    """Send each rollout to rank_of[its row in the table]; returns this rank's, in table order, on the host.

    Collective.
    """
    mine = list(zip(table.rows_of(rollouts), rollouts, strict=True))
    sent = {rank: [pair for pair in mine if rank_of[pair[0]] == rank] for rank in range(world_size())}
    rows = _all_to_all([torch.tensor([row for row, _ in sent[r]], dtype=torch.int64) for r in sent])
    streams = {
        name: _all_to_all([_cat([getattr(x, name) for _, x in sent[r]], dtype) for r in sent])
        for name, dtype in (("tokens", torch.int64), ("loss_mask", torch.bool), ("sample_logprobs", torch.float32))
    }
    lengths = tuple(table.num_tokens[rows].tolist())
    return Batch(lengths, **streams, row=rows).select(rows.argsort().tolist())


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
