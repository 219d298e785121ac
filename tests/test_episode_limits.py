"""The ends of episodes, their finish reasons, and the records of their turns."""

import functools
import json
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minirl.data.view import view_of
from minirl.episodes.episode import Episode, one_turn
from minirl.episodes.generate import END_REASONS
from minirl.episodes.in_flight import finished_record, finished_rollout
from minirl.episodes.limits import EpisodeLimits
from minirl.report.metrics import StepMetrics, add_rollouts, derived
from minirl.rollouts import CUT_OFF
from support.collecting import (
    CHAT,
    Prompts,
    assert_pauses_change_nothing,
    branching,
    calculator,
    chat_prompts,
    in_workers,
    letter_tokenizer,
    make_collector,
    replying,
    resumed,
    rollout_records,
)
from support.marks import slow

SOURCE = """
import asyncio, time
from minirl.episodes.generate import END_REASONS

def reason_of(episode):
    return END_REASONS[episode.seed % len(END_REASONS)]

def yields_end(episode):
    yield episode.generate(max_tokens=3)
    try:
        yield episode.end(reason_of(episode))
    finally:
        episode.row.columns["closed"] = True
    raise RuntimeError("ran on")

def calls_end(episode):
    yield episode.generate(max_tokens=3)
    episode.end(reason_of(episode))

async def yields_end_async(episode):
    yield episode.generate(max_tokens=3)
    await asyncio.sleep(0)
    yield episode.end(reason_of(episode))
    raise RuntimeError("ran on")

async def calls_end_async(episode):
    yield episode.generate(max_tokens=3)
    episode.end(reason_of(episode))

def out_of_order(episode):
    first, second = episode.branch("one"), episode.branch("two")
    yield second.generate(max_tokens=2)
    yield first.generate(max_tokens=3)
    yield second.generate(after="q", max_tokens=4)
    yield episode.generate(after="q", max_tokens=5)

def naps(episode):
    while True:
        yield episode.generate(max_tokens=2)
        time.sleep(0.04)

async def naps_async(episode):
    while True:
        yield episode.generate(max_tokens=2)
        await asyncio.sleep(0.04)
"""
HERE = {}
exec(SOURCE, HERE)


@pytest.fixture
def load(tmp_path):
    """Functions of the text above in worker processes, which are killed when the test is over."""
    (tmp_path / "mine.py").write_text(SOURCE)
    with in_workers(tmp_path, timeout_s=20.0) as load_function:
        yield load_function


def rollouts_of(rollout, num_groups=4, **options):
    options = {"prompts": Prompts(lambda _: 60), **options}
    return make_collector(rollout=rollout, **options).collect(num_groups).rewarded.rollouts


def num_sampled(rollout):
    return int(rollout.loss_mask.sum())


def endless(episode: Episode):
    while True:
        yield episode.generate(after="xyz", max_tokens=7)


def leaves_it_at_two(episode: Episode):
    yield episode.generate(max_tokens=7)
    yield episode.generate(after="xyz", max_tokens=7)


@pytest.mark.parametrize(
    ("function", "limit", "ends"),
    [
        (endless, 10, (10, "max_tokens")),
        (leaves_it_at_two, 10, (10, "max_tokens")),
        (leaves_it_at_two, 15, (14, "turn_length")),
    ],
)
def test_the_limit_of_sampled_tokens_counts_them_over_all_turns_and_nothing_else(function, limit, ends):
    """It cuts the turn that reaches it, and is the finish reason even if the function then returns."""
    for rollout in rollouts_of(function, limits=EpisodeLimits(max_sampled_tokens=limit)):
        assert (num_sampled(rollout), rollout.finish_reason) == ends
        assert len(rollout.completion) > num_sampled(rollout)
        assert rollout.is_truncated == (limit == 10)


def in_turn(episode: Episode):
    """Turns of two branches in turn; for the third the first one is asked again."""
    other = episode.branch("two")
    for branch in (episode, other, episode):
        yield branch.generate(max_tokens=7)


def full_before(episode: Episode):
    """The second branch uses up its room, then the first one goes on."""
    other = episode.branch("two")
    for branch in (episode, other, episode):
        yield branch.generate(max_tokens=7 if branch is episode else None)


