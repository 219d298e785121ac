"""What ranks know about each other's rollouts, and how a rollout reaches the rank that trains on it."""

import dataclasses
from dataclasses import dataclass
from itertools import starmap

import numpy as np
import pytest
import torch
from torch import Tensor

from minirl.episodes.step_groups import Groups
from minirl.rollouts import RolloutId, all_branches
from minirl.training.batch import (
    NOT_COMPUTED,
    Batch,
    exchange_rollouts,
    gather_rollout_infos,
    gather_to_rollouts,
    pack,
)
from support.rollouts import in_two_branches, rollout_of, sampled

IDS = [(p, s) for p in (3, 7, 8) for s in range(3)]  # ids of the nine rollouts below, in order


def make_rollout(prompt, sample):
    """Return a rollout whose numbers all follow from its id. The last rollouts of groups 3 and 7 are truncated."""
    first = 100 * prompt
    tokens = np.arange(prompt, prompt + 1 + sample) + first + 10 * sample
    completion = sampled(tokens, logprobs=tokens / -1000, versions=1 + sample)
    end = "length" if sample == 2 and prompt < 8 else "stop"
    return rollout_of(RolloutId(prompt, sample), range(first, first + prompt), completion, end)


@dataclass(frozen=True)
class TaughtBatch(Batch):
    """A batch with an additional stream, as a fork may define it."""

    taught: Tensor = NOT_COMPUTED


def rollouts_of(ids):
    """Return rollouts. With three sampled tokens, a rollout has two branches; group 8's limit follows both branches."""
    rollouts = [in_two_branches(r) if r.num_sampled_tokens == 3 else r for r in starmap(make_rollout, ids)]
    return [
        dataclasses.replace(r, finish_reason=("stop", "length")[r.rollout_id.sample == 2]) for r in rollouts
    ]


def exchange_branches(rank, first_share, rank_of):
    """Exchange branches with an additional stream; return infos, batch, and branches' last tokens summed by rollout."""
    # Rank 0 has the last `first_share` rollouts.
    rollouts = rollouts_of(IDS[9 - first_share :] if rank == 0 else IDS[: 9 - first_share])
    rewards = [[r.rollout_id.prompt_ordinal + 0.1, r.rollout_id.sample / 3] for r in rollouts]
    infos = gather_rollout_infos(zip(rollouts, [""] * len(rollouts), rewards, strict=True))
    sequences = Groups(None, infos, None, None, None).sequences
    pairs = list(zip(sequences, rank_of, strict=True))
    plan = [[[[sequence for sequence, receiver in pairs if receiver == other]] for other in (0, 1)]]
    streams = {"taught": 3.0 * pack(all_branches(rollouts)).sample_logprobs}
    batch = exchange_rollouts(rollouts, plan, streams, TaughtBatch)
    return infos, batch, gather_to_rollouts(batch, batch.tokens[batch.last_token_index], 9)


ROLLOUT_OF = [0, 1, 2, 2, 3, 4, 5, 5, 6, 7, 8, 8]
SOME = [-1, 1, 0, -1, 0, 0, -1, 1, 1, -1, 0, 1]


@pytest.mark.parametrize("rank_of", [[1] * 12, SOME])
@pytest.mark.parametrize("first_share", [0, 4])
def test_branches_are_sequences_that_share_a_rollout_and_its_rewards(two_ranks, first_share, rank_of):
    """Any rank or none trains on a branch, with all streams, even a fork's; results are summed by rollout.

    Every rank knows all rollouts' numbers and exact rewards, in id order, even if the rank holds none. Pitfall 53.
    """
    branches = all_branches(rollouts_of(IDS))
    ids = [branch.rollout_id for branch in branches]
    sums = [0] * 9
    for branch, i, receiver in zip(branches, ROLLOUT_OF, rank_of, strict=True):
        sums[i] += int(branch.tokens[-1]) * (receiver >= 0)
    answers = two_ranks.run(exchange_branches, first_share, rank_of)
    for rank, (infos, batch, lasts) in enumerate(answers):
        assert [info.id for info in infos] == [RolloutId(p, s) for p, s in IDS]
        assert [info.is_truncated for info in infos] == [s == 2 for _, s in IDS]
        assert [info.rewards for info in infos] == [[p + 0.1, s / 3] for p, s in IDS]
        assert [info.num_loss_tokens for info in infos] == [1 + s for _, s in IDS]
        sequences = [sequence for info in infos for sequence in info.sequences]
        assert [sequence.id for sequence in sequences] == ids
        own = [i for i, receiver in enumerate(rank_of) if receiver == rank]
        assert batch.rollout_index.tolist() == [ROLLOUT_OF[i] for i in own]
        expected = pack([branches[i] for i in own])
        assert [one[:6] for one in batch.sequences] == [one[:6] for one in expected.sequences]
        for name, stream in expected._per_token_tensors().items():
            # This compares dtypes too.
            torch.testing.assert_close(getattr(batch, name), stream, rtol=0, atol=0)
        cut_off = [(3, 2, 1), (7, 2, 1)]
        assert batch.is_truncated.tolist() == [ids[i] in cut_off for i in own]
        assert torch.equal(batch.taught, 3.0 * batch.sample_logprobs)
        assert lasts.tolist() == sums


def shared_prompts(rank, changed, has_branches=False):
    """Return what two rollouts of a prompt share after an exchange; one token of the second rollout is changed."""
    first, (second,) = make_rollout(7, 2), make_rollout(7, 2).branches
    second.tokens[changed] += 1
    second = dataclasses.replace(second, rollout_id=RolloutId(7, 5))
    rollouts = [first, dataclasses.replace(first, branches=(second,))]
    if has_branches:
        rollouts = list(map(in_two_branches, rollouts))
    batch = exchange_rollouts(rollouts, [[[list(pack(all_branches(rollouts)).sequences)]]])
    return [(sequence.parent, sequence.num_shared_tokens) for sequence in batch.layout().sequences]


def test_the_first_branches_of_a_prompts_rollouts_share_it_and_others_share_nothing(one_rank):
    """A later branch's prompt, here of equal length, is not shared."""
    assert one_rank.run(shared_prompts, 7) == [[(None, 0), (0, 7)]]
    assert one_rank.run(shared_prompts, 7, True) == [[(None, 0), (None, 0), (0, 7), (None, 0)]]
    with pytest.raises(AssertionError, match="begin differently"):
        one_rank.run(shared_prompts, 6)
