"""Truncated sampling in evaluations; nothing is trained on its samples."""

import dataclasses
import math

import pytest
import torch
from transformers.generation.logits_process import TopKLogitsWarper, TopPLogitsWarper

import train_grpo
import train_ppo
from minirl.errors import InputError
from minirl.extras import evaluate
from minirl.generation.sampling import truncate
from minirl.rollouts import Truncation
from minirl.run.checks import check_grpo, check_ppo, check_shared
from support.engines import cached_model, make_engine, mixed_requests, run
from support.sampling import GRID, columns


@pytest.mark.parametrize("vocab", [30, 3000])
def test_the_kept_tokens_are_those_of_transformers(vocab):
    """Each of its two rules and all combinations, flat and peaked; the rows of one batch have different rules."""
    generator = torch.Generator().manual_seed(vocab)
    scale = torch.tensor([0.5, 3.0] * (len(GRID) // 2))[:, None]
    logits = torch.randn(len(GRID), vocab, generator=generator) * scale
    masked = logits.clone()
    truncate(masked, torch.ones(len(GRID)), *columns(GRID))
    for row, (top_k, top_p) in enumerate(GRID):
        expected = TopKLogitsWarper(top_k)(None, logits[row, None])
        if top_p < 1:
            expected = TopPLogitsWarper(top_p)(None, expected)
        found = masked[row].log_softmax(-1)
        torch.testing.assert_close(found, expected[0].log_softmax(-1), atol=1e-6, rtol=0)


def test_truncated_rollouts_do_not_depend_on_the_schedule():
    """Preempted, or read late and padded for graphs, beside others: the same tokens and logprobs."""
    model, rules = cached_model("full", torch.float32), (Truncation(20, 0.9), Truncation(), Truncation(5))
    requests = [
        dataclasses.replace(request, truncation=rules[i % 3]) for i, request in enumerate(mixed_requests())
    ]
    found = []
    for options in ({}, {"cache_tokens": 600}, {"async_decoding": True, "cuda_graphs": True}):
        rollouts = run(make_engine(model, **options), requests)
        found.append({r.rollout_id: (r.tokens.tolist(), r.sample_logprobs.tolist()) for r in rollouts})
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"top_p": 0.9}, r"--top-p 0.9: needs --top-k, .* add --top-k 256"),
        ({"top_k": 257}, "--top-k 257: must be a number from 0 to 256"),
        ({"top_k": 5, "top_p": 0.0}, "--top-p 0.0: must be greater than 0 and"),
        ({"top_k": 5, "top_p": math.nan}, "--top-p nan: must be finite"),
    ],
)
def test_truncations_without_a_meaning_or_a_bound_are_refused(flags, message):
    with pytest.raises(InputError, match=message):
        check_shared(evaluate.Config(**flags))


@pytest.mark.parametrize("flags", [{"top_k": 5}, {"top_p": 0.9}])
@pytest.mark.parametrize(("script", "check"), [(train_grpo, check_grpo), (train_ppo, check_ppo)])
def test_training_scripts_refuse_truncation_and_say_why(script, check, flags):
    """Pitfall 5."""
    with pytest.raises(InputError, match=r"evaluate.* sampled logprobs would differ from training logprobs"):
        check(script.Config(**flags))
