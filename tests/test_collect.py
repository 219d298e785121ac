"""The collector and the functions that write rollouts: whole groups, exact over turns, budgets and resumes."""

import functools
import gc
import itertools
import random
import weakref
from dataclasses import replace
from unittest import mock

import pytest
import torch

from minirl.data.prompts import PromptStream
from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.episodes.episode import one_turn
from minirl.episodes.step_groups import select_step
from minirl.generation.engine import Engine
from minirl.rewards.rewarded import RewardedRollouts
from minirl.rollouts import Rollout, RolloutId
from support.collecting import (
    CHAT,
    MAX_NEW_TOKENS,
    Prompts,
    assert_pauses_change_nothing,
    branching,
    chat_prompts,
    end_of,
    facts,
    letter_tokenizer,
    make_collector,
    replies_of,
    replying,
    resumed,
    sums,
)
from support.engines import VOCAB, cached_model, make_engine, scores_of
from support.marks import slow
from support.rollouts import in_two_branches


def test_one_turn_is_what_the_engine_samples_with_its_rewards():
    """The reference: requests run by the engine alone, rewarded afterwards. It takes no process group."""
    collector = make_collector(num_greedy=1)
    groups = collector.collect(5)
    requests = Prompts().requests(0, 5, group_size=3, num_greedy=1)
    expected = make_engine(cached_model("mixed", torch.float32)).generate(requests)
    rewards = torch.tensor(sums([rollout.completion for rollout in expected])).double().view(5, 4)
    trained = [rollout for rollout in expected if rollout.rollout_id.sample < 3]
    assert [facts(rollout) for rollout in groups.rewarded.rollouts] == [facts(rollout) for rollout in trained]
    assert torch.equal(groups.rewards[:, :, 0], rewards[:, :3])
    assert torch.equal(groups.greedy_rewards[:, :, 0], rewards[:, 3:])
    assert groups.table.num_tokens.tolist() == [len(rollout.tokens) for rollout in trained]
    assert collector.num_served == 5
    assert collector.take_count("sampled_tokens") == sum(len(rollout.completion) for rollout in expected)


def test_an_episode_costs_what_is_asked_of_it():
    """Of one answer the text for its reward; it leaves the engine with the others, and needs no garbage collection."""
    left = []

    async def watched(episode):
        left.append(weakref.ref(episode))
        await episode.generate()

    collector = make_collector(rollout=watched, group_size=4)
    release = collector.engine.release
    gc.disable()
    try:
        with (
            mock.patch.object(Tokenizer, "decode_known", autospec=True, side_effect=lambda *_: "") as decode,
            mock.patch.object(collector.engine, "release", side_effect=release) as released,
        ):
            groups = collector.collect(4)
        assert [episode() for episode in left] == [None] * 16
    finally:
        gc.enable()
    assert decode.call_count == len(groups.rewarded.rollouts) == 16
    assert sum(len(call.args) for call in released.call_args_list) == 16
    assert released.call_count <= collector.engine.stats.decode_steps


def assert_scored_as_sampled(rollout: Rollout, attention: str) -> None:
    """Training's logprobs of a rollout are the sampled ones, bit for bit."""
    with torch.no_grad():
        logprobs = scores_of(cached_model(attention, torch.float32), [rollout])
    assert torch.equal(logprobs, rollout.sample_logprobs)
    assert not rollout.sample_logprobs[~rollout.loss_mask].any()


