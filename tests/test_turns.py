"""Multi-turn requests: prefilling only the appended tokens changes no sampled token."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from minirl.data.tokenizer import StopStrings
from minirl.generation.block_pool import ceil_div
from minirl.generation.engine import Engine, Request
from minirl.model.portable_attention import BLOCK
from minirl.model.transformer import is_batch_invariant
from minirl.rollouts import NO_TOKENS, RolloutId, Stream, make_token_stream
from support.collecting import letter_tokenizer
from support.engines import (
    CPU,
    STOP_IDS,
    WINDOWS,
    cached_model,
    has_memory,
    make_engine,
    make_request,
    mixed_requests,
    next_turn,
)
from support.marks import slow

TURN_TOKENS = 7


@dataclass(frozen=True)
class Episode:
    """The request for a first turn, and the later turns' replies (0 to 100 tokens) with their stop tests."""

    first: Request
    replies: list[tuple[list[int], StopStrings | None]]


def random_episodes(rng: random.Random) -> list[Episode]:
    """Return groups of 1 to 6 episodes with 1 to 4 turns at several temperatures; prompts span up to five blocks."""
    episodes = []
    stop_tests = [None, *(StopStrings(letter_tokenizer(), one) for one in ("abcdef", ("ab", *"ghijkl")))]
    for number in range(rng.randint(1, 6)):
        prompt = rng.choices(range(48), k=rng.choice((1, 31, 32, 33, 64, 70, 130, 150)))
        for member in range(rng.randint(1, 6)):
            request = make_request(
                prompt,
                number=number,
                member=member,
                temperature=rng.choice((0.0, 0.7, 1.0)),
                max_new_tokens=rng.choice((1, TURN_TOKENS, 20)),
                stop_ids=rng.choice((STOP_IDS, frozenset(range(0, 48, 3)))),
            )
            replies = [
                (
                    rng.choices(range(48), k=rng.choice((0, 0, 1, 3, 20, 33, 100))),
                    rng.choice(stop_tests),
                )
                for _ in range(rng.randint(0, 3))
            ]
            episodes.append(Episode(replace(request, parks_after_turn=bool(replies)), replies))
    return episodes


def random_options(rng: random.Random) -> dict[str, int | bool]:
    """Return engine options that cause preemption, eviction, late admission, padding and batches of one."""
    return {
        "max_running_requests": rng.choice((1, 2, 3, 7, 64)),
        "max_prefill_tokens": rng.choice((1, 40, 300, 8192)),
        "cache_tokens": rng.choice((512, 640, 1024, 8192)),
        "headroom_tokens": rng.choice((0, 5, 112)),
        "async_decoding": rng.random() < 0.6,
        "cuda_graphs": rng.random() < 0.3,
        "keeps_cache": rng.random() < 0.5,
    }


def engine_of(attention: str, **options) -> Engine:
    return make_engine(cached_model(attention, torch.float32), **options)


Ends = dict[RolloutId, tuple[Stream, str]]


def run_episodes(engine: Engine, episodes: list[Episode], rng: random.Random) -> Ends:
    """Return each episode's tokens after the prompt and its last finish reason. Replies arrive steps later."""
    by_id = {episode.first.rollout_id: episode for episode in episodes}
    left = {rollout_id: list(episode.replies) for rollout_id, episode in by_id.items()}
    waiting, ends = [], {}
    engine.submit([episode.first for episode in episodes])
    for _ in range(10_000):
        waiting += engine.step()
        rng.shuffle(waiting)
        for _ in range(rng.randint(0, len(waiting))):
            rollout = waiting.pop()
            rollout_id = rollout.rollout_id
            if left[rollout_id]:
                reply, test = left[rollout_id].pop(0)
                first = by_id[rollout_id].first
                engine.submit([next_turn(first, rollout, reply, TURN_TOKENS, stop_test=test)])
            else:
                engine.release(rollout_id)
                ends[rollout_id] = rollout.tokens_after_prompt, rollout.finish_reason
        if len(ends) == len(episodes):
            return ends
    raise AssertionError("the turns do not end")


