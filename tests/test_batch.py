"""A batch against loops over its sequences, and what ranks know of each other's."""

import dataclasses
import math
from dataclasses import dataclass
from itertools import starmap

import pytest
import torch
from torch import Tensor

from minirl.rollouts import Rollout, RolloutId, all_branches
from minirl.training.assignment import PromptPrefix
from minirl.training.batch import (
    NOT_MADE,
    Batch,
    exchange,
    gather_table,
    gather_to_rollouts,
    gather_tokens,
    pack,
)
from support.rollouts import in_two_branches

CPU = torch.device("cpu")


def make_batch(lengths):
    """A batch with every declared field set to different numbers."""
    generator = torch.Generator().manual_seed(0)
    streams = {
        field.name: torch.rand(sum(lengths), generator=generator) for field in dataclasses.fields(Batch)
    }
    return Batch(
        **{
            **streams,
            "lengths": tuple(lengths),
            "tokens": (1000 * streams["tokens"]).long(),
            "loss_mask": streams["loss_mask"] < 0.5,
            "rollout": torch.arange(len(lengths)) * 10,
            "prefixes": tuple(PromptPrefix(i, 1) for i in range(len(lengths))),
        }
    )


def tensor_fields(batch):
    return {
        f.name: getattr(batch, f.name)
        for f in dataclasses.fields(batch)
        if f.name not in ("lengths", "prefixes")
    }


@pytest.mark.parametrize("chosen", [[], [0], [3, 1], [4, 3, 2, 1, 0], [2, 2], [1], None])
def test_select_equals_a_loop_over_sequences(chosen):
    """Every field of the chosen sequences, in the order asked for, with its dtype; also none and a one-token one.

    None: of a batch without sequences, which a rank without rollouts has.
    """
    batch = make_batch([] if chosen is None else [3, 1, 5, 2, 4])
    chosen = chosen or []
    part = batch.select(chosen)
    assert part.lengths == tuple(batch.lengths[i] for i in chosen)
    assert part.prefixes == tuple(batch.prefixes[i] for i in chosen)
    for name, value in tensor_fields(batch).items():
        parts = value.split(1 if name == "rollout" else batch.lengths)
        wanted = torch.cat([value[:0], *(parts[i] for i in chosen)])
        torch.testing.assert_close(getattr(part, name), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[3, 1, 4], []])
def test_spread_repeats_within_the_loss_mask(lengths):
    """Each sequence's value at its loss tokens and exactly 0 elsewhere, even for values that are not finite."""
    mask = torch.tensor([False, True, True, False, False, True, False, True])[: sum(lengths)]
    values = torch.tensor([1.5, math.nan, math.inf])[: len(lengths)]
    spread = make_batch(lengths).replace(loss_mask=mask).spread(values)
    assert str(spread.tolist()) == str([0.0, 1.5, 1.5, 0.0, 0.0, math.inf, 0.0, math.inf][: len(mask)])


def test_to_moves_every_stream_and_a_field_not_made_yet_stays_none():
    """The rollouts' indices stay on the host, as the table does."""
    batch = make_batch([2, 3])
    moved = batch.to(torch.device("meta"))
    devices = {name: value.device.type for name, value in tensor_fields(moved).items()}
    assert devices.pop("rollout") == "cpu"
    assert set(devices.values()) == {"meta"}
    assert (moved.lengths, moved.prefixes) == (batch.lengths, batch.prefixes)
    batch = batch.replace(advantages=NOT_MADE)
    assert batch.select([1]).advantages is batch.to(CPU).advantages is None


