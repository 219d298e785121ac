"""Plans as pure functions of lengths and prompts: contents and cost of microbatches, balance of the ranks."""

import random

import pytest

from minirl.training.assignment import PromptPrefix, plan_microbatches, plan_updates
from minirl.training.loss_weights import minibatch_of


def random_groups(seed, *, has_prompts=True):
    """Lengths, their prompts, ranks and budget; rows shuffled. There may be zero rows, and budgets may be tight.

    Some prompts are longer than any completion, some of no token.
    """
    rng = random.Random(seed)
    prompts = []
    for ordinal in range(rng.choice([0, 1, 2, 9, 20])):
        prompt = PromptPrefix(ordinal, rng.choice([0, rng.randint(1, 8), rng.randint(1, 300)]))
        prompts += [prompt] * rng.randint(1, 9)
    rng.shuffle(prompts)
    lengths = [prompt.num_tokens + rng.randint(1, rng.choice([3, 200])) for prompt in prompts]
    longest = max(lengths, default=1)
    budget = rng.choice([longest, longest + 1, 2 * longest, 4096])
    return lengths, prompts if has_prompts else [], rng.choice([1, 2, 3, 8]), budget


with_and_without_prompts = pytest.mark.parametrize("has_prompts", [True, False])


def num_computed(sequences, lengths, prompts):
    """Tokens that a model computes for these sequences together: each prompt's once, and each completion's."""
    total = sum(lengths[i] for i in sequences)
    if prompts:
        total -= sum(prompts[i].num_tokens for i in sequences)
        total += sum(prompt.num_tokens for prompt in {prompts[i] for i in sequences})
    return total


def imbalance(loads):
    """How much more than the mean the fullest rank has."""
    return max(loads) * len(loads) / sum(loads) - 1


def assert_is_partition(plan, rows, lengths, prompts, max_tokens):
    """Every row is in one microbatch, of at most max_tokens computed; each rank has as many."""
    micros = [micro for rank in plan for micro in rank]
    assert sorted(row for micro in micros for row in micro) == list(rows)
    assert all(num_computed(micro, lengths, prompts) <= max_tokens for micro in micros)
    assert {len(rank) for rank in plan} == {len(plan[0])}


def test_no_more_microbatches_than_needed():
    """A budget that the lower bound can meet is met: 64 equal sequences of 4 to a microbatch."""
    plan = plan_microbatches([100] * 64, num_ranks=2, max_tokens=400)
    assert [[len(micro) for micro in rank] for rank in plan] == [[4] * 8] * 2


def test_fewer_sequences_than_ranks_gives_empty_microbatches():
    """Ranks without a sequence still get a microbatch, so that all of them reach the collective of backward.

    Pitfall 45.
    """
    plan = plan_microbatches([5, 7], num_ranks=4, max_tokens=10)
    assert sorted(plan) == [[[]], [[]], [[0]], [[1]]]
    assert plan_microbatches([], num_ranks=3, max_tokens=10) == [[], [], []]


def test_too_long_a_sequence_is_refused_with_the_flag():
    """The error has the length, the limit and the flag to raise."""
    with pytest.raises(ValueError, match=r"101 tokens.*--max-tokens-per-microbatch 100"):
        plan_microbatches([5, 101], num_ranks=2, max_tokens=100)


@with_and_without_prompts
@pytest.mark.parametrize("num_minibatches", [1, 3, 4])
def test_minibatches_cut_the_rows_in_their_order(num_minibatches, has_prompts):
    """Contiguous, nearly equal, all rows; the microbatches of each hold just its rows.

    A prompt that lies in two minibatches counts in each.
    """
    for seed in range(20):
        lengths, prompts, num_ranks, max_tokens = random_groups(seed, has_prompts=has_prompts)
        owner = minibatch_of(len(lengths), num_minibatches)
        minibatches = [(owner == i).nonzero()[:, 0].tolist() for i in range(num_minibatches)]
        plan = plan_updates(minibatches, lengths, prompts, num_ranks=num_ranks, max_tokens=max_tokens)
        assert [row for minibatch in minibatches for row in minibatch] == list(range(len(lengths)))
        sizes = [len(minibatch) for minibatch in minibatches]
        assert max(sizes) - min(sizes) <= 1
        for minibatch, ranks in zip(minibatches, plan.microbatches, strict=True):
            assert_is_partition(ranks, minibatch, lengths, prompts, max_tokens)