def expected_ends(attention: str, episodes: list[Episode]) -> Ends:
    """Return the reference: each turn is a separate request whose prompt is everything before it."""
    engine, ends = engine_of(attention), {}
    for episode in episodes:
        first = episode.first
        completion = NO_TOKENS
        for reply, test in [([], None), *episode.replies]:
            completion = np.concatenate([completion, make_token_stream(reply)])
            before = (*first.prompt_ids, *completion["id"].tolist())
            num_tokens = TURN_TOKENS if len(completion) else first.max_new_tokens
            turn = replace(
                first, prompt_ids=before, parks_after_turn=False, stop_test=test, max_new_tokens=num_tokens
            )
            (rollout,) = engine.generate([turn])
            completion = np.concatenate([completion, rollout.tokens_after_prompt])
        ends[first.rollout_id] = completion, rollout.finish_reason
    return ends


@pytest.mark.parametrize("seed", [0, 1, 2, *(slow(seed) for seed in range(3, 20))])
def test_turns_sample_the_same_as_after_a_full_prefill(seed):
    """Compare tokens, logprobs, masks and finish reasons in random batches, caches, reply orders and delays.

    Requests are preempted or evicted for lack of blocks, and a second phase repeats the first. Stop strings match only
    within their turn's text. No block leaks. Pitfall 15.
    """
    rng = random.Random(seed)
    attention = rng.choice(list(WINDOWS))
    episodes, options = random_episodes(rng), random_options(rng)
    expected = expected_ends(attention, episodes)
    # The tokens that all episodes need at once; the engine may decode one token past an episode's end.
    lengths = [len(e.first.prompt_ids) + len(expected[e.first.rollout_id][0]) + 1 for e in episodes]
    num_tokens = BLOCK * sum(ceil_div(length, BLOCK) for length in lengths)
    if seed % 3 == 1:
        options["cache_tokens"] = max(512, num_tokens)
    engine = engine_of(attention, **options)
    allowed = 0 if is_batch_invariant(engine.model.config, torch.float32, CPU) else 1e-5
    for _ in range(2):
        ends = run_episodes(engine, episodes, rng)
        assert not engine.is_busy
        for rollout_id, (completion, finish_reason) in expected.items():
            found, found_reason = ends[rollout_id]
            assert found["id"].tolist() == completion["id"].tolist()
            assert found["is_sampled"].tolist() == completion["is_sampled"].tolist()
            assert np.abs(found["logprob"] - completion["logprob"]).max() <= allowed
            assert found_reason == finish_reason
        assert has_memory(engine) == options["keeps_cache"]
        assert engine._cache.blocks.ref_counts.sum() == options["cuda_graphs"], "a block is lost"
    # Parked requests of models with recurrent states occupy slots too, so the check excludes these models.
    if num_tokens <= engine.cache_tokens and attention != "states":
        stats = engine.take_stats()
        assert stats.preemptions == stats.evictions == 0


def test_prefill_of_appended_tokens_respects_max_prefill_tokens():
    """When many requests resume at once, their appended tokens are prefilled over several steps, each token once.

    No cached token is computed again.
    """
    engine = make_engine(cached_model("full", torch.float32), max_prefill_tokens=100)
    requests = [
        replace(request, parks_after_turn=True, max_new_tokens=TURN_TOKENS)
        for request in mixed_requests()[:8]
    ]
    ended = zip(requests, engine.generate(requests), strict=True)
    engine.submit([next_turn(request, rollout, [1] * 30, TURN_TOKENS) for request, rollout in ended])
    engine.take_stats()
    prefills = []
    while engine.has_unfinished_requests:
        engine.step()
        prefills.append(engine.take_stats().prefill_tokens)
    assert max(prefills) <= 100
    assert sum(prefills) == len(requests) * 31