@pytest.mark.parametrize(
    ("chosen", "shared"),
    [
        ([0, 1, 2, 3, 4, 5], ((0, 0), (1, 0), (0, 2), (0, 2), (1, 1), (5, 0))),
        ([2, 4, 3], ((0, 0), (1, 0), (0, 2))),
        ([4, 1], ((0, 0), (0, 1))),
        ([3, 4], ()),
        ([0, 5], ()),
        ([], ()),
    ],
)
def test_a_layout_shares_prompts_within_its_own_batch(chosen, shared):
    """Parents are places in the selection, the first with the prompt; a parent outside the selection does not count.

    A prompt is its ordinal and its length: where the lengths differ, nothing is shared.
    """
    prompts = ((4, 2), (9, 1), (4, 2), (4, 2), (9, 1), (4, 3))
    batch = dataclasses.replace(
        make_batch([3, 1, 5, 2, 4, 4]), prefixes=tuple(PromptPrefix(*prompt) for prompt in prompts)
    )
    assert batch.select(chosen).layout().shared == shared


# Between ranks.

IDS = [(p, s) for p in (3, 7, 8) for s in range(3)]  # of the nine rollouts below, in the order of the table


def make_rollout(prompt, sample):
    """A rollout whose every number follows from its id; the length limit cut off the last of each group."""
    num_prompt, num_sampled = prompt, 1 + sample
    mask = torch.arange(num_prompt + num_sampled) >= num_prompt
    tokens = torch.arange(len(mask)) + 100 * prompt + 10 * sample * mask
    end = "length" if sample == 2 else "stop"
    rollout_id = RolloutId(prompt, sample)
    logprobs, versions = mask * tokens / -1000, mask.int() * (1 + sample)
    return Rollout(tokens, mask, logprobs, versions, num_prompt, rollout_id, end)


@dataclass(frozen=True)
class TaughtBatch(Batch):
    """As a fork adds a stream."""

    taught: Tensor = NOT_MADE


def rollouts_of(ids):
    """Those of three sampled tokens are in two branches."""
    return [in_two_branches(r) if r.num_sampled == 3 else r for r in starmap(make_rollout, ids)]


BRANCH_IDS = [(p, s, b) for p, s in IDS for b in range(1 + (s == 2))]


def exchange_branches(rank, first_share, rank_of):
    """The exchange of branches with a stream more, and each one's last token, summed again by rollout."""
    # Rank 0 has the last `first_share`, reversed.
    rollouts = rollouts_of(IDS[::-1][:first_share] if rank == 0 else IDS[::-1][first_share:])
    rewards = [[r.rollout_id.prompt_ordinal + 0.1, r.rollout_id.sample / 3] for r in rollouts]
    table = gather_table(rollouts, torch.tensor(rewards, dtype=torch.float64).view(-1, 2))
    streams = {"taught": 3.0 * pack(all_branches(rollouts)).sample_logprobs}
    batch = exchange(rollouts, table, rank_of, streams, TaughtBatch)
    lasts = gather_to_rollouts(batch, batch.tokens[batch.last_index], 9)
    return table, batch, lasts, *gather_tokens(batch.tokens[batch.loss_mask])


SOME = [None, 1, 0, None, 0, 0, None, 1, 1, None, 0, 1]