@pytest.mark.parametrize("attention", [slow("full"), "mixed"])
def test_messages_are_appended_behind_the_ids_that_were_sampled_and_close_each_turn_once(attention):
    endings = set()

    async def watched(episode):
        await replying(episode)
        first, second, third, fourth = episode.turns
        ids = functools.partial(letter_tokenizer().encode_text, place="f:1")
        results, question = replies_of(episode)
        written = "".join(f"<turn>t:{m['content']}<eos>" for m in results)
        expected = [*first.ids, *end_of(first), *ids(f"{written}<turn>a:")]
        expected += [*second.ids, *ids(" yes, "), *third.ids, *end_of(third)]
        expected += [*ids(f"<turn>u:{question['content']}<eos><turn>a:"), *fourth.ids]
        assert episode.tokens == expected
        sampled = itertools.compress(episode.tokens, episode.loss_mask)
        assert list(sampled) == list(itertools.chain(*(turn.ids for turn in episode.turns)))
        answers = [first.text, f"{second.text} yes, {third.text}", fourth.text]
        said = [{"role": "assistant", "content": text} for text in answers]
        prompt = {"role": "user", "content": episode.row.prompt}
        assert episode.messages == [prompt, said[0], *results, said[1], question, said[2]]
        endings.update((turn.finish_reason, len(end_of(turn))) for turn in (first, third))

    collector = make_collector(chat_prompts(200), rollout=watched, attention=attention)
    for rollout in collector.collect(20).rewarded.rollouts:
        assert_scored_as_sampled(rollout, attention)
    assert endings == {("stop", 0), ("stop", 1), ("length", 1)}


@pytest.mark.parametrize(("stop", "behind"), [([], "zu:hiza:"), (["z"], "u:hiza:")])
def test_what_begins_a_message_is_left_out_where_a_turn_ended_with_it_and_not_where_it_was_cut_there(
    stop, behind
):
    template = "{% for m in messages %}z{{ m.role[0] }}:{{ m.content }}{% endfor %}za:"
    seen = []

    async def watched(episode):
        await episode.generate(max_tokens=1, stop=stop)
        for _ in range(10):
            end = len(episode.tokens)
            await episode.generate(after={"role": "user", "content": "hi"}, max_tokens=1, stop=stop)
            previous, turn = episode.turns[-2:]
            if previous.text == "z":
                seen.append(letter_tokenizer().decode(episode.tokens[end : -len(turn.ids)]))

    make_collector(chat_prompts(200, template), rollout=watched).collect(20)
    assert set(seen) == {behind}


@pytest.mark.parametrize("attention", [slow("full"), "mixed"])
def test_each_branch_has_the_tokens_that_its_episode_asked_for_and_the_logprobs_of_training(attention):
    seen = []

    async def watched(episode):
        await branching(episode)
        seen.append(episode)

    collector = make_collector(chat_prompts(), rollout=watched, attention=attention)
    rollouts = collector.collect(10).rewarded.rollouts
    by_key = {episode.seed: episode for episode in seen}
    for rollout in rollouts:
        episode = by_key[collector._prompts.key(rollout.rollout_id._replace(branch=0))]
        numbers = [0, 1, 3] if episode.turns else [1, 3]
        assert [branch.rollout_id.branch for branch in rollout.branches] == numbers
        for branch in rollout.branches:
            asked = episode.branches[branch.rollout_id.branch]
            prompt = letter_tokenizer(CHAT, chat=True).encode(Row(asked.prompt, {}, "f:1"))
            assert branch.tokens[: branch.num_prompt_tokens].tolist() == prompt
            assert branch.tokens[branch.num_prompt_tokens :].tolist() == asked.tokens
            assert_scored_as_sampled(branch, attention)
            assert branch.sample_logprobs[branch.num_prompt_tokens :].tolist() == asked.logprobs


def test_row_61_a_branch_has_the_messages_that_it_began_with():
    """Its caller may go on with the list that it gave."""
    seen = []

    async def going_on(episode):
        messages = [{"role": "user", "content": "abc"}]
        branch = episode.branch(messages)
        messages.append({"role": "assistant", "content": "not said"})
        await branch.generate(max_tokens=3)
        messages[0]["content"] = "xyz"
        await branch.generate(after="d", max_tokens=3)
        seen.append(branch.messages)

    prompts = chat_prompts()
    rollouts = make_collector(prompts, rollout=going_on).collect(1).rewarded.rollouts
    assert [prompts.messages(rollout) for rollout in rollouts] == seen
    for messages in seen:
        assert [message["role"] for message in messages] == ["user", "assistant"]
        assert messages[0]["content"] == "abc"


