"""Truncated sampling: the logprob comes from the sampled distribution, in the engine and in training."""

import dataclasses
import itertools
import math

import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

import train_grpo
from minirl.errors import InputError
from minirl.generation.sampling import sample, truncate
from minirl.kernels.fused_head import FusedLogprobs
from minirl.model import batch_invariance, device_kernels
from minirl.model.attention import PackedLayout
from minirl.rollouts import KeptIds
from minirl.run.config import check_shared
from minirl.training.batch import pack
from minirl.training.distillation import score_with_teacher
from minirl.training.scoring import ChunkedLogprobs, score, score_batch
from minirl.truncation import MAX_KEPT, Truncation
from support.engines import cached_model, finish, make_engine, make_prompt, make_request, mixed_requests, run
from support.interpreter import mend_interpreter, needs_interpreter
from support.marks import slow
from support.resuming import digests, interrupted_copy
from support.scripts import read_metrics, run_in_pool

CPU = torch.device("cpu")
WORKED = torch.tensor([[0.05, 0.5, 0.15, 0.3]]).log()
GRID = [Truncation(k, p, m) for k in (1, 5, 40, 256) for p in (0.3, 0.9, 1.0) for m in (0.0, 0.1)]
MIXED = Truncation(20, 0.9, 0.05)


def columns(truncations):
    """The argument of `sample` for these requests."""
    top_k, top_p, min_p = zip(*truncations, strict=True)
    doubles = (torch.tensor(column, dtype=torch.float64) for column in (top_p, min_p))
    return torch.tensor(top_k), *doubles


def truncated(logits, truncations):
    """The kept ids of each row, and the logprobs of the truncated distributions."""
    masked = logits.clone()
    ids = truncate(masked, torch.ones(len(logits)), *columns(truncations))
    return [row[row >= 0].tolist() for row in ids], masked.log_softmax(-1)


@pytest.mark.parametrize(
    ("truncation", "kept", "logprob"),
    [
        (Truncation(4, 0.8), [1, 3], -0.470004),
        (Truncation(3), [1, 3, 2], -0.641854),
        (Truncation(4, 1.0, 0.2), [1, 3, 2], -0.641854),
    ],
)
def test_truncated_distributions_have_the_worked_numbers(truncation, kept, logprob):
    """p = (0.5, 0.3, 0.15, 0.05): the smallest set with 0.8 of it, the three likeliest, 0.2 times the likeliest."""
    ids, logprobs = truncated(WORKED, [truncation])
    assert ids == [kept]
    assert logprobs[0, 1].item() == pytest.approx(logprob, abs=1e-6)
    assert logprobs[0, kept].exp().sum().item() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("vocab", [30, 3000])
