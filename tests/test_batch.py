"""Plans as pure functions of lengths, a batch against loops over its sequences, and what ranks know of each other's."""

import dataclasses
import importlib.util
import math
import random
import sys
from pathlib import Path

import pytest
import torch

from minirl import batch as batching
from minirl.batch import (
    Batch,
    Rollout,
    RolloutId,
    RolloutTable,
    exchange,
    gather_by_row,
    gather_table,
)
from minirl.plan import Prompt, plan_microbatches, plan_updates

CPU = torch.device("cpu")


def random_case(seed):
    """Lengths, ranks and budget; among them few sequences, tight budgets and one that fits exactly."""
    rng = random.Random(seed)
    lengths = [rng.choice([rng.randint(1, 8), rng.randint(1, 300)]) for _ in range(rng.choice([0, 1, 3, 17, 64]))]
    longest = max(lengths, default=1)
    return lengths, rng.choice([1, 2, 3, 8]), rng.choice([longest, longest + 1, 2 * longest, 4096])


def geometric_lengths(rng, count):
    """Lengths like those of a step: 20 + geometric of mean 280, at most 2048."""
    return [min(2048, 20 + int(math.log(1 - rng.random()) / math.log(1 - 1 / 280))) for _ in range(count)]


def imbalance(lengths, plan):
    """How much more than the mean the fullest rank has."""
    loads = [sum(lengths[i] for micro in rank for i in micro) for rank in plan]
    return max(loads) * len(loads) / sum(loads) - 1


@pytest.mark.parametrize("seed", range(60))
def test_microbatches_hold_every_sequence_once_within_the_budget(seed):
    """Any lengths: a partition, at most max_tokens each, as many microbatches on each rank, and at least one."""
    lengths, num_ranks, max_tokens = random_case(seed)
    plan = plan_microbatches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    assert sorted(i for rank in plan for micro in rank for i in micro) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in micro) <= max_tokens for rank in plan for micro in rank)
    assert len(plan) == num_ranks
    assert {len(rank) for rank in plan} == {len(plan[0])}
    assert len(plan[0]) >= 1


@pytest.mark.parametrize("seed", range(20))
def test_microbatch_plan_is_a_pure_function(seed):
    """Called again, with other random state and a tuple for a list, it says the same and leaves its input alone."""
    lengths, num_ranks, max_tokens = random_case(seed)
    before = list(lengths)
    first = plan_microbatches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)
    random.seed(seed)
    torch.manual_seed(seed)
    assert plan_microbatches(tuple(lengths), num_ranks=num_ranks, max_tokens=max_tokens) == first
    assert lengths == before


@pytest.mark.parametrize(("num_ranks", "mean_limit", "limit"), [(2, 0.002, 0.01), (8, 0.01, 0.05)])
@pytest.mark.parametrize("max_tokens", [2048, 4096, 32768])
def test_ranks_get_nearly_equal_tokens(num_ranks, mean_limit, limit, max_tokens):
    """64 sequences of geometric length: within a few percent in every draw, under 1 % on average, at any budget."""
    rng = random.Random(0)
    draws = []
    for _ in range(20):
        lengths = geometric_lengths(rng, 64)
        draws.append(imbalance(lengths, plan_microbatches(lengths, num_ranks=num_ranks, max_tokens=max_tokens)))
    assert max(draws) < limit
    assert sum(draws) / len(draws) < mean_limit


def test_no_more_microbatches_than_needed():
    """A budget that the lower bound can meet is met: 64 equal sequences of 4 to a microbatch."""
    plan = plan_microbatches([100] * 64, num_ranks=2, max_tokens=400)
    assert [[len(micro) for micro in rank] for rank in plan] == [[4] * 8] * 2


def test_fewer_sequences_than_ranks_gives_empty_microbatches():
    """Ranks without a sequence still get a microbatch, so that all of them reach the collective of backward."""
    plan = plan_microbatches([5, 7], num_ranks=4, max_tokens=10)
    assert sorted(plan) == [[[]], [[]], [[0]], [[1]]]
    assert plan_microbatches([], num_ranks=3, max_tokens=10) == [[[]], [[]], [[]]]