def test_branches_of_an_episode_have_noise_of_their_own():
    async def twins(episode):
        for _ in range(3):
            await episode.branch(episode.prompt).generate(max_tokens=20)

    (rollout, *_) = make_collector(chat_prompts(), rollout=twins).collect(1).rewarded.rollouts
    assert len({tuple(branch.completion) for branch in rollout.branches}) == 3
    prompts = {tuple(branch.tokens[: branch.num_prompt_tokens].tolist()) for branch in rollout.branches}
    assert len(prompts) == 1


def test_an_episode_whose_further_branch_has_no_room_ends_with_length():
    async def long(episode):
        await episode.generate(max_tokens=3)
        await episode.branch("a" * 100).generate()

    (rollout, *_) = make_collector(Prompts(), rollout=long).collect(1).rewarded.rollouts
    assert (rollout.finish_reason, len(rollout.branches)) == ("length", 1)
    assert rollout.own_end in ("stop", "turn_length")


def test_an_answer_that_the_prompt_begins_is_one_message_with_it():
    begun = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "it is"}]
    tokenizer = letter_tokenizer(CHAT)
    prompts = PromptStream(
        [Row(begun, {}, "f:1")],
        tokenizer,
        purpose="train",
        max_tokens=90,
        max_new_tokens=60,
        vocab_size=VOCAB,
    )

    async def watched(episode):
        assert episode.messages == begun
        turn = await episode.generate(max_tokens=5)
        assert episode.messages == [begun[0], {"role": "assistant", "content": "it is" + turn.text}]

    collector = make_collector(prompts, rollout=watched)
    assert len(collector.collect(1).rewarded.rollouts) == 3


def test_an_episode_ends_with_length_where_what_it_appends_leaves_no_room():
    async def talkative(episode):
        await episode.generate(max_tokens=8)
        await episode.generate(after="a" * (MAX_NEW_TOKENS - 8))
        raise AssertionError("there was no room")

    collector = make_collector(Prompts(lambda rollout_id: MAX_NEW_TOKENS), rollout=talkative)
    for rollout in collector.collect(2).rewarded.rollouts:
        assert (len(rollout.completion), rollout.finish_reason) == (8, "length")


def test_an_episode_keeps_its_tokens_once_however_many_turns_it_has(monkeypatch):
    """The engine returns all tokens of a branch with each turn; they are not kept once for each turn."""
    returned, num_kept = [], []
    step = Engine.step

    def noted(engine):
        rollouts = step(engine)
        returned.extend(map(weakref.ref, rollouts))
        return rollouts

    async def patient(episode):
        for _ in range(6):
            await episode.generate(max_tokens=2)
        num_kept.append(sum(rollout() is not None for rollout in returned))
        assert len(episode.tokens) == len(episode.logprobs) == 12

    monkeypatch.setattr(Engine, "step", noted)
    make_collector(Prompts(lambda rollout_id: 20), rollout=patient, group_size=1).collect(1)
    assert len(returned) == 6
    assert num_kept == [1]


@pytest.mark.parametrize(
    ("rollout", "make_prompts", "budget"),
    [(one_turn, Prompts, 7), slow(replying, chat_prompts, 20)],
)
def test_a_budget_a_checkpoint_and_a_small_cache_change_nothing_in_a_rollout(rollout, make_prompts, budget):
    """Other functions are in test_programs. Pitfall 40."""
    tight = {"cache_tokens": 512, "max_running_requests": 5}
    make = functools.partial(make_collector, make_prompts(), rollout=rollout, engine_options=tight)
    assert_pauses_change_nothing(make, budget=budget)


