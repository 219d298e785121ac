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
from minirl.model import device_kernels
from minirl.rollouts import KeptIds
from minirl.run.checks import check_grpo, check_shared
from minirl.training.batch import pack
from minirl.training.distillation import score_with_teacher
from minirl.truncation import Truncation
from support.engines import (
    cached_model,
    finish,
    make_engine,
    make_prompt,
    make_request,
    mixed_requests,
    next_turn,
    run,
    scores_of,
)
from support.interpreter import mend_interpreter, needs_interpreter
from support.marks import slow
from support.resuming import digests, interrupted_copy
from support.sampling import GRID, RULES, columns, random_head, sampling_rows
from support.scripts import read_metrics, run_in_pool

WORKED = torch.tensor([[0.05, 0.5, 0.15, 0.3]]).log()
MIXED = Truncation(20, 0.9, 0.05)


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


@needs_interpreter
def test_truncated_sampling_beside_the_fused_sampler_equals_the_portable_one(monkeypatch):
    """With the choice of CUDA, on the CPU: tokens, kept tokens and logprobs, also of rows without truncation."""
    rows, head = sampling_rows(torch.float32), random_head(700)
    truncation = columns(RULES)
    expected = sample(head=head, **rows, truncation=truncation)
    mend_interpreter(monkeypatch)
    monkeypatch.setattr(device_kernels, "are_used", lambda device: True)
    tokens, logprobs, kept = sample(head=head, **rows, truncation=truncation)
    assert torch.equal(tokens, expected[0])
    assert torch.equal(kept, expected[2])
    torch.testing.assert_close(logprobs, expected[1], atol=2e-6, rtol=0)


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
        slow({"max_running_requests": 3}),
        {"cache_tokens": 600},
        slow({"async_decoding": True}),
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


def in_turns(leaves_after, preempted_in):
    """A rollout of four turns, the second and third truncated alike, whose request leaves the cache in between."""
    model = cached_model("full", torch.float32)
    request = make_request(make_prompt(20), stop_ids=frozenset(), max_new_tokens=6)
    engine = make_engine(model)
    engine.submit([dataclasses.replace(request, holds=True)])
    for number, truncation in enumerate((MIXED, MIXED, Truncation())):
        (rollout,) = finish(engine, 1)
        if number in leaves_after:
            engine._drop_held()
        turn = next_turn(request, rollout, [4, 5, 6], 8, truncation=truncation, holds=True)
        engine.submit([turn])
        if number == preempted_in:
            for _ in range(3):
                engine.step()
            engine._preempt(int(engine._running.rows[0]))
    (rollout,) = finish(engine, 1)
    return model, rollout


def test_a_turn_has_its_own_truncation():
    """Held in the cache, dropped from it, or preempted in the middle: the same bits, scored as sampled."""
    model, rollout = in_turns((), None)
    is_truncated = torch.zeros(20 + 6 + 3 * (3 + 8), dtype=torch.bool)
    for start in (20 + 6 + 3, 20 + 6 + 3 + 8 + 3):
        is_truncated[start : start + 8] = True
    assert torch.equal(rollout.kept.counts > 0, is_truncated)
    assert int(rollout.kept.counts.max()) <= MIXED.top_k
    assert torch.equal(scores_of(model, [rollout]), rollout.sample_logprobs)
    for leaves_after, preempted_in in (((0, 1, 2), None), ((1,), 0), ((), 1), ((2,), 2)):
        _, other = in_turns(leaves_after, preempted_in)
        assert all_of(other) == all_of(rollout), (leaves_after, preempted_in)


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


TINY = "--num-steps 2 --prompts-per-step 4 --group-size 3 --save-every 1 --num-minibatches 1"
PARTIAL = "--max-staleness 1 --correction none"
# Truncated turns beside others, of rollouts that are in flight.
ASKED = f"--rollout {{folder}}/mine.py:agent --kl-coef 0.1 {PARTIAL}"
CASES = {
    "top-k": ("train_grpo.py", "--top-k 5 --temperature 0.7 --kl-coef 0.1"),
    "partial": ("train_grpo.py", f"--top-k 20 --top-p 0.9 {PARTIAL}"),
    "lora": ("train_grpo.py", "--top-k 9 --top-p 0.8 --temperature 1.3 --lora-rank 2 --kl-coef 0.1"),
    "ppo": ("train_ppo.py", "--top-k 4 --max-staleness 1"),
    "asked": ("train_grpo.py", ASKED),
    "asked-beside": ("train_grpo.py", f"--top-k 30 --top-p 0.95 {ASKED}"),
}


@pytest.mark.parametrize("case", [name if name == "partial" else slow(name) for name in CASES])
def test_a_truncated_run_has_no_gap_a_ratio_of_one_and_resumes_with_the_same_bits(
    two_ranks, runs, tmp_path, case
):
    """Two ranks. The first update's ratio is exactly 1, and the KL to a reference with the same weights exactly 0.

    By the run's flags, by each turn's request, or both.
    """
    script, flags = CASES[case]
    if "mine.py" in flags:
        pytest.importorskip("openai")
        (tmp_path / "mine.py").write_text(AGENT)
        flags = flags.format(folder=tmp_path)
    run_in_pool(two_ranks, script, TINY, flags, f"--run-name truncated-{case}", runs=runs)
    lines = read_metrics(runs / f"truncated-{case}")
    gaps = [line["policy/logp_gap_max"] for line in lines if "policy/logp_gap_max" in line]
    assert set(gaps) == {0.0}
    assert len(gaps) >= (1 if "asked" in case else 2)
    if script == "train_grpo.py":
        first = next(line for line in lines if "policy/ratio_max" in line)
        assert first["policy/ratio_max"] == 1.0
        assert first.get("policy/kl_ref_k3") == (0.0 if "--kl-coef" in flags else None)
    copy = interrupted_copy(runs / f"truncated-{case}", f"truncated-{case}-resumed", 1)
    run_in_pool(two_ranks, script, TINY, flags, f"--run-name {copy.name}", runs=runs)
    assert digests(copy) == digests(runs / f"truncated-{case}")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"top_p": 0.9}, r"--top-p 0.9: needs --top-k, .* add --top-k 256"),
        ({"top_k": 257}, "--top-k 257: must be a number from 0 to 256"),
        ({"top_k": 5, "top_p": 0.0}, "--top-p 0.0: must be greater than 0"),
        ({"top_k": 5, "top_p": 1.5}, "--top-p 1.5: must be a number from 0 to 1"),
        ({"top_k": 5, "top_p": math.nan}, "--top-p nan: must be finite"),
    ],
)
def test_truncations_without_a_meaning_or_a_bound_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        check_shared(train_grpo.Config(**flags))


def test_a_divergence_over_the_vocabulary_is_refused_with_truncation():
    """Of the run, by its flags; of a turn that asked for it, where the divergence would be computed."""
    config = train_grpo.Config(top_k=5, teacher="x", teacher_kl="reverse")
    with pytest.raises(InputError, match="--teacher-kl reverse: compares whole vocabularies, and --top-k 5"):
        check_grpo(config)
    batch = pack(run(make_engine(cached_model("full", torch.float32)), truncated_requests()[:1]))
    with pytest.raises(
        InputError, match="--teacher-kl: compares whole vocabularies, and a turn was sampled with"
    ):
        score_with_teacher(None, batch, None, is_forward=False)
