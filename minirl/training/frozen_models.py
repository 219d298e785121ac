"""Models that are not trained: parked in host memory, and run over a batch without gradient."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from minirl.model.transformer import LoraLinear, Transformer
from minirl.ranks.time_account import spent_on
from minirl.rollouts import Rollout, RolloutId, all_branches
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import Batch, pack
from minirl.training.scoring import scalar_outputs
from minirl.training.sharded_model import ShardedModel

# A parked model is not copied to the device for a shorter wait than the copy takes.
UPLOAD_S = 0.1
POLL_S = 0.002
# Streams of a batch, computed without gradient: [T], or [T, D] for hidden states.
Outputs = Callable[[Transformer, Batch], Sequence[Tensor]]


@contextmanager
def unparked(model: Transformer, device: torch.device, *, park: bool) -> Iterator[None]:
    """Put a frozen model's weights on `device` for the block; with `park`, only in host memory after it.

    Nothing writes to them, so the host keeps its tensors, and parking drops the device's. For CUDA the host's tensors
    are pinned at the first use, at up to twice their bytes (torch rounds each one up to a power of two): copies of
    them do not wait for the host. On the CPU nothing is copied. Not collective.
    """
    host = []
    for parameter in model.parameters():
        if park and device.type == "cuda":
            parameter.data = parameter.data.pin_memory()  # a pinned tensor is returned as it is
        host.append(parameter.data)
        parameter.data = parameter.data.to(device, non_blocking=True)
    yield
    if park:
        for parameter, parked in zip(model.parameters(), host, strict=True):
            parameter.data = parked


def _lasts(is_waiting: Callable[[], bool], seconds: float) -> bool:
    """Wait; return whether this rank still waits after these seconds."""
    deadline = time.monotonic() + seconds
    while is_waiting():
        if time.monotonic() > deadline:
            return True
        time.sleep(POLL_S)
    return False


class FrozenModel:
    """A model that does not change while a step's rollouts are made, and the streams that it computes for them.

    The policy is one until its update. A script may write to the parameters of `model` between two steps, for a moving
    average of the policy's weights.

    It can compute the streams of finished rollouts early, while its rank would wait for replies, rewards or other
    ranks. That changes no bit if the model's outputs do not depend on the batch.

    `add_to` is collective if the model is sharded; nothing else is.
    """

    def __init__(
        self,
        model: Transformer | ShardedModel,
        outputs: Outputs,
        *,
        names: Sequence[str],
        device: torch.device,
        max_tokens: int,
        park: bool = False,
        has_states: bool = False,
    ):
        """model: a sharded one is run as its `scorer`, neither early nor parked where ranks gather its weights.

        names: those in `Batch` of the first streams that `outputs` returns, which drops any further ones.

        max_tokens: limit of a microbatch. park: see `unparked`. has_states: the streams are hidden states [T, D] in
        the model's dtype, not numbers [T] in fp32.
        """
        self.names = tuple(names)
        self.model = model.scorer if isinstance(model, ShardedModel) else model
        self._gathered = model if isinstance(model, ShardedModel) and model.shards_weights else None
        self._outputs = outputs
        self._device = device
        self._max_tokens = max_tokens
        self._park = park
        self._shape = (self.model.config.hidden_size,) if has_states else ()
        self._dtype = next(self.model.parameters()).dtype if has_states else torch.float32
        self._pending: list[Rollout] = []
        # For each branch its streams [L], on the host.
        self._early: dict[RolloutId, dict[str, Tensor]] = {}

    def begin(self) -> None:
        """Forget the early streams: the model may have changed before the next step."""
        self._pending = []
        self._early = {}

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add finished rollouts, which `score_early` may compute streams for."""
        self._pending += all_branches(rollouts)

    @torch.no_grad()
    def score_early(self, is_waiting: Callable[[], bool]) -> None:
        """Run the model over the rollouts that were added, microbatch by microbatch, as long as this rank waits."""
        if self._gathered or not self._pending or not is_waiting():
            return
        if self._park and self._device.type == "cuda" and not _lasts(is_waiting, UPLOAD_S):
            return
        batch = pack(self._pending)
        (microbatches,) = plan_microbatches(
            batch.lengths, batch.prefixes, num_ranks=1, max_tokens=self._max_tokens
        )
        scored: set[int] = set()
        with spent_on("score"), self._on_device():
            for indices in microbatches:
                if not is_waiting():
                    break
                micro = batch.select(indices)
                streams = self._streams(micro.to(self._device))
                split = {name: stream.cpu().split(micro.lengths) for name, stream in streams}
                for place, i in enumerate(indices):
                    of_branch = {name: parts[place] for name, parts in split.items()}
                    self._early[self._pending[i].rollout_id] = of_branch
                scored.update(indices)
        self._pending = [branch for i, branch in enumerate(self._pending) if i not in scored]

    def early_streams(self, rollouts: Sequence[Rollout]) -> dict[str, Tensor]:
        """The streams of these rollouts' branches end to end, by name, for `exchange`; NaN where not made early."""
        streams = {}
        for name in self.names:
            parts = [self._missing(0)]
            for branch in all_branches(rollouts):
                early = self._early.get(branch.rollout_id)
                parts.append(self._missing(len(branch.tokens)) if early is None else early[name])
            streams[name] = torch.cat(parts)
        return streams

    @torch.no_grad()
    def add_to(self, batch: Batch, microbatches: Iterable[Sequence[int]]) -> Batch:
        """Return the batch, on the model's device, with all streams of the sequences in these microbatches."""
        streams = {}
        for name in self.names:
            stream = getattr(batch, name)
            if stream is None:
                streams[name] = self._missing(len(batch.tokens)).to(batch.tokens.device)
            else:
                streams[name] = stream.clone()
        # A stream has all tokens of a sequence, or none.
        last_tokens = torch.stack([stream[batch.last_index] for stream in streams.values()], 1)
        is_left = last_tokens.isnan().flatten(1).any(1).tolist()
        with self._on_device():
            for indices in microbatches:
                left = [i for i in indices if is_left[i]]
                if left or self._gathered:
                    token_index = batch.token_index(left)
                    for name, stream in self._streams(batch.select(left)):
                        streams[name][token_index] = stream.to(streams[name].dtype)
        return batch.replace(**streams)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Put the weights on the device for the block; the head's stay gathered for users of hidden states."""
        if self._gathered is None:
            with unparked(self.model, self._device, park=self._park):
                yield
        else:
            yield
            if not self._shape:
                self._gathered.reshard()

    def _streams(self, batch: Batch) -> Iterator[tuple[str, Tensor]]:
        """The named streams of a microbatch."""
        return zip(self.names, self._outputs(self.model, batch), strict=False)

    def _missing(self, num_tokens: int) -> Tensor:
        """A stream that was not computed."""
        return torch.full((num_tokens, *self._shape), torch.nan, dtype=self._dtype)


