"""How episodes end: finish reasons, truncation, and the records of their turns."""

import asyncio

import pytest
import torch

from minirl.data.conversation import conversation_record
from minirl.episodes.episode import one_turn
from minirl.report.metrics import StepMetrics, add_rollout_metrics
from minirl.rollouts import TRUNCATED_REASONS, all_branches
from minirl.training.batch import pack
from support.collecting import (
    Prompts,
    branching,
    chat_prompts,
    letter_tokenizer,
    make_collector,
)
from support.texts import assistant, user


async def out_of_order(episode):
    first, second = episode.branch("one"), episode.branch("two")
    await second.generate(max_tokens=2)
    await first.generate(max_tokens=3)
    await second.generate(after=user("q"), max_tokens=4)
    await episode.generate(after="q", max_tokens=5)


def collected(rollout, num_groups=4, **options):
    options = {"prompts": Prompts(lambda _: 60), **options}
    return make_collector(rollout=rollout, **options).collect(num_groups)


async def endless(episode):
    while True:
        await episode.generate(after="xyz", max_tokens=7)
        await asyncio.sleep(0)


async def in_turn(episode):
    """Alternate between two branches; the third turn belongs to the first branch again."""
    other = episode.branch("two")
    for branch in (episode, other, episode):
        await branch.generate(max_tokens=7)


async def full_before(episode):
    """Fill up the second branch, then continue the first one."""
    other = episode.branch("two")
    for branch in (episode, other, episode):
        await branch.generate(max_tokens=7 if branch is episode else None)


async def full_and_done(episode):
    await full_before(episode)
    episode.end("env_done")


async def too_long_a_reply(episode):
    await episode.generate(max_tokens=8)
    await episode.generate(after="a" * 52)
    raise AssertionError("there was no room")


async def too_long_a_branch(episode):
    await episode.generate(max_tokens=3)
    await episode.branch("a" * 100).generate()


@pytest.mark.parametrize(
    ("function", "max_turns", "reason", "ends"),
    [
        (in_turn, 0, "turn_length", ["turn_length", "turn_length"]),
        (in_turn, 2, "max_turns", ["max_turns", "turn_length"]),
        (in_turn, 1, "max_turns", ["turn_length"]),  # the second never began
        (full_before, 0, "turn_length", ["turn_length", "length"]),
        (full_and_done, 0, "env_done", ["env_done", "length"]),
        (endless, 3, "max_turns", ["max_turns"]),
        (too_long_a_reply, 0, "length", ["length"]),
        (too_long_a_branch, 0, "length", ["turn_length"]),
    ],
)
def test_row_56_a_limit_truncates_only_the_branch_that_reaches_it(function, max_turns, reason, ends):
    """The rollout has the finish reason of the branch that last requested a turn; other branches keep their reasons."""
    prompts = Prompts(lambda one: 0 if one.branch and function is too_long_a_branch else 60)
    groups = collected(function, 2, max_turns=max_turns, prompts=prompts)
    for rollout in groups.rollouts:
        assert rollout.finish_reason == reason
        assert [branch.finish_reason for branch in rollout.branches] == ends
    assert set(groups.is_truncated.flatten().tolist()) == {reason in TRUNCATED_REASONS}
    batch = pack(all_branches(groups.rollouts))
    assert batch.is_truncated.tolist() == [end in TRUNCATED_REASONS for end in ends] * 6


@pytest.mark.parametrize("function", [branching, out_of_order])
def test_row_61_an_episodes_record_has_each_branchs_tokens_in_order(function):
    """Segments match the runs of the loss mask, except that adjacent turns stay separate; each has its tokens' text.

    A branch's segments begin with its prompt, unless the prompt is the row's.
    """
    prompts = chat_prompts(200)
    for rollout in collected(function, prompts=prompts).rollouts:
        view = conversation_record(rollout, prompts.tokenizer)
        for branch in rollout.branches:
            own = [segment for segment in view["segments"] if segment["branch"] == branch.rollout_id.branch]
            start = 0 if branch.rollout_id.branch else branch.num_prompt_tokens
            kinds = [segment["kind"] for segment in own for _ in range(segment["num_tokens"])]
            assert kinds.count("prompt") == branch.num_prompt_tokens - start
            assert [kind == "sampled" for kind in kinds] == branch.loss_mask[start:].tolist()
            text = prompts.tokenizer.decode(branch.tokens[start:], skip_special_tokens=False)
            assert "".join(segment["text"] for segment in own).replace(" ", "") == text.replace(" ", "")
        sampled = [s["num_tokens"] for s in view["segments"] if s["kind"] == "sampled"]
        assert sampled == [turn.num_tokens for turn in rollout.episode.turns]
        if function is out_of_order:
            assert view["messages"][0]["content"] == "two"


def test_an_answer_of_one_turn_has_no_record_of_a_conversation():
    rollouts = collected(one_turn, prompts=chat_prompts()).rollouts
    assert conversation_record(rollouts[0], letter_tokenizer()) == {}


def test_parse_errors_are_counted_only_for_turns_whose_message_was_read(monkeypatch):
    def parsed(tokenizer, ids, before):
        error = {"parse_error": "has an a"} if "a" in tokenizer.decode(ids) else {}
        return assistant("", **error)

    async def asks(episode):
        turn = await episode.generate(max_tokens=9)
        assert turn.message["role"] == "assistant"

    monkeypatch.setattr("minirl.data.answers.parse_assistant_message", parsed)
    rollouts = collected(asks, 16, prompts=chat_prompts()).rollouts
    num_errors = sum(turn.parse_error is not None for rollout in rollouts for turn in rollout.episode.turns)
    metrics = StepMetrics()
    add_rollout_metrics(metrics, rollouts, grouped_rewards=torch.zeros(len(rollouts), 1))
    assert metrics.reduce()["count/parse_errors"] == num_errors > 8
