"""The ends of episodes, their finish reasons, and the records of their turns."""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minirl.data.view import view_of
from minirl.episodes.episode import END_REASONS, Episode, one_turn
from minirl.report.metrics import StepMetrics, add_rollouts, derived
from minirl.rollouts import CUT_OFF, all_branches
from minirl.training.batch import pack
from support.collecting import (
    CHAT,
    Prompts,
    branching,
    calculator,
    chat_prompts,
    letter_tokenizer,
    make_collector,
    replying,
)
from support.marks import slow


def reason_of(episode):
    return END_REASONS[episode.seed % len(END_REASONS)]


async def ends(episode: Episode):
    await episode.generate(max_tokens=3)
    await asyncio.sleep(0)
    episode.end(reason_of(episode))


async def out_of_order(episode: Episode):
    first, second = episode.branch("one"), episode.branch("two")
    await second.generate(max_tokens=2)
    await first.generate(max_tokens=3)
    await second.generate(after="q", max_tokens=4)
    await episode.generate(after="q", max_tokens=5)


async def naps(episode: Episode):
    while True:
        await episode.generate(max_tokens=2)
        await asyncio.sleep(0.04)


def rollouts_of(rollout, num_groups=4, **options):
    options = {"prompts": Prompts(lambda _: 60), **options}
    return make_collector(rollout=rollout, **options).collect(num_groups).rewarded.rollouts


def num_sampled(rollout):
    return int(rollout.loss_mask.sum())


async def endless(episode: Episode):
    while True:
        await episode.generate(after="xyz", max_tokens=7)


async def in_turn(episode: Episode):
    """Turns of two branches in turn; for the third the first one is asked again."""
    other = episode.branch("two")
    for branch in (episode, other, episode):
        await branch.generate(max_tokens=7)


async def full_before(episode: Episode):
    """The second branch uses up its room, then the first one goes on."""
    other = episode.branch("two")
    for branch in (episode, other, episode):
        await branch.generate(max_tokens=7 if branch is episode else None)


async def full_and_done(episode: Episode):
    await full_before(episode)
    episode.end("env_done")


@pytest.mark.parametrize(
    ("function", "limits", "reason", "ends"),
    [
        (in_turn, {}, "turn_length", ["turn_length", "turn_length"]),
        (in_turn, {"max_turns": 2}, "max_turns", ["max_turns", "turn_length"]),
        (in_turn, {"max_turns": 1}, "max_turns", ["turn_length"]),  # the second never began
        (full_before, {}, "turn_length", ["turn_length", "length"]),
        (full_and_done, {}, "env_done", ["env_done", "length"]),
    ],
)
def test_a_branch_is_cut_off_where_a_limit_ended_it_and_not_where_its_episode_was(
    function, limits, reason, ends
):
    """The episode's end is that of the branch which had the last turn or may not go on; the others end as they did."""
    groups = make_collector(rollout=function, prompts=Prompts(lambda _: 60), **limits).collect(2)
    for rollout in groups.rewarded.rollouts:
        assert rollout.finish_reason == reason
        assert [branch.own_end for branch in rollout.branches] == ends
    assert set(groups.is_truncated.flatten().tolist()) == {reason in CUT_OFF}
    batch = pack(all_branches(groups.rewarded.rollouts))
    assert batch.is_truncated[batch.last_index].tolist() == [end in CUT_OFF for end in ends] * 6


def test_an_episode_ends_with_the_reason_that_it_gives():
    """Only limits count as such."""
    collector = make_collector(rollout=ends, prompts=Prompts(lambda _: 60), group_size=8)
    groups = collector.collect(4)
    rollouts = groups.rewarded.rollouts
    keys = [collector._prompts.key(rollout.rollout_id) for rollout in rollouts]
    reasons = [rollout.finish_reason for rollout in rollouts]
    assert reasons == [END_REASONS[key % len(END_REASONS)] for key in keys]
    assert {*reasons} == {*END_REASONS}
    assert groups.table.is_truncated.tolist() == [reason in CUT_OFF for reason in reasons]
    assert {num_sampled(rollout) for rollout in rollouts} == {3}


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        slow({}, "length"),
        ({"max_turns": 3}, "max_turns"),
    ],
)
def test_row_56_each_limit_ends_an_endless_episode_with_its_own_reason(limits, reason):
    for rollout in rollouts_of(naps, 1, **limits):
        assert rollout.finish_reason == reason
        assert rollout.is_truncated


