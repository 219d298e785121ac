"""Who trains on what in one step: pure functions of lengths that every rank holds.

`plan_updates` plans a step: rollouts are cut into minibatches (optimizer steps) in their order, and each of those into
microbatches (forward-backward passes) that balance the tokens the model computes over the ranks. A prompt is computed
once for all its rollouts in a microbatch, so groups are kept together as far as the balance allows.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Prompt(NamedTuple):
    """A prompt of the run by its ordinal, and its number of tokens: what its rollouts have in common."""

    ordinal: int
    num_tokens: int


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


def plan_updates(
    lengths: Sequence[int],
    prompts: Sequence[Prompt] = (),
    *,
    num_minibatches: int,
    num_ranks: int,
    max_tokens: int,
) -> Plan:
    """Cut the rollouts into minibatches in their order, and each into balanced microbatches. Pure."""
    cuts = [len(lengths) * i // num_minibatches for i in range(num_minibatches + 1)]
    minibatches = [list(range(a, b)) for a, b in itertools.pairwise(cuts)]
    how = dict(num_ranks=num_ranks, max_tokens=max_tokens)
    microbatches = []
    for rows in minibatches:
        bins = plan_microbatches([lengths[row] for row in rows], prompts and [prompts[row] for row in rows], **how)
        microbatches.append([[[rows[i] for i in micro] for micro in per_rank] for per_rank in bins])
    return Plan(minibatches, microbatches)


def plan_microbatches(
    lengths: Sequence[int], prompts: Sequence[Prompt] = (), *, num_ranks: int, max_tokens: int
) -> list[list[list[int]]]:
    """Microbatches of sequence numbers, [rank][microbatch][...]: at most `max_tokens` each, tokens balanced over ranks.

    What counts are the tokens that the model computes: a prompt once in each microbatch (without `prompts` nothing is
    in common). `_distribute` to the ranks, then on each rank to m bins, for the least m that fits all ranks: counts are
    equal, and a microbatch may be empty. Pure. Raises ValueError for a sequence over `max_tokens`.
    """
    if max(lengths, default=0) > max_tokens:
        raise ValueError(f"a rollout has {max(lengths)} tokens; raise --max-tokens-per-microbatch {max_tokens}")
    prompts = prompts or [Prompt(i, 0) for i in range(len(lengths))]
    ranks = _distribute(range(len(lengths)), lengths, prompts, num_ranks)
    num_bins = max(1, -(-max(_num_computed(members, lengths, prompts) for members in ranks) // max_tokens))
    while True:
        plan = [_distribute(members, lengths, prompts, num_bins) for members in ranks]
        if all(_num_computed(micro, lengths, prompts) <= max_tokens for micros in plan for micro in micros):
            return [[sorted(micro) for micro in micros] for micros in plan]
        num_bins += 1


def _num_computed(members: Sequence[int], lengths: Sequence[int], prompts: Sequence[Prompt]) -> int:
    """Tokens that the model computes for these sequences."""
    own = sum(lengths[i] - prompts[i].num_tokens for i in members)
    return own + sum(prompt.num_tokens for prompt in {prompts[i] for i in members})


def _distribute(
    members: Sequence[int], lengths: Sequence[int], prompts: Sequence[Prompt], num_bins: int
) -> list[list[int]]:
    """Sequences in bins of about equally many computed tokens.

    First whole groups, longest first, each into the emptiest bin if it does not overfill it; then the sequences of the
    groups that are left, longest first, each to where it leaves the fewest. A group stays whole or is spread: so most
    prompts are computed once, and the balance is that of single sequences.
    """
    groups: dict[Prompt, list[int]] = {}
    for i in members:
        groups.setdefault(prompts[i], []).append(i)
    sizes = {prompt: _num_computed(group, lengths, prompts) for prompt, group in groups.items()}
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    known: list[set[Prompt]] = [set() for _ in bins]
    loads, loose = [0] * num_bins, []
    for prompt in sorted(groups, key=lambda prompt: (-sizes[prompt], prompt)):
        b = loads.index(min(loads))
        if len(groups[prompt]) > 1 and (loads[b] + sizes[prompt]) * num_bins > sum(sizes.values()):
            loose += groups[prompt]
            continue
        bins[b] += groups[prompt]
        known[b].add(prompt)
        loads[b] += sizes[prompt]
    for i in sorted(loose, key=lambda i: (-lengths[i], i)):
        costs = [lengths[i] - prompts[i].num_tokens * (prompts[i] in known[b]) for b in range(num_bins)]
        b = min(range(num_bins), key=lambda b: loads[b] + costs[b])
        bins[b].append(i)
        known[b].add(prompts[i])
        loads[b] += costs[b]
    return bins
