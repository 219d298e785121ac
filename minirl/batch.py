"""Rollouts as packed streams, and the one exchange that brings each to the rank that trains on it (`plan`).

`Rollout`: one prompt with one completion, on the host. `Batch`: N rollouts end to end, T tokens, on the device; element
t of every stream is about token t. `gather_table`, `gather_by_row` and `exchange` communicate.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from minirl.attention import PackedLayout
from minirl.distributed import all_gather_rows, all_reduce_sum, world_size
from minirl.plan import Prompt


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
    num_prompt_tokens: Tensor
    num_tokens: Tensor
    num_loss_tokens: Tensor
    is_truncated: Tensor  # bool: the length limit ended it
    rewards: Tensor  # fp64 [N, K], one column per reward

    @property
    def prompts(self) -> list[Prompt]:
        """The prompt of each rollout."""
        return [Prompt(*pair) for pair in zip(self.prompt.tolist(), self.num_prompt_tokens.tolist(), strict=True)]

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

    A new stream is one more line here: `select`, `to` and `replace` iterate over the fields. With `prompts` the model
    computes a prompt once for all its rollouts in the batch.
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
    prompts: tuple[Prompt, ...] = ()

    def layout(self) -> PackedLayout:
        """The layout of this stream for the model."""
        first: dict[Prompt, int] = {}
        parents = [first.setdefault(prompt, i) for i, prompt in enumerate(self.prompts)]
        shared = tuple((j, self.prompts[i].num_tokens if i != j else 0) for i, j in enumerate(parents))
        return PackedLayout(self.lengths, self.tokens.device, shared=shared if len(first) < len(shared) else ())

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
        lengths = tuple(self.lengths[i] for i in sequences)
        prompts = tuple(self.prompts[i] for i in sequences) if self.prompts else ()
        return dataclasses.replace(self, lengths=lengths, prompts=prompts, **chosen)

    def spread(self, values: Tensor) -> Tensor:
        """Per-sequence values [N] as a stream [T] that is 0 outside the loss mask."""
        repeated = values.to(self.tokens.device).repeat_interleave(
            torch.tensor(self.lengths, dtype=torch.int64).to(self.tokens.device)
        )
        return torch.where(self.loss_mask, repeated, torch.zeros_like(repeated))

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in _PER_SEQUENCE if getattr(self, name) is not None}


_PER_SEQUENCE = {
    f.name: f.metadata.get("per_sequence", False)
    for f in dataclasses.fields(Batch)
    if f.name not in ("lengths", "prompts")
}


def gather_table(rollouts: Sequence[Rollout], rewards: Tensor) -> RolloutTable:
    """Lengths, ends, rewards [n_r, K] and ids of all ranks' rollouts, in order of their ids (collective)."""
    facts = [
        [r.rollout_id.prompt, r.rollout_id.sample, r.num_prompt_tokens, len(r.tokens), int(r.loss_mask.sum())]
        for r in rollouts
    ]
    is_truncated = torch.tensor([[r.finish_reason == "length"] for r in rollouts]).view(-1, 1)
    own = torch.cat([torch.tensor(facts).view(-1, 5), is_truncated, rewards], 1).double()
    table = all_gather_rows(own)
    keys = list(zip(table[:, 0].tolist(), table[:, 1].tolist(), strict=True))
    table = table[sorted(range(len(keys)), key=keys.__getitem__)]
    prompt, sample, num_prompt, num_tokens, num_loss = table[:, :5].long().T
    return RolloutTable(prompt, sample, num_prompt, num_tokens, num_loss, table[:, 5].bool(), rewards=table[:, 6:])


def gather_by_row(batch: Batch, values: Tensor, num_rows: int) -> Tensor:
    """A number per sequence of each rank's batch [n_r], as [num_rows] in table order on every rank (collective)."""
    return all_reduce_sum(
        torch.zeros(num_rows, dtype=torch.float64).index_put((batch.row.cpu(),), values.double().cpu())
    )


def exchange(rollouts: Sequence[Rollout], table: RolloutTable, rank_of: Sequence[int]) -> Batch:
    """Send each rollout to rank_of[its row in the table]; returns this rank's, in table order, on the host.

    Collective. Rollouts with one prompt ordinal must begin with the same prompt.
    """
    mine = list(zip(table.rows_of(rollouts), rollouts, strict=True))
    sent = {rank: [pair for pair in mine if rank_of[pair[0]] == rank] for rank in range(world_size())}
    rows = _all_to_all([torch.tensor([row for row, _ in sent[r]], dtype=torch.int64) for r in sent])
    streams = {
        name: _all_to_all([_cat([getattr(x, name) for _, x in sent[r]], dtype) for r in sent])
        for name, dtype in (("tokens", torch.int64), ("loss_mask", torch.bool), ("sample_logprobs", torch.float32))
    }
    lengths, prompts = tuple(table.num_tokens[rows].tolist()), tuple(table.select(rows.tolist()).prompts)
    batch = Batch(lengths, **streams, row=rows, prompts=prompts).select(rows.argsort().tolist())
    layout = batch.layout()
    assert torch.equal(batch.tokens[layout.kept][layout.row], batch.tokens), "one prompt's rollouts begin differently"
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