def test_the_kept_tokens_are_those_of_transformers(vocab):
    """Each of its three rules and all combinations, flat and peaked; the rows of one batch have different rules."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (
        torch.randn(len(GRID), vocab, generator=generator)
        * torch.tensor([0.5, 3.0] * (len(GRID) // 2))[:, None]
    )
    ids, logprobs = truncated(logits, GRID)
    for row, (top_k, top_p, min_p) in enumerate(GRID):
        expected = TopKLogitsWarper(top_k)(None, logits[row, None])
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        if min_p:
            expected = MinPLogitsWarper(min_p)(None, expected)
        assert sorted(ids[row]) == expected[0].isfinite().nonzero()[:, 0].tolist(), GRID[row]
        torch.testing.assert_close(logprobs[row], expected[0].log_softmax(-1), atol=1e-6, rtol=0)


def test_sampled_frequencies_match_the_truncated_probabilities():
    """Forty thousand draws over distinct keys pass a chi-square test, and none is outside of the kept tokens."""
    draws = 40_000
    generator = torch.Generator().manual_seed(3)
    hidden, head = torch.randn(1, 8, generator=generator), torch.randn(30, 8, generator=generator)
    tokens, logprobs, kept = sample(
        hidden.expand(draws, -1),
        head,
        keys=torch.arange(draws),
        positions=torch.full((draws,), 77),
        temperature=torch.full((draws,), 1.5),
        truncation=columns([Truncation(12, 0.95, 0.02)] * draws),
    )
    allowed = kept[0][kept[0] >= 0].tolist()
    assert 6 <= len(allowed) < 12
    expected = torch.softmax((hidden.double() @ head.double().T)[0, allowed] / 1.5, -1) * draws
    counts = torch.bincount(tokens, minlength=30)
    assert int(counts[allowed].sum()) == draws
    chi_square = ((counts[allowed] - expected) ** 2 / expected).sum().item()
    assert 1 < chi_square < 33
    assert (logprobs[tokens == allowed[0]][0].exp() * draws - expected[0]).abs() < 1


def sampling_rows(dtype):
    generator = torch.Generator().manual_seed(2)
    return {
        "hidden": torch.randn(24, 64, generator=generator).to(dtype),
        "keys": torch.arange(24) << 40,
        "positions": torch.randint(0, 1000, (24,), generator=generator),
        "temperature": torch.tensor([1.0, 0.7, 0.0, 1.3, 0.25, 1.0] * 4),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [48, 2049])
def test_a_truncated_row_is_sampled_alike_in_any_batch_and_changes_no_other_row(dtype, vocab):
    """Alone, among rows that keep less or more, among rows without truncation and greedy ones: the same bits.

    Those without are sampled from the whole vocabulary, as if there were no other rows.
    """
    rows = sampling_rows(dtype)
    head = torch.randn(vocab, 64, generator=torch.Generator().manual_seed(4)).div(4).to(dtype)
    truncations = [Truncation(), *GRID[1:]]
    everything = sample(head=head, **rows, truncation=columns(truncations))
    whole_tokens, whole_logprobs, none = sample(head=head, **rows)
    assert none.shape == (24, 0)
    is_whole = (rows["temperature"] == 0) | (torch.arange(24) == 0)
    assert torch.equal(everything[0][is_whole], whole_tokens[is_whole])
    assert torch.equal(everything[1][is_whole], whole_logprobs[is_whole])
    counts = (everything[2] >= 0).sum(1)
    assert torch.equal(counts == 0, is_whole)
    assert counts.max() == min(vocab, MAX_KEPT)
    exact = batch_invariance.is_batch_invariant([(64, vocab)], dtype, CPU, is_head=True)
    for chosen in (torch.arange(24).flip(0), *torch.arange(24).split(1), *torch.arange(24).split(3)):
        part = {name: x[chosen] for name, x in rows.items()}
        got = sample(head=head, **part, truncation=columns([truncations[i] for i in chosen]))
        assert torch.equal(got[0], everything[0][chosen])
        assert torch.equal(got[2], everything[2][chosen])
        assert (got[1] - everything[1][chosen]).abs().max() <= (0 if exact else 1e-5)


def test_a_row_of_nan_gives_a_token_with_a_nan_logprob():
    """Broken weights reach the caller as a NaN, not as an index out of range."""
    rows = sampling_rows(torch.float32)
    rows["hidden"][:2] = torch.nan
    tokens, logprobs, _ = sample(head=torch.ones(300, 64), **rows, truncation=columns([MIXED] * 24))
    assert logprobs.isnan().tolist() == [True] * 2 + [False] * 22
    assert ((tokens >= 0) & (tokens < 300)).all()


@needs_interpreter
def test_truncated_sampling_beside_the_fused_sampler_equals_the_portable_one(monkeypatch):
    """With the choice of CUDA, on the CPU: tokens, kept tokens and logprobs, also of rows without truncation."""
    rows = sampling_rows(torch.float32)
    head = torch.randn(700, 64, generator=torch.Generator().manual_seed(4)).div(4)
    truncation = columns([Truncation(), *GRID[1:]])
    expected = sample(head=head, **rows, truncation=truncation)
    mend_interpreter(monkeypatch)
    monkeypatch.setattr(device_kernels, "are_used", lambda device: True)
    tokens, logprobs, kept = sample(head=head, **rows, truncation=truncation)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(kept, expected[2])
    torch.testing.assert_close(logprobs, expected[1], atol=2e-6, rtol=0)


@pytest.mark.parametrize(("vocab", "tile"), [(37, 2048), (37, 16), (2049, 2048), (4500, 2048)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_sampled_logprobs_equal_scored_ones_among_the_kept_tokens(vocab, tile, dtype):
    """In any chunks of tokens, beside rows that keep more: bit for bit what training computes."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(100, 64, generator=generator).to(dtype)
    head = torch.randn(vocab, 64, generator=generator).div(4).to(dtype)
    exact = batch_invariance.is_batch_invariant([(64, vocab)], dtype, CPU, is_head=True)
    for rows, temperature in ((1, 1.0), (17, 1.3), (100, 0.7)):
        noise = {"keys": torch.arange(rows), "positions": torch.arange(rows)}
        heat = torch.full((rows,), temperature)
        truncation = columns([GRID[i % len(GRID)] for i in range(rows)])
        tokens, sampled, kept = sample(
            hidden[:rows], head, **noise, temperature=heat, truncation=truncation, vocab_chunk=tile
        )
        for chunk in (1000, 7):
            width = int((kept >= 0).sum(1).max())
            kept_ids = kept[:, :width].long()
            scored, _ = ChunkedLogprobs.apply(hidden[:rows], head, tokens, temperature, chunk, tile, kept_ids)
            assert (scored - sampled).abs().max() <= (0 if exact else 1e-5), (rows, chunk)