def test_too_long_a_sequence_is_refused_with_the_flag():
    """The error has the length, the limit and the flag to raise."""
    with pytest.raises(ValueError, match=r"101 tokens.*--max-tokens-per-microbatch 100"):
        plan_microbatches([5, 101], num_ranks=2, max_tokens=100)
    with pytest.raises(ValueError, match="--max-tokens-per-microbatch"):
        plan_updates([5, 101], num_minibatches=2, num_ranks=2, max_tokens=100)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_minibatches", [1, 3, 4])
def test_minibatches_cut_the_rows_in_their_order(seed, num_minibatches):
    """Contiguous, nearly equal, all rows; the microbatches of each hold just its rows."""
    lengths, num_ranks, max_tokens = random_case(seed)
    plan = plan_updates(lengths, num_minibatches=num_minibatches, num_ranks=num_ranks, max_tokens=max_tokens)
    assert [row for minibatch in plan.minibatches for row in minibatch] == list(range(len(lengths)))
    sizes = [len(minibatch) for minibatch in plan.minibatches]
    assert len(sizes) == num_minibatches
    assert max(sizes) - min(sizes) <= 1
    for minibatch, ranks in zip(plan.minibatches, plan.microbatches, strict=True):
        assert sorted(row for rank in ranks for micro in rank for row in micro) == minibatch
        assert all(sum(lengths[row] for row in micro) <= max_tokens for rank in ranks for micro in rank)


@pytest.mark.parametrize("seed", range(20))
def test_places_of_a_rank_lead_to_the_rows_of_the_plan(seed):
    """A rank's batch has its rows in table order; of_rank's places in it are the plan's rows, none missing."""
    lengths, num_ranks, max_tokens = random_case(seed)
    plan = plan_updates(lengths, num_minibatches=3, num_ranks=num_ranks, max_tokens=max_tokens)
    assert len(plan.rank_of) == len(lengths)
    for rank in range(num_ranks):
        rows = [row for row, owner in enumerate(plan.rank_of) if owner == rank]
        places = plan.of_rank(rank)
        as_rows = [[[rows[place] for place in micro] for micro in minibatch] for minibatch in places]
        assert as_rows == [ranks[rank] for ranks in plan.microbatches]
        assert sorted(p for minibatch in places for micro in minibatch for p in micro) == list(range(len(rows)))


def make_batch(lengths, seed=0):
    """A batch with every declared field set to different numbers."""
    generator = torch.Generator().manual_seed(seed)
    total, fields = sum(lengths), {}
    for field in dataclasses.fields(Batch):
        if field.name == "row":
            fields["row"] = torch.arange(len(lengths)) * 10
        elif field.name == "loss_mask":
            fields["loss_mask"] = torch.rand(total, generator=generator) < 0.5
        elif field.name == "tokens":
            fields["tokens"] = torch.randint(1, 1000, (total,), generator=generator)
        elif field.name == "prompts":
            fields["prompts"] = tuple(Prompt(i, 1) for i in range(len(lengths)))
        elif field.name != "lengths":
            fields[field.name] = torch.rand(total, generator=generator)
    return Batch(tuple(lengths), **fields)


def tensor_fields(batch):
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name not in ("lengths", "prompts")}


def sequences_of(batch, name):
    """The field's values sequence by sequence."""
    if name == "row":
        return [[value] for value in batch.row.tolist()]
    values, parts, start = getattr(batch, name).tolist(), [], 0
    for length in batch.lengths:
        parts.append(values[start : start + length])
        start += length
    return parts


@pytest.mark.parametrize("chosen", [[], [0], [3, 1], [4, 3, 2, 1, 0], [2, 2], [1]])
def test_select_equals_a_loop_over_sequences(chosen):
    """Every field of the chosen sequences, in the order asked for, with its dtype; also none and a one-token one."""
    batch = make_batch([3, 1, 5, 2, 4])
    part = batch.select(chosen)
    assert part.lengths == tuple(batch.lengths[i] for i in chosen)
    assert part.prompts == tuple(batch.prompts[i] for i in chosen)
    for name, value in tensor_fields(batch).items():
        wanted = [x for i in chosen for x in sequences_of(batch, name)[i]]
        assert getattr(part, name).tolist() == wanted
        assert getattr(part, name).dtype == value.dtype