def full_and_done(episode: Episode):
    yield from full_before(episode)
    episode.end("env_done")


@pytest.mark.parametrize(
    ("function", "limits", "reason", "ends"),
    [
        (in_turn, {}, "turn_length", ["turn_length", "turn_length"]),
        (in_turn, {"max_turns": 2}, "max_turns", ["max_turns", "turn_length"]),
        (in_turn, {"max_turns": 1}, "max_turns", ["turn_length"]),  # the second never began
        (in_turn, {"max_sampled_tokens": 11}, "max_tokens", ["max_tokens", "max_tokens"]),
        (full_before, {}, "turn_length", ["turn_length", "length"]),
        (full_and_done, {}, "env_done", ["env_done", "length"]),
    ],
)
def test_a_branch_is_cut_off_where_a_limit_ended_it_and_not_where_its_episode_was(
    function, limits, reason, ends
):
    """The episode's end is that of the branch which had the last turn or may not go on; the others end as they did."""
    groups = make_collector(
        rollout=function, prompts=Prompts(lambda _: 60), limits=EpisodeLimits(**limits)
    ).collect(2)
    for rollout in groups.rewarded.rollouts:
        assert rollout.finish_reason == reason
        assert [branch.own_end for branch in rollout.branches] == ends
    assert groups.table.is_truncated.tolist() == [end in CUT_OFF for end in ends] * 6


def test_limits_cut_the_same_rollouts_in_parts_and_over_a_resume():
    """With a budget that ends within turns, between them and at the limit itself."""
    limits = EpisodeLimits(max_sampled_tokens=13)
    make = functools.partial(make_collector, rollout=calculator, limits=limits)
    found = assert_pauses_change_nothing(make, budget=5)
    assert "max_tokens" in {reason for _, reason, *_ in found.values()}


@pytest.mark.parametrize("where", ["here", "worker", "async"])
@pytest.mark.parametrize("name", ["yields_end", "calls_end"])
def test_an_episode_ends_with_the_reason_that_it_gives(load, name, where):
    """Yielded or called before the end, in this process and in another one; only limits count as such."""
    rollout = HERE[name] if where == "here" else load(name + "_async" * (where == "async"))
    collector = make_collector(rollout=rollout, prompts=Prompts(lambda _: 60), group_size=8)
    groups = collector.collect(4)
    rollouts = groups.rewarded.rollouts
    keys = [collector._prompts.key(rollout.rollout_id) for rollout in rollouts]
    reasons = [rollout.finish_reason for rollout in rollouts]
    assert reasons == [END_REASONS[key % len(END_REASONS)] for key in keys]
    assert {*reasons} == {*END_REASONS}
    assert groups.table.is_truncated.tolist() == [reason in CUT_OFF for reason in reasons]
    assert {num_sampled(rollout) for rollout in rollouts} == {3}


def test_a_function_that_has_yielded_its_end_is_closed():
    prompts = Prompts(lambda _: 60, num_rows=2)
    rollouts_of(HERE["yields_end"], 2, prompts=prompts)
    assert all(prompts.row(i).columns["closed"] for i in range(2))


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        slow({}, "length"),
        ({"max_turns": 3}, "max_turns"),
        ({"max_sampled_tokens": 5}, "max_tokens"),
    ],
)
def test_row_56_each_limit_ends_an_endless_episode_with_its_own_reason(load, limits, reason):
    for rollout in rollouts_of(load("naps"), 1, limits=EpisodeLimits(**limits)):
        assert rollout.finish_reason == reason
        assert rollout.is_truncated


@pytest.mark.parametrize("name", [slow("naps"), "naps_async"])
def test_the_limit_of_seconds_is_of_each_episode_by_itself(load, name):
    """Not of its neighbours in the process, nor of decoding; it ends an episode between turns. Fault 56."""
    for rollout in rollouts_of(load(name), 2, limits=EpisodeLimits(max_seconds=0.1)):
        assert (rollout.finish_reason, rollout.is_truncated) == ("timeout", True)
        assert 2 <= num_sampled(rollout) <= 6
    limits = EpisodeLimits(max_turns=3, max_seconds=1.0)
    began = time.monotonic()
    assert {r.finish_reason for r in rollouts_of(load(name), 8, limits=limits)} == {"max_turns"}
    assert name == "naps_async" or time.monotonic() - began > 8 * 3 * 3 * 0.04


