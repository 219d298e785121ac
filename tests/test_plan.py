"""Microbatch plans depend only on lengths and prompts: contents and cost of microbatches, balance of the ranks."""

import random

import pytest

from minirl.errors import InputError
from minirl.rollouts import RolloutId
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import SequenceInfo, sequence_infos_from_lengths


def info(num_prompt_tokens, num_own, prompt, sample):
    return SequenceInfo(RolloutId(prompt, sample), num_prompt_tokens + num_own, num_prompt_tokens)


def query_lengths(sequences):
    """Count the tokens that a model computes for these sequences: each prompt once, and each completion."""
    own = sum(one.num_tokens - one.num_prompt_tokens for one in sequences)
    return own + sum(
        num_tokens for _, num_tokens in {(one.prompt_id, one.num_prompt_tokens) for one in sequences}
    )


@pytest.mark.parametrize("seed", range(60))
def test_each_sequence_is_in_exactly_one_microbatch(seed):
    """Microbatches compute at most max_tokens. All ranks have the same number of microbatches, or none without
    sequences.

    Ranks without a sequence therefore have empty microbatches (pitfall 45). Some prompts are longer than any
    completion, some are empty, and limits may be tight.
    """
    rng = random.Random(seed)
    num_ordinals = rng.choice([1, 2, 9, 20])
    sizes = [rng.choice([0, 3, rng.randint(1, 300)]) for _ in range(num_ordinals)]
    prompts = rng.choices(range(num_ordinals), k=rng.randint(0, 5 * num_ordinals))
    sequences = [info(sizes[prompt], rng.randint(1, 200), prompt, i) for i, prompt in enumerate(prompts)]
    longest = max((one.num_tokens for one in sequences), default=1)
    max_tokens, num_ranks = rng.choice([longest, 2 * longest, 4096]), rng.choice([1, 2, 3, 8])
    ranks = plan_microbatches(sequences, num_ranks=num_ranks, max_tokens=max_tokens)
    micros = [micro for rank in ranks for micro in rank]
    assert sorted(one for micro in micros for one in micro) == sorted(sequences)
    assert all(query_lengths(micro) <= max_tokens for micro in micros)
    assert [len(rank) for rank in ranks] == [len(ranks[0])] * num_ranks
    assert any(rank[-1] for rank in ranks) if sequences else not any(ranks)


def test_a_microbatch_may_hold_more_tokens_than_it_computes_but_no_sequence_may():
    """Eight rollouts of 10 tokens that share a prompt of 90 tokens take 170 tokens to compute, not 800."""
    shared = [info(90, 10, 3, sample) for sample in range(8)]
    assert plan_microbatches(shared, num_ranks=1, max_tokens=170) == [[shared]]
    assert len(plan_microbatches(shared, num_ranks=1, max_tokens=169)[0]) == 2
    with pytest.raises(InputError, match=r"--max-tokens-per-microbatch 99: .* 100 tokens"):
        plan_microbatches(sequence_infos_from_lengths([100] * 8), num_ranks=1, max_tokens=99)


def test_eight_ranks_compute_nearly_equal_and_nearly_the_fewest_tokens():
    """Groups of 8 with prompts of 20 to 400 tokens: the fullest rank has at most 3 % more than the mean.

    Prompts are rarely computed twice: in total, the ranks compute at most 6 % more tokens than the minimum.
    """
    rng = random.Random(0)
    sequences = [
        info(20 + 47 * (i // 8) % 380, min(2048, 20 + int(rng.expovariate(1 / 280))), i // 8, i)
        for i in range(512)
    ]
    plan = plan_microbatches(sequences, num_ranks=8, max_tokens=8192)
    loads = [sum(map(query_lengths, rank)) for rank in plan]
    assert max(loads) <= 1.03 * sum(loads) / 8
    assert sum(loads) <= 1.06 * query_lengths(sequences)