def masked_reference(hidden, head, targets, kept_lists):
    """Logprobs and entropies by a softmax over the kept tokens alone, row by row."""
    results = []
    for row, target, kept in zip(hidden, targets.tolist(), kept_lists, strict=True):
        logprobs = (head[kept] @ row / 0.7).log_softmax(-1)
        results.append(torch.stack([logprobs[kept.index(target)], -(logprobs.exp() * logprobs).sum()]))
    return torch.stack(results, 1)


@pytest.mark.parametrize("is_fused", [False, pytest.param(True, marks=needs_interpreter)])
def test_gradients_of_truncated_logprobs_and_entropies_are_those_of_a_softmax_over_kept_tokens(
    is_fused, monkeypatch
):
    """Of states and head, in fp64, over several chunks, some without any kept token; and of rows that keep all."""
    if is_fused:
        mend_interpreter(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    hidden, head = (
        torch.randn(n, 16, generator=generator, dtype=torch.float64).requires_grad_() for n in (9, 50)
    )
    rules = [Truncation(k, 0.9) for k in (7, 7, 3, 1, 7, 5, 7, 2)]
    lists, _ = truncated((hidden @ head.T).detach().float()[:8] / 0.7, rules)
    kept_ids = torch.tensor([kept + [-1] * (7 - len(kept)) for kept in [*lists, []]])
    lists.append(list(range(50)))
    targets = torch.tensor([kept[-1] for kept in lists])
    weights = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    expected = masked_reference(hidden, head, targets, lists)
    if is_fused:
        got = torch.stack(FusedLogprobs.apply(hidden, head, targets, 0.7, 16, kept_ids))
    else:
        got = torch.stack(ChunkedLogprobs.apply(hidden, head, targets, 0.7, 4, 16, kept_ids))
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0)
    gradients = [
        torch.autograd.grad((outputs * weights).sum(), (hidden, head)) for outputs in (got, expected)
    ]
    for gradient, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=0)


def test_kept_ids_are_cut_joined_and_laid_out_as_lists():
    lists = [[5, 3], [], [7], [1, 2, 9], []]
    kept = KeptIds(
        torch.tensor(list(map(len, lists)), dtype=torch.int32),
        torch.tensor(list(itertools.chain(*lists)), dtype=torch.int32),
    )

    def as_lists(kept):
        return [part.tolist() for part in kept.ids.split(kept.counts.tolist())]

    assert as_lists(kept[1:4]) == lists[1:4]
    assert as_lists(kept[3:]) == lists[3:]
    assert as_lists(kept[:0]) == []
    assert as_lists(KeptIds.join([kept[:2], KeptIds.none(2), kept[2:]])) == [*lists[:2], [], [], *lists[2:]]
    assert kept.rows().tolist() == [[5, 3, -1], [-1] * 3, [7, -1, -1], [1, 2, 9], [-1] * 3]
    assert KeptIds.none(2).rows().shape == (2, 0)
    assert as_lists(KeptIds.of_rows(kept.rows(), kept.counts)) == lists