@pytest.mark.slow
def test_an_episode_in_flight_that_has_used_up_its_seconds_comes_back(load):
    """Its function runs again and takes as long, which must not refuse the checkpoint. Fault 56."""
    prompts = Prompts(lambda rollout_id: 10 + 6 * rollout_id.prompt_ordinal)
    first, second = (
        make_collector(prompts, rollout=load("naps"), limits=limits, round_tokens=6, max_staleness=8)
        for limits in (EpisodeLimits(max_seconds=60.0), EpisodeLimits(max_seconds=0.01))
    )
    first.collect(2)
    paused = [record for record in rollout_records(first) if record["finish_reason"] is None]
    kept = {
        tuple(record["rollout_id"][:2]): int(record["branches"][0]["loss_mask"].sum()) for record in paused
    }
    assert kept
    for rollout in resumed(first, second).collect(2, weight_version=1).rewarded.rollouts:
        assert rollout.finish_reason == "timeout"
        assert len(rollout.completion) >= kept.get(tuple(rollout.rollout_id)[:2], 1)


@pytest.mark.parametrize(
    ("function", "is_chat"),
    [(calculator, False), (replying, True), (branching, True), (HERE["out_of_order"], True)],
    ids=["text", "messages", "branches", "out of order"],
)
def test_row_61_the_record_of_an_episode_has_the_tokens_of_each_branch_in_order(function, is_chat):
    """The segments are the runs of the loss mask, except for adjacent turns; texts are those of the ids.

    A branch's begin with its prompt, if that is not the row's. They outlive a checkpoint.
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
        finished = finished_record(rollout)
        again = finished_rollout(finished | {"episode": json.loads(json.dumps(finished["episode"]))})
        assert again.episode == rollout.episode
        assert view_of(again, prompt, prompts.tokenizer) == view


def test_the_messages_of_a_record_are_those_of_the_episode():
    roles = ["user", "assistant", "tool", "tool", "tool", "assistant", "user", "assistant"]
    prompts = chat_prompts(200)
    for rollout in rollouts_of(replying, prompts=prompts):
        messages = view_of(rollout, "", prompts.tokenizer)["messages"]
        assert [message["role"] for message in messages] == roles[: len(messages)]


def test_row_61_branches_are_in_order_of_their_numbers_in_whatever_order_they_had_turns(load):
    """In a separate process, too."""
    here, in_worker = (
        rollouts_of(f, prompts=chat_prompts()) for f in (HERE["out_of_order"], load("out_of_order"))
    )
    assert [rollout.episode for rollout in in_worker] == [rollout.episode for rollout in here]
    for rollout in here:
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
        add_rollouts(metrics, rollouts, grouped_rewards=rewards, branch_rewards=rewards)
        others = {"count/sampled_tokens": 0.0, "time/step": 1.0}
        return derived(metrics.reduce() | others)

    return metrics_of_step


def test_metrics_tell_sampled_tokens_from_those_of_the_environment(metrics_of):
    rollouts = rollouts_of(endless, limits=EpisodeLimits(max_sampled_tokens=10))
    rollouts = [*rollouts[:9], *(replace(rollout, finish_reason="env_done") for rollout in rollouts[9:])]
    found = metrics_of(rollouts)
    assert found["len/mean"] == found["len/max"] == 10
    assert found["count/tokens"] == 10 * 12
    assert found["env/tokens"] == sum(len(r.completion) for r in rollouts) - 120
    assert found["env/turns_mean"] == 2
    assert (found["finish/max_tokens"], found["finish/env_done"]) == (9 / 12, 3 / 12)
    assert found["len/truncated"] == 9 / 12
    plain = metrics_of(rollouts_of(one_turn))
    assert not any(name.startswith("env/") for name in plain)
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