def test_select_of_a_batch_without_sequences_is_empty():
    """A rank that got no rollouts can select its empty microbatch."""
    part = make_batch([]).select([])
    assert part.lengths == ()
    assert all(value.numel() == 0 for value in tensor_fields(part).values())


def test_a_field_not_made_yet_stays_none():
    """Select and to leave None alone, and replace sets one field without touching the rest or the original."""
    full = make_batch([2, 3])
    batch = Batch(full.lengths, full.tokens, full.loss_mask, full.sample_logprobs)
    for same in (batch.select([1]), batch.to(CPU)):
        assert same.advantages is None
        assert same.row is None
    changed = batch.replace(advantages=full.advantages)
    assert changed.advantages is full.advantages
    assert changed.tokens is batch.tokens
    assert batch.advantages is None


@pytest.mark.parametrize("chosen", [[], [1], [2, 0], [0, 1, 2]])
def test_token_index_says_where_the_tokens_are(chosen):
    """Writing a selection's stream back at its index restores the batch's stream."""
    batch = make_batch([3, 1, 4])
    index = batch.token_index(chosen)
    assert index.dtype == torch.int64
    assert index.tolist() == [t for i in chosen for t in range(8) if [0, 0, 0, 1, 2, 2, 2, 2][t] == i]
    assert torch.equal(batch.tokens[index], batch.select(chosen).tokens)


@pytest.mark.parametrize("lengths", [[3, 1, 4], []])
def test_spread_repeats_within_the_loss_mask(lengths):
    """Each sequence's value at its loss tokens and exactly 0 elsewhere, even for values that are not finite."""
    batch = make_batch(lengths)
    batch = batch.replace(loss_mask=torch.tensor([False, True, True, False, False, True, False, True])[: sum(lengths)])
    values = torch.tensor([1.5, math.nan, math.inf])[: len(lengths)]
    owner = [i for i, length in enumerate(lengths) for _ in range(length)]
    wanted = [float(values[i]) if chosen else 0.0 for i, chosen in zip(owner, batch.loss_mask.tolist(), strict=True)]
    assert batch.spread(values).tolist() == wanted


def test_to_moves_every_tensor():
    """Every field is on the device, lengths unchanged."""
    batch = make_batch([2, 3])
    moved = batch.to(torch.device("meta"))
    assert {value.device.type for value in tensor_fields(moved).values()} == {"meta"}
    assert moved.lengths == batch.lengths


def test_layout_has_the_lengths_of_the_batch():
    """Positions restart at each sequence."""
    assert make_batch([3, 1, 2]).layout().positions.tolist() == [0, 1, 2, 0, 0, 1]