@pytest.mark.parametrize("rank_of", [[0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1], [1] * 12, SOME])
@pytest.mark.parametrize("first_share", [0, 4, 9])
def test_branches_are_rows_that_share_a_rollout_and_its_rewards(two_ranks, first_share, rank_of):
    """In order of their ids; branches of a rollout are trained on any rank or none, with all streams, a fork's own too,
    and summed again by rollout.

    Every rank has the numbers of all, every reward to its last bit, whoever holds the rollouts, if any. Pitfall 53.
    """
    branches = all_branches(rollouts_of(IDS))
    rollout_of_row = [0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8]
    sent = [
        branch.tokens * (receiver is not None) for branch, receiver in zip(branches, rank_of, strict=True)
    ]
    sums = [sum(x[-1] for x, r in zip(sent, rollout_of_row, strict=True) if r == i) for i in range(9)]
    answers = two_ranks.run(exchange_branches, first_share, rank_of)
    for rank, (table, batch, lasts, all_tokens, places) in enumerate(answers):
        assert table.ids == [RolloutId(*ids) for ids in BRANCH_IDS]
        assert table.rollout.tolist() == rollout_of_row
        assert table.is_truncated.tolist() == [s == 2 for _, s, _ in BRANCH_IDS]
        assert table.rewards.tolist() == [[p + 0.1, s / 3] for p, s, _ in BRANCH_IDS]
        assert table.num_loss_tokens.tolist() == [(1, 2, (1, 2)[b])[s] for _, s, b in BRANCH_IDS]
        assert table.num_tokens.tolist() == [p + (1, 2, (1, 3)[b])[s] for p, s, b in BRANCH_IDS]
        by_rollout = table.by_rollout()
        assert by_rollout.ids == [RolloutId(p, s) for p, s in IDS]
        assert by_rollout.num_loss_tokens.tolist() == [1 + s for _, s in IDS]
        assert table[torch.tensor([3, 6, 7])].rollout.tolist() == [0, 1, 1]
        own = [i for i, receiver in enumerate(rank_of) if receiver == rank]
        assert batch.rollout.tolist() == [rollout_of_row[i] for i in own]
        expected = pack([branches[i] for i in own])
        for name in ("tokens", "loss_mask", "sample_logprobs", "weight_version", "is_truncated"):
            # And the same dtypes.
            torch.testing.assert_close(getattr(batch, name), getattr(expected, name), rtol=0, atol=0)
        assert batch.is_truncated[batch.last_index].tolist() == [BRANCH_IDS[i][1:] == (2, 1) for i in own]
        assert torch.equal(batch.taught, 3.0 * batch.sample_logprobs)
        assert batch.prefixes == expected.prefixes
        assert lasts.dtype == all_tokens.dtype == torch.float64
        assert lasts.tolist() == sums
        of_ranks = [batch.tokens[batch.loss_mask] for _, batch, *_ in answers]
        assert torch.equal(all_tokens.long(), torch.cat(of_ranks))
        assert torch.equal(all_tokens[places].long(), of_ranks[rank])


def exchange_own_prompts(rank):
    """Two rollouts of one prompt, whose second branches begin with other prompts of one length."""
    rollouts = [in_two_branches(make_rollout(7, 2)) for _ in range(2)]
    rollouts[1].tokens[3] += 1
    moved = [b.rollout_id._replace(sample=5) for b in rollouts[1].branches]
    first = dataclasses.replace(rollouts[1].earlier[0], rollout_id=moved[0])
    rollouts[1] = dataclasses.replace(rollouts[1], rollout_id=moved[1], earlier=(first,))
    first.tokens[3] -= 1
    batch = exchange(rollouts, gather_table(rollouts, torch.zeros(2, 1)), [0] * 4)
    return batch.layout().shared


def test_a_further_branch_shares_its_prompt_with_none(one_rank):
    """First branches of one prompt's rollouts share it; another one's prompt is its own, whatever its length."""
    assert one_rank.run(exchange_own_prompts) == [((0, 0), (1, 0), (0, 7), (3, 0))]


def exchange_own(rank, changed):
    """The exchange of one group, in whose second rollout one token is changed: which prompts and layout came of it."""
    rollouts = [make_rollout(7, sample) for sample in range(3)]
    if changed is not None:
        rollouts[1].tokens[changed] += 1
    batch = exchange(rollouts, gather_table(rollouts, torch.zeros(3, 1)), [0, 0, 0])
    return batch.prefixes, batch.layout().shared


@pytest.mark.parametrize("changed", [None, 0, 6, 7])
def test_an_exchange_refuses_one_ordinal_with_two_prompts(one_rank, changed):
    """Rollouts of an ordinal must begin alike, else one's states would be another's; completions may differ."""
    if changed in (0, 6):
        with pytest.raises(AssertionError, match="begin differently"):
            one_rank.run(exchange_own, changed)
    else:
        assert one_rank.run(exchange_own, changed) == [((PromptPrefix(7, 7),) * 3, ((0, 0), (0, 7), (0, 7)))]
