"""Plans as pure functions of lengths, and a batch against loops over its sequences."""

import dataclasses
import importlib.util
import math
import random
import sys
from pathlib import Path

import pytest
import torch

from minirl import batch as batching
from minirl.batch import Batch, Rollout, RolloutId, plan_microbatches, plan_updates

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
        elif field.name != "lengths":
            fields[field.name] = torch.rand(total, generator=generator)
    return Batch(tuple(lengths), **fields)


def tensor_fields(batch):
    return {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch) if f.name != "lengths"}


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
    """With a line for `values` added to Batch, select and to carry it: no other line knows the streams by name."""
    source = Path(batching.__file__).read_text()
    line = "    ref_logprobs: Tensor = _later()"
    assert source.count(line) == 1
    (tmp_path / "batch_with_values.py").write_text(source.replace(line, f"    values: Tensor = _later()\n{line}"))
    spec = importlib.util.spec_from_file_location("batch_with_values", tmp_path / "batch_with_values.py")
    module = sys.modules["batch_with_values"] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        old = make_batch([2, 1])
        batch = module.Batch(old.lengths, **tensor_fields(old), values=torch.tensor([1.0, 2.0, 3.0]))
        assert batch.select([1, 0]).values.tolist() == [3.0, 1.0, 2.0]
        assert batch.to(torch.device("meta")).values.device.type == "meta"
    finally:
        del sys.modules["batch_with_values"]


def test_completion_is_what_follows_the_prompt():
    """The stop token included."""
    tokens = torch.tensor([5, 6, 7, 8, 0])
    mask = torch.tensor([False, False, True, True, True])
    rollout = Rollout(tokens, mask, torch.zeros(5), torch.zeros(5, dtype=torch.int32), 2, RolloutId(0, 0), "stop")
    assert rollout.completion == [7, 8, 0]