@pytest.mark.parametrize(
    ("function", "is_chat"),
    [(calculator, False), (replying, True), (branching, True), (out_of_order, True)],
    ids=["text", "messages", "branches", "out of order"],
)
def test_row_61_the_record_of_an_episode_has_the_tokens_of_each_branch_in_order(function, is_chat):
    """The segments are the runs of the loss mask, except for adjacent turns; texts are those of the ids.

    A branch's begin with its prompt, if that is not the row's.
    """
    prompts = chat_prompts(200) if is_chat else Prompts()
    for rollout in rollouts_of(function, prompts=prompts):
        prompt = prompts.row(rollout.rollout_id.prompt_ordinal).prompt
        view = view_of(rollout, prompt, prompts.tokenizer)
        segments = view["segments"]
        for branch in rollout.branches:
            number = branch.rollout_id.branch
            own = [segment for segment in segments if segment["branch"] == number]
            prompt_sizes = [segment["num_tokens"] for segment in own if segment["kind"] == "prompt"]
            assert prompt_sizes == ([branch.num_prompt_tokens] if number else [])
            start = 0 if number else branch.num_prompt_tokens
            is_sampled = [
                segment["kind"] == "sampled" for segment in own for _ in range(segment["num_tokens"])
            ]
            assert is_sampled == branch.loss_mask[start:].tolist()
            text = prompts.tokenizer.decode(branch.tokens[start:], skip_special_tokens=False)
            assert "".join(segment["text"] for segment in own).replace(" ", "") == text.replace(" ", "")
        sampled = [(s["branch"], s["num_tokens"]) for s in segments if s["kind"] == "sampled"]
        assert sampled == [(turn.branch, turn.num_tokens) for turn in rollout.episode.turns]


def test_the_messages_of_a_record_are_those_of_the_episode():
    roles = ["user", "assistant", "tool", "tool", "tool", "assistant", "user", "assistant"]
    prompts = chat_prompts(200)
    for rollout in rollouts_of(replying, prompts=prompts):
        messages = view_of(rollout, "", prompts.tokenizer)["messages"]
        assert [message["role"] for message in messages] == roles[: len(messages)]


def test_row_61_branches_are_in_order_of_their_numbers_in_whatever_order_they_had_turns():
    for rollout in rollouts_of(out_of_order, prompts=chat_prompts()):
        assert [turn.branch for turn in rollout.episode.turns] == [0, 1, 2, 2]
        view = view_of(rollout, "", letter_tokenizer(CHAT, chat=True))
        assert view["messages"][0]["content"] == "two"


def test_the_record_of_one_answer_has_a_turn_and_no_texts():
    for rollout in rollouts_of(one_turn):
        (turn,) = rollout.episode.turns
        assert (turn.start, turn.num_tokens) == (0, len(rollout.completion))
        assert view_of(rollout, "", letter_tokenizer()) == {}


@pytest.fixture
def metrics_of(monkeypatch):
    """The metrics of a step with these rollouts, on one rank."""
    monkeypatch.setattr("minirl.report.metrics.gather_objects", lambda value: [value])

    def metrics_of_step(rollouts):
        metrics = StepMetrics()
        rewards = torch.zeros(len(rollouts), 1)
        add_rollouts(metrics, rollouts, grouped_rewards=rewards)
        others = {"count/sampled_tokens": 0.0, "time/step": 1.0}
        return derived(metrics.reduce() | others)

    return metrics_of_step


def test_metrics_tell_sampled_tokens_from_those_of_the_environment(metrics_of):
    rollouts = rollouts_of(endless, max_turns=2)
    rollouts = [*rollouts[:9], *(replace(rollout, finish_reason="env_done") for rollout in rollouts[9:])]
    found = metrics_of(rollouts)
    assert found["len/mean"] == found["len/max"] == 14
    assert found["count/tokens"] == 14 * 12
    assert found["env/tokens"] == sum(len(r.completion) for r in rollouts) - 14 * 12
    assert found["env/turns_mean"] == 2
    assert (found["finish/max_turns"], found["finish/env_done"]) == (9 / 12, 3 / 12)
    assert found["len/truncated"] == 9 / 12
    plain = metrics_of(rollouts_of(one_turn))
    assert (plain["env/turns_mean"], plain["env/tokens"]) == (1, 0)
    assert plain["finish/length"] == 1


def test_turns_that_cannot_be_read_are_counted_where_somebody_asked(metrics_of, monkeypatch):
    """With the function of docs/episodes.md that tells the model so."""

    def parsed(tokenizer, ids, before):
        error = {"parse_error": "has an a"} if "a" in tokenizer.decode(ids) else {}
        return {"role": "assistant", "content": "", **error}

    monkeypatch.setattr("minirl.data.answers.parsed_answer", parsed)
    page = (Path(__file__).parent.parent / "docs" / "episodes.md").read_text()
    (source,) = (text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "complaint" in text)
    names = {}
    exec(source.replace("generate(", "generate(max_tokens=9, "), names)
    rollouts = rollouts_of(names["rollout"], 16, prompts=chat_prompts(400))
    num_errors = 0
    for rollout in rollouts:
        told = [turn.parse_error for turn in rollout.episode.turns]
        assert told[:-1] == ["has an a"] * (len(told) - 1)
        assert (rollout.finish_reason == "parse_error") == (told == ["has an a"] * 4)
        num_errors += told.count("has an a")
    assert metrics_of(rollouts)["count/parse_errors"] == num_errors > 8
    unasked = rollouts_of(calculator, prompts=chat_prompts(400))
    assert "count/parse_errors" not in metrics_of(unasked)