def truncated_requests():
    """Requests at two temperatures and with three truncations, one of them none."""
    requests = mixed_requests()
    rules = (MIXED, Truncation(), Truncation(5))
    return [
        dataclasses.replace(request, truncation=rules[i % 3], stop_ids=frozenset({3}))
        for i, request in enumerate(requests)
    ]


def all_of(rollout):
    kept = rollout.kept
    return [x.tolist() for x in (rollout.tokens, rollout.sample_logprobs, kept.counts, kept.ids)]


@pytest.mark.parametrize(
    "options",
    [
        {"max_running_requests": 3},
        {"cache_tokens": 600},
        {"async_decoding": True},
        {"async_decoding": True, "cuda_graphs": True, "max_running_requests": 5},
    ],
    ids=str,
)
def test_truncated_rollouts_do_not_depend_on_the_schedule(options):
    """One at a time or all together, preempted, read late or padded for graphs: tokens, logprobs and kept tokens."""
    model, requests = cached_model("full", torch.float32), truncated_requests()
    expected = {r.rollout_id: all_of(r) for r in run(make_engine(model), requests)}
    for request in requests[::5]:
        (alone,) = run(make_engine(model), [request])
        assert all_of(alone) == expected[request.rollout_id]
        num_sampled = int(alone.loss_mask.sum())
        assert int((alone.kept.counts > 0).sum()) == (num_sampled if request.truncation.top_k else 0)
    engine = make_engine(model, **options)
    assert {r.rollout_id: all_of(r) for r in run(engine, requests)} == expected
    assert engine.stats.preemptions > 0 or "cache_tokens" not in options


def test_a_rollout_in_parts_keeps_what_each_part_sampled_among():
    """Aborted and submitted again, and held for a further turn with appended tokens: scored as sampled, bit for bit."""
    model = cached_model("full", torch.float32)
    request = dataclasses.replace(make_request(make_prompt(20), stop_ids=frozenset()), truncation=MIXED)
    (whole,) = run(make_engine(model), [request])
    engine = make_engine(model)
    engine.submit([request])
    for _ in range(9):
        engine.step()
    (unfinished,) = engine.abort()
    (in_parts,) = run(make_engine(model), [unfinished])
    assert all_of(in_parts) == all_of(whole)

    engine.submit([dataclasses.replace(request, holds=True, max_new_tokens=6)])
    finish(engine, 1)
    engine.resume(request.rollout_id, [4, 5, 6], max_new_tokens=8)
    (rollout,) = finish(engine, 1)
    assert torch.equal(rollout.kept.counts > 0, rollout.loss_mask)
    layout = PackedLayout((len(rollout.tokens),), CPU)
    options = {"select": rollout.loss_mask, "temperature": 1.0, "kept": rollout.kept}
    logprobs, _ = score(model, rollout.tokens, layout, **options)
    assert (logprobs - rollout.sample_logprobs).abs().max() == 0


def in_turns(leaves_after, abort_after):
    """A rollout of four turns, the second and third truncated alike, whose request leaves the cache in between."""
    model = cached_model("full", torch.float32)
    request = make_request(make_prompt(20), stop_ids=frozenset(), max_new_tokens=6)
    engine = make_engine(model)
    engine.submit([dataclasses.replace(request, holds=True)])
    for number, truncation in enumerate((MIXED, None, Truncation())):
        finish(engine, 1)
        if number in leaves_after:
            assert engine.abort() == []
        options = {} if truncation is None else {"truncation": truncation}
        engine.resume(request.rollout_id, [4, 5, 6], max_new_tokens=8, **options)
        if number == abort_after:
            for _ in range(3):
                engine.step()
            engine.submit(engine.abort())
    (rollout,) = finish(engine, 1)
    return model, rollout