@pytest.mark.parametrize("max_staleness", [slow(1), 3])
def test_no_rollout_is_trained_on_too_late_and_prompts_come_in_order(max_staleness):
    """Each step takes the first complete groups in order, those that would get too old among them. Pitfall 40."""
    lengths = random.Random(max_staleness)
    length_of = {}

    def length(rollout_id):
        return length_of.setdefault(rollout_id, lengths.choice((1, 3, 6, 50)))

    collector = make_collector(Prompts(length), group_size=2, round_tokens=5, max_staleness=max_staleness)
    ages = []
    for step in range(12):
        groups = collector.collect(3, weight_version=step)
        ordinals = groups.table.prompt_ordinal.tolist()
        assert ordinals == sorted(ordinals)
        assert len(set(ordinals)) == 3
        waiting = {r.rollout_id.prompt_ordinal for r in collector._rewarded.rollouts}
        assert not waiting or min(waiting) > max(ordinals)
        for rollout in groups.rewarded.rollouts:
            versions = rollout.weight_version[rollout.loss_mask]
            assert step - int(versions[0]) <= max_staleness
            assert versions.diff().ge(0).all()
            ages.append(step - int(versions[0]))
    assert max(ages) == max_staleness, "the bound was never reached"


def skewed(rollout_id: RolloutId) -> int:
    """2 of 32 are ten times as long."""
    is_long = rollout_id.prompt_ordinal % 2 == 0 and rollout_id.sample == 3
    return 50 if is_long else 5


def decode_steps(num_steps: int, **options) -> list[int]:
    """Of each step that collects 4 groups of 8."""
    prompts = Prompts(skewed, num_rows=100, max_new_tokens=50)
    engine_options = {"cache_tokens": 1 << 14, "max_running_requests": 512}
    collector = make_collector(prompts, group_size=8, engine_options=engine_options, **options)
    counts = []
    for step in range(num_steps):
        collector.collect(4, weight_version=step)
        counts.append(collector._runner._engine.take_stats().decode_steps)
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [2, 8])
def test_rounds_take_a_third_of_the_decode_steps_on_a_skewed_workload(max_staleness):
    """A whole step decodes until its longest completion ends; in rounds that one decodes beside those of later steps.

    Also where the bound makes each step finish groups of an earlier one: these do not decode alone.
    """
    assert decode_steps(2) == [49, 49]
    counts = decode_steps(14, round_tokens=4, max_staleness=max_staleness)
    assert sum(counts[6:]) / 8 < 49 / 3


@pytest.mark.parametrize("later", [0, 1, 3])
def test_no_prompt_is_lost_or_served_twice_by_resumes(later):
    """With the same `max_staleness`, another, or 0. Prompts in flight begin again, before new ones. Fault 12."""
    lengths = random.Random(0)
    length_of = {}

    def length(rollout_id):
        return length_of.setdefault(rollout_id, lengths.choice((1, 3, 6, 50)))

    def make(max_staleness):
        return make_collector(Prompts(length), group_size=2, round_tokens=5, max_staleness=max_staleness)

    trained = []
    collector = make(3)
    for number in range(4):
        for _ in range(3):
            trained += collector.collect(3).table.prompt_ordinal[::2].tolist()
        before = collector.in_flight
        assert sorted(trained + before) == list(range(collector.num_served))
        assert before or number, "nothing was in flight"
        collector = resumed(collector, make(later))
        assert collector.in_flight == before
    collector.close()


ONE = torch.ones(1, dtype=torch.float64)