def test_rows_that_are_not_trained_on_are_in_no_microbatch():
    """Each minibatch is planned as if it were alone; one of which nothing is left has no microbatch on any rank."""
    for seed in range(20):
        lengths, prompts, num_ranks, max_tokens = random_groups(seed)
        how = dict(num_ranks=num_ranks, max_tokens=max_tokens)
        rng = random.Random(seed)
        trained = [[row for row in range(len(lengths)) if rng.random() < 0.5], []]
        trained.append([row for row in range(len(lengths)) if row not in trained[0] and rng.random() < 0.5])
        plan = plan_updates(trained, lengths, prompts, **how)
        for rows, ranks in zip(trained, plan.microbatches, strict=True):
            alone = plan_microbatches([lengths[row] for row in rows], [prompts[row] for row in rows], **how)
            assert ranks == [[[rows[i] for i in micro] for micro in rank] for rank in alone]
        assert plan.microbatches[1] == [[]] * num_ranks
        owned = [row for row, owner in enumerate(plan.rank_of) if owner is not None]
        assert owned == sorted(trained[0] + trained[2])
        for rank in range(num_ranks):
            rows = [row for row, owner in enumerate(plan.rank_of) if owner == rank]
            as_rows = [[[rows[i] for i in micro] for micro in minibatch] for minibatch in plan.of_rank(rank)]
            assert as_rows == [ranks[rank] for ranks in plan.microbatches]


# Groups whose rollouts have their prompt in common.


def loads_of(plan, lengths, prompts):
    """Computed tokens of each rank, microbatch by microbatch."""
    return [sum(num_computed(micro, lengths, prompts) for micro in rank) for rank in plan]


@with_and_without_prompts
def test_microbatches_compute_every_sequence_once_within_the_budget(has_prompts):
    """A partition into microbatches of up to max_tokens, the same number on each rank, the last one needed."""
    for seed in range(60):
        lengths, prompts, num_ranks, max_tokens = random_groups(seed, has_prompts=has_prompts)
        plan = plan_microbatches(lengths, prompts, num_ranks=num_ranks, max_tokens=max_tokens)
        assert_is_partition(plan, range(len(lengths)), lengths, prompts, max_tokens)
        assert len(plan) == num_ranks
        assert all(micro == sorted(micro) for rank in plan for micro in rank)
        assert bool(plan[0]) == bool(lengths)
        assert len(plan[0]) <= 1 or sum(lengths) > max_tokens, "one microbatch would have held everything"