def test_a_new_stream_is_one_more_line(tmp_path):
    """With a line for `teacher` added to Batch, select and to carry it: no other line knows the streams by name."""
    source = Path(batching.__file__).read_text()
    line = "    ref_logprobs: Tensor = _later()"
    assert source.count(line) == 1
    (tmp_path / "batch_with_teacher.py").write_text(source.replace(line, f"    teacher: Tensor = _later()\n{line}"))
    spec = importlib.util.spec_from_file_location("batch_with_teacher", tmp_path / "batch_with_teacher.py")
    module = sys.modules["batch_with_teacher"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        old = make_batch([2, 1])
        batch = module.Batch(old.lengths, **tensor_fields(old), teacher=torch.tensor([1.0, 2.0, 3.0]))
        assert batch.select([1, 0]).teacher.tolist() == [3.0, 1.0, 2.0]
        assert batch.to(torch.device("meta")).teacher.device.type == "meta"
    finally:
        del sys.modules["batch_with_teacher"]


def test_completion_is_what_follows_the_prompt():
    """The stop token included."""
    tokens = torch.tensor([5, 6, 7, 8, 0])
    mask = torch.tensor([False, False, True, True, True])
    rollout = Rollout(tokens, mask, torch.zeros(5), torch.zeros(5, dtype=torch.int32), 2, RolloutId(0, 0), "stop")
    assert rollout.completion == [7, 8, 0]


# Between ranks.

IDS = [(p, s) for p in (3, 7, 8) for s in range(3)]  # of the nine rollouts below, in the order of the table


def make_rollout(prompt, sample):
    """A rollout whose every number follows from its id; the length limit cut off the last of each group."""
    num_prompt, num_sampled = prompt, 1 + sample
    mask = torch.arange(num_prompt + num_sampled) >= num_prompt
    tokens = torch.arange(len(mask)) + 100 * prompt + 10 * sample * mask
    end = "length" if sample == 2 else "stop"
    return Rollout(tokens, mask, -mask.float(), mask.int(), num_prompt, RolloutId(prompt, sample), end)


def own_rollouts(rank, first_share):
    """This rank's of the nine, last first; rank 0 has `first_share` of them."""
    ids = IDS[::-1][:first_share] if rank == 0 else IDS[::-1][first_share:]
    return [make_rollout(*i) for i in ids]


def own_table(rank, first_share):
    rollouts = own_rollouts(rank, first_share)
    rewards = [[r.rollout_id.prompt + 0.1, r.rollout_id.sample / 3] for r in rollouts]
    return gather_table(rollouts, torch.tensor(rewards, dtype=torch.float64).view(-1, 2))


@pytest.mark.parametrize("first_share", [0, 4, 9])
def test_every_rank_gets_the_table_of_all_rollouts_in_order_of_their_ids(two_ranks, first_share):
    """Lengths, ends and every reward to its last bit, whoever holds the rollouts, if any. Pitfall 53."""
    for table in two_ranks.run(own_table, first_share):
        assert list(zip(table.prompt.tolist(), table.sample.tolist(), strict=True)) == IDS
        assert table.num_tokens.tolist() == [p + 1 + s for p, s in IDS]
        assert table.num_loss_tokens.tolist() == [1 + s for _, s in IDS]
        assert table.is_truncated.tolist() == [s == 2 for _, s in IDS]
        assert table.rewards.tolist() == [[p + 0.1, s / 3] for p, s in IDS]
        dtypes = {f.name: getattr(table, f.name).dtype for f in dataclasses.fields(table)}
        assert (dtypes.pop("rewards"), dtypes.pop("is_truncated")) == (torch.float64, torch.bool)
        assert set(dtypes.values()) == {torch.int64}


@pytest.mark.parametrize("rows", [[], [4], [8, 0, 3]])
def test_a_table_selects_rows_of_every_field_and_finds_them_by_rollout(one_rank, rows):
    """In the order asked for; the rows of rollouts are those of the selection, not of the whole table."""
    (table,) = one_rank.run(own_table, 9)
    part = table.select(rows)
    for field in dataclasses.fields(RolloutTable):
        assert getattr(part, field.name).tolist() == [getattr(table, field.name)[i].tolist() for i in rows]
    rollouts = [make_rollout(*IDS[row]) for row in rows]
    assert table.rows_of(rollouts) == rows
    assert part.rows_of(rollouts[::-1]) == list(range(len(rows)))[::-1]
    with pytest.raises(KeyError):
        part.rows_of([make_rollout(5, 0)])


def own_numbers(rank, rank_of):
    """Each sequence's last token, sent back to its row of the table, after an exchange."""
    rollouts, table = own_rollouts(rank, 4), own_table(rank, 4)
    batch = exchange(rollouts, table, rank_of)
    last = [part[-1] for part in sequences_of(batch, "tokens")]
    return gather_by_row(batch, torch.tensor(last, dtype=torch.float32), len(IDS))


@pytest.mark.parametrize("rank_of", [[0, 1, 1, 0, 1, 0, 0, 1, 0], [1] * 9])
def test_numbers_per_sequence_come_back_in_table_order_on_every_rank(two_ranks, rank_of):
    """Wherever the rollouts are trained on, also where a rank has none; in double precision, none counted twice."""
    for numbers in two_ranks.run(own_numbers, rank_of):
        assert numbers.dtype == torch.float64
        assert numbers.tolist() == [100 * p + 10 * s + p + s for p, s in IDS]