def test_a_turn_has_its_own_truncation_and_one_that_names_none_that_of_the_turn_before():
    """Held in the cache, dropped from it, or aborted in the middle: the same bits, scored as sampled."""
    model, rollout = in_turns((), None)
    is_truncated = torch.zeros(20 + 6 + 3 * (3 + 8), dtype=torch.bool)
    for start in (20 + 6 + 3, 20 + 6 + 3 + 8 + 3):
        is_truncated[start : start + 8] = True
    assert torch.equal(rollout.kept.counts > 0, is_truncated)
    assert int(rollout.kept.counts.max()) <= MIXED.top_k
    layout = PackedLayout((len(rollout.tokens),), CPU)
    options = {"select": rollout.loss_mask, "temperature": 1.0, "kept": rollout.kept}
    logprobs, _ = score(model, rollout.tokens, layout, **options)
    assert (logprobs - rollout.sample_logprobs).abs().max() == 0
    for leaves_after, abort_after in (((0, 1, 2), None), ((1,), 0), ((), 1), ((2,), 2)):
        _, other = in_turns(leaves_after, abort_after)
        assert all_of(other) == all_of(rollout), (leaves_after, abort_after)


def test_a_token_without_kept_tokens_is_scored_over_the_whole_vocabulary():
    """As in a run that is resumed with other flags, whose rollouts in flight were sampled before."""
    model = cached_model("full", torch.float32)
    batch = pack(run(make_engine(model), truncated_requests()[1:3]))
    index = batch.loss_index
    is_whole = (batch.kept.counts == 0)[index]
    assert 0 < int(is_whole.sum()) < len(index)
    logprobs, entropies = score_batch(model, batch, temperature=1.0)
    whole, whole_entropies = score_batch(
        model, batch.replace(kept=KeptIds.none(len(batch.tokens))), temperature=1.0
    )
    assert torch.equal(logprobs[index][is_whole], whole[index][is_whole])
    assert torch.equal(entropies[index][is_whole], whole_entropies[index][is_whole])
    assert (logprobs[index] >= whole[index]).all()
    assert (logprobs[index] > whole[index])[~is_whole].any()
    (logprobs.sum() + entropies.sum()).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    assert all(gradient.isfinite().all() for gradient in gradients)


TINY = "--num-steps 2 --prompts-per-step 4 --group-size 3 --eval-rows 4 --save-every 1 --num-minibatches 1"
CASES = {
    "top-k": ("train_grpo.py", "--top-k 5 --temperature 0.7 --kl-coef 0.1"),
    "partial": ("train_grpo.py", "--top-k 20 --top-p 0.9 --min-p 0.01 --max-staleness 1 --correction none"),
    "lora": ("train_grpo.py", "--top-k 9 --top-p 0.8 --temperature 1.3 --lora-rank 2 --kl-coef 0.1"),
    "ppo": ("train_ppo.py", "--top-k 4 --min-p 0.1 --max-staleness 1"),
}


@pytest.mark.parametrize("case", [slow("top-k"), "partial", slow("lora"), slow("ppo")])
def test_a_truncated_run_has_no_gap_a_ratio_of_one_and_resumes_with_the_same_bits(two_ranks, runs, case):
    """Two ranks. The first update's ratio is exactly 1, and the KL to a reference with the same weights exactly 0."""
    script, flags = CASES[case]
    run_in_pool(two_ranks, script, TINY, flags, f"--run-name truncated-{case}", runs=runs)
    lines = read_metrics(runs / f"truncated-{case}")
    gaps = [line["policy/logp_gap_max"] for line in lines if "policy/logp_gap_max" in line]
    assert set(gaps) == {0.0}
    assert len(gaps) >= 2
    if script == "train_grpo.py":
        first = next(line for line in lines if "policy/ratio_max" in line)
        assert first["policy/ratio_max"] == 1.0
        assert first.get("policy/kl_ref_k3", 0.0) == 0.0
    copy = interrupted_copy(runs / f"truncated-{case}", f"truncated-{case}-resumed", 1)
    run_in_pool(two_ranks, script, TINY, flags, f"--run-name {copy.name}", runs=runs)
    assert digests(copy) == digests(runs / f"truncated-{case}")