def make_rewarded(rewards_of: dict[int, list[float]], num_tokens: int = 1) -> RewardedRollouts:
    """By prompt the rewards of its rollouts, each with this number of tokens after a prompt of one."""
    length = 1 + num_tokens
    rollouts, rewards = [], []
    for ordinal, values in rewards_of.items():
        for sample, value in enumerate(values):
            mask = torch.arange(length) > 0
            streams = (torch.arange(length), mask, -mask.float(), mask.int())
            rollouts.append(Rollout(*streams, 1, RolloutId(ordinal, sample), "stop"))
            rewards.append([value])
    rows = [Row("a", {}, "f:1")] * len(rollouts)
    return RewardedRollouts(rollouts, rows, ["b"] * len(rollouts), torch.tensor(rewards).double().view(-1, 1))


@pytest.mark.parametrize(
    ("num_groups", "replaces_equal", "taken", "left", "num_missing"),
    [
        (2, False, [3, 7], [9, 12], 0),
        (5, False, [3, 7, 9, 12], [], 1),
        # Groups without signal are replaced, fill up the step, or are dropped.
        (2, True, [7, 12], [], 0),
        (3, True, [3, 7, 12], [], 1),
        (5, True, [3, 7, 9, 12], [], 3),
    ],
)
def test_the_first_groups_are_selected(num_groups, replaces_equal, taken, left, num_missing):
    rewards = {3: [1, 1], 7: [0, 1], 9: [2, 2], 12: [5, 6]}
    selection = select_step(
        make_rewarded(rewards), num_groups, 2, reward_weights=ONE, replaces_equal=replaces_equal
    )
    assert selection.num_missing == num_missing
    assert selection.num_selected == len(taken)
    assert selection.groups.table.prompt_ordinal.tolist() == [i for i in taken for _ in range(2)]
    assert selection.groups.rewards[:, :, 0].tolist() == [rewards[i] for i in taken]
    assert [r.rollout_id.prompt_ordinal for r in selection.left.rollouts] == [
        i for i in left for _ in range(2)
    ]
    assert selection.ended == rewards.keys() - {*left}
    empty = select_step(make_rewarded({}), num_groups, 2, reward_weights=ONE, replaces_equal=replaces_equal)
    assert (empty.num_selected, empty.num_missing) == (0, num_groups)


def test_groups_count_rollouts_and_have_all_their_branches():
    """Two branches of one rollout are not two rollouts; one row for each, but one reward, length and text for both."""
    pool = make_rewarded({3: [1, 1], 7: [0, 1]}, num_tokens=2)
    pool = replace(
        pool, rollouts=[in_two_branches(r) if r.rollout_id.sample == 0 else r for r in pool.rollouts]
    )
    selection = select_step(pool, 3, 1, 1, reward_weights=ONE)
    groups = selection.groups
    assert groups.table.ids == [RolloutId(prompt, 0, branch) for prompt in (3, 7) for branch in (0, 1)]
    assert groups.table.rollout.tolist() == [0, 0, 1, 1]
    assert groups.rewards[:, :, 0].tolist() == groups.scores.tolist() == [[1], [0]]
    assert groups.num_loss_tokens.tolist() == [[2], [2]]
    assert groups.greedy_rewards[:, :, 0].tolist() == [[1], [1]]
    assert [r.rollout_id for r in groups.rewarded.rollouts] == [RolloutId(3, 0, 1), RolloutId(7, 0, 1)]
    assert [len(r.branches) for r in groups.rewarded.rollouts] == [2, 2]
    assert selection.left.rollouts == []
    assert (selection.num_selected, selection.num_missing) == (2, 1)


def test_refills_come_from_new_prompts_and_end():
    """Each round asks for as many prompts as groups are missing; equal groups fill up after the last one."""
    functions = {"equal": lambda completions: [1.0] * len(completions)}
    collector = make_collector(Prompts(lambda _: 5), functions=functions, group_size=2, max_refills=3)
    groups = collector.collect(4)
    assert groups.table.prompt_ordinal.tolist() == list(itertools.chain(*((i, i) for i in range(4))))
    assert collector.num_served == 4 * 4
    assert collector.collect(4).table.prompt_ordinal.tolist()[0] == 16