def test_a_microbatch_may_hold_more_tokens_than_it_computes():
    """Eight rollouts of a prompt of 90 tokens and 10 own tokens are 170 tokens to compute, not 800."""
    lengths, prompts = [100] * 8, [PromptPrefix(3, 90)] * 8
    assert plan_microbatches(lengths, prompts, num_ranks=1, max_tokens=170) == [[list(range(8))]]
    assert len(plan_microbatches(lengths, prompts, num_ranks=1, max_tokens=169)[0]) == 2
    assert len(plan_microbatches(lengths, num_ranks=1, max_tokens=170)[0]) == 8


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_groups_of_one_size_stay_whole(num_ranks):
    """Where whole groups balance the ranks and fit the budget, no prompt is computed twice, however rows are mixed."""
    prompts = [PromptPrefix(i % 16, 50) for i in range(128)]
    plan = plan_microbatches([80] * 128, prompts, num_ranks=num_ranks, max_tokens=2 * (50 + 8 * 30))
    assert [len(rank) for rank in plan] == [16 // num_ranks // 2] * num_ranks
    for micro in (micro for rank in plan for micro in rank):
        assert (len(micro), len({prompts[i] for i in micro})) == (16, 2)


def test_a_group_too_long_for_its_share_is_spread_and_most_others_stay_whole():
    """One group of 8 x 100 beside eight of 8 x 10: its rollouts even out the ranks, the small groups mostly stay."""
    lengths = [120] * 8 + [12] * 64
    prompts = [PromptPrefix(0, 20)] * 8 + [PromptPrefix(1 + i // 8, 2) for i in range(64)]
    plan = plan_microbatches(lengths, prompts, num_ranks=4, max_tokens=4096)
    homes = [
        {r for r, rank in enumerate(plan) for micro in rank for i in micro if prompts[i].ordinal == o}
        for o in range(9)
    ]
    assert len(homes[0]) == 4
    assert sum(len(home) > 1 for home in homes[1:]) <= 4
    loads = loads_of(plan, lengths, prompts)
    assert max(loads) == min(loads)


def groups_of_a_step(rng, group_size):
    """512 rollouts with completions like those of a step, and prompts of 20 to 400 tokens."""
    prompts = [PromptPrefix(i, rng.randint(20, 400)) for i in range(512 // group_size)]
    prompts = [prompt for prompt in prompts for _ in range(group_size)]
    completions = [min(2048, 20 + int(rng.expovariate(1 / 280))) for _ in prompts]
    return [p.num_tokens + n for p, n in zip(prompts, completions, strict=True)], prompts


@pytest.mark.parametrize("max_tokens", [8192, 32768])
@pytest.mark.parametrize(("group_size", "limit", "cost"), [(1, 0.005, 1.0), (8, 0.03, 1.06)])
def test_eight_ranks_compute_nearly_equal_and_nearly_the_fewest_tokens(group_size, limit, cost, max_tokens):
    """512 rollouts: the fullest rank has at most 0.5 % more than the mean, 3 % with groups of 8, whose prompts are
    computed so seldom twice that all ranks together compute at most 6 % more than the fewest possible."""
    for seed in range(8):
        lengths, prompts = groups_of_a_step(random.Random(seed), group_size)
        given = prompts if group_size > 1 else ()
        plan = plan_microbatches(lengths, given, num_ranks=8, max_tokens=max_tokens)
        loads = loads_of(plan, lengths, prompts)
        assert imbalance(loads) <= limit
        fewest = num_computed(range(512), lengths, prompts)
        assert fewest <= sum(loads) <= cost * fewest
        assert group_size == 1 or sum(lengths) > 1.3 * fewest, "there was nothing to save"


@pytest.mark.parametrize("num_ranks", [1, 2, 8])
def test_prompts_longer_than_completions_are_still_computed_seldom(num_ranks):
    """Prompts of 1000 with completions of 1 to 50: a sixth of the tokens, and ranks a few % apart."""
    rng = random.Random(0)
    prompts = [PromptPrefix(i // 8, 1000) for i in range(512)]
    lengths = [1000 + rng.randint(1, 50) for _ in prompts]
    plan = plan_microbatches(lengths, prompts, num_ranks=num_ranks, max_tokens=8192)
    loads, fewest = loads_of(plan, lengths, prompts), num_computed(range(512), lengths, prompts)
    assert fewest * 6 < sum(lengths)
    assert sum(loads) <= 1.25 * fewest
    assert imbalance(loads) <= 0.05


@pytest.mark.parametrize("max_tokens", [1010, 1011, 1019, 1100])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_prompt_that_nearly_fills_a_microbatch_ends_in_a_plan(num_ranks, max_tokens):
    """Prompts of 1000 and 5 to 10 more tokens: room for one rollout of a group, or for a few."""
    prompts = [PromptPrefix(i // 24, 1000) for i in range(72)]
    lengths = [1005 + i % 6 for i in range(72)]
    plan = plan_microbatches(lengths, prompts, num_ranks=num_ranks, max_tokens=max_tokens)
    assert_is_partition(plan, range(len(lengths)), lengths, prompts, max_tokens)
    if max_tokens == 1010:  # 5 + 5 is all that goes together
        assert len(plan[0]) * num_ranks >= 66


def test_without_prompts_the_plan_is_longest_first_into_the_emptiest():
    """Over the ranks, then over a rank's microbatches; a prompt that nobody shares, or of no token, changes nothing."""
    for seed in range(20):
        lengths, _, num_ranks, _ = random_groups(seed)
        expected = [[] for _ in range(num_ranks)]
        for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
            min(expected, key=lambda rank: sum(lengths[j] for j in rank)).append(i)
        how = dict(num_ranks=num_ranks, max_tokens=max(1, sum(lengths)))
        plan = plan_microbatches(lengths, **how)
        assert plan == [[sorted(rank)] if lengths else [] for rank in expected]
        assert (
            plan_microbatches(lengths, [PromptPrefix(i, min(5, n)) for i, n in enumerate(lengths)], **how)
            == plan
        )