AGENT = """
import openai
from minirl.agents.endpoint import serve

@serve
def agent(url, episode):
    client = openai.OpenAI(base_url=url, api_key="-")
    ids = episode.prompt_ids
    turns = [
        {"extra_body": {"top_k": 5}},
        {},
        {"extra_body": {"top_k": 1}},
        {"top_p": 0.9, "extra_body": {"top_k": 20, "min_p": 0.01}},
    ]
    for fields in turns:
        extra = {**fields.pop("extra_body", {}), "return_token_ids": True}
        asked = {"model": "m", "prompt": ids, "max_tokens": 2, "logprobs": 1}
        (choice,) = client.completions.create(**asked, **fields, extra_body=extra).choices
        if extra.get("top_k") == 1 and episode.temperature:
            assert not any(choice.logprobs.token_logprobs)
        ids = [*ids, *choice.token_ids]
        if choice.finish_reason == "stop":
            break
"""


@pytest.mark.parametrize("flags", ["", slow("--top-k 30 --top-p 0.95")])
def test_turns_that_a_program_truncates_leave_no_gap_and_a_killed_run_goes_on_with_the_same_bits(
    two_ranks, runs, tmp_path, flags
):
    """Beside untruncated turns, in a run with truncated distributions and in one without. Rollouts are in flight."""
    pytest.importorskip("openai")
    (tmp_path / "mine.py").write_text(AGENT)
    name = f"asked{len(flags)}"
    flags = (
        f"{TINY} {flags} --rollout {tmp_path}/mine.py:agent --max-staleness 1 --correction none --kl-coef 0.1"
    )
    run_in_pool(two_ranks, "train_grpo.py", flags, f"--run-name {name}", runs=runs)
    lines = read_metrics(runs / name)
    assert {line["policy/logp_gap_max"] for line in lines if "policy/logp_gap_max" in line} == {0.0}
    first = next(line for line in lines if "policy/ratio_max" in line)
    assert (first["policy/ratio_max"], first["policy/kl_ref_k3"]) == (1.0, 0.0)
    copy = interrupted_copy(runs / name, f"{name}-resumed", 1)
    run_in_pool(two_ranks, "train_grpo.py", flags, f"--run-name {copy.name}", runs=runs)
    assert digests(copy) == digests(runs / name)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"top_p": 0.9}, r"--top-p 0.9: needs --top-k, .* add --top-k 256"),
        ({"min_p": 0.1}, r"--min-p 0.1: needs --top-k"),
        ({"top_k": 257}, "--top-k 257: must be a number from 0 to 256"),
        ({"top_k": 5, "top_p": 0.0}, "--top-p 0.0: must be greater than 0"),
        ({"top_k": 5, "top_p": 1.5}, "--top-p 1.5: must be a number from 0 to 1"),
        ({"top_k": 5, "min_p": 1.5}, "--min-p 1.5: must be a number from 0 to 1"),
        ({"top_k": 5, "min_p": math.nan}, "--min-p nan: must be finite"),
    ],
)
def test_truncations_without_a_meaning_or_a_bound_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        check_shared(train_grpo.Config(**flags))


def test_a_divergence_over_the_vocabulary_is_refused_with_truncation():
    """Of the run, by its flags; of a turn that asked for it, where the divergence would be computed."""
    config = train_grpo.Config(top_k=5, teacher="x", teacher_kl="reverse")
    with pytest.raises(InputError, match="--teacher-kl reverse: compares whole vocabularies, and --top-k 5"):
        train_grpo.check(config)
    batch = pack(run(make_engine(cached_model("full", torch.float32)), truncated_requests()[:1]))
    with pytest.raises(
        InputError, match="--teacher-kl: compares whole vocabularies, and a turn was sampled with"
    ):
        score_with_teacher(None, batch, None, temperature=1.0, is_forward=False)