def after_prompts(
    outputs: Outputs, prompt_ids: Callable[[int], Sequence[int]], *, max_tokens: int
) -> Outputs:
    """The outputs at the sampled tokens, for a model that reads other prompts before them; 0 elsewhere.

    prompt_ids: see `Batch.with_prompts`. max_tokens: limit of a microbatch with these prompts.
    """

    def outputs_of(model: Transformer, batch: Batch) -> Sequence[Tensor]:
        other = batch.with_prompts(prompt_ids)
        (microbatches,) = plan_microbatches(other.lengths, other.prefixes, num_ranks=1, max_tokens=max_tokens)
        parts = []
        for indices in microbatches:
            seen = other.select(indices)
            parts.append([stream[seen.loss_index] for stream in outputs(model, seen)])
        # The microbatches have the sequences in another order than the batch.
        index = batch.token_index(list(itertools.chain(*microbatches)))
        order = index[batch.loss_mask[index]].argsort()
        return [batch.scatter(torch.cat(values)[order]) for values in zip(*parts, strict=True)]

    return outputs_of


def under_adapters(outputs: Outputs) -> Outputs:
    """The outputs of the model under the adapters, on the same storage: a reference that takes no memory."""

    def outputs_of(model: Transformer, batch: Batch) -> Sequence[Tensor]:
        adapted = [module for module in model.modules() if isinstance(module, LoraLinear)]
        for module in adapted:
            module.is_adapted = False
        streams = outputs(model, batch)
        for module in adapted:
            module.is_adapted = True
        return streams

    return outputs_of


def values_of(model: Transformer, batch: Batch) -> tuple[Tensor, Tensor]:
    """The values [T] before the sampled tokens, and those of the states after the last tokens; 0 elsewhere."""
    values, scores = scalar_outputs(model, batch.tokens, batch.layout(), select=batch.loss_index)
    end_values = torch.zeros_like(values)
    end_values[batch.last_index] = scores
    return values, end_values
