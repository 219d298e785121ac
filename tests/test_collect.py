"""The collector and rollout functions: complete groups, exact logprobs across turns, and staleness."""

import functools
import gc
import itertools
import random
import weakref

import numpy as np
import pytest
import torch

from minirl.data.conversation import rollout_messages
from minirl.data.task import Row
from minirl.errors import InputError
from minirl.rollouts import Rollout, SampledSequence
from support.collecting import (
    CHAT,
    Prompts,
    branching,
    chat_prompts,
    facts,
    letter_tokenizer,
    make_collector,
    sums,
)
from support.engines import cached_model, make_engine, scores_of
from support.marks import slow
from support.texts import TOKENS, assistant, user


def test_one_turn_is_what_the_engine_samples_with_its_rewards():
    """The reference runs the requests on the engine alone and computes rewards afterwards, without a process group."""
    collector = make_collector(num_greedy=1)
    groups = collector.collect(5)
    requests = Prompts().requests(range(5), group_size=3, num_greedy=1)
    expected = make_engine(cached_model("mixed", torch.float32)).generate(requests)
    rewards = torch.tensor(sums([rollout.completion for rollout in expected])).double().view(5, 4)
    trained = [rollout for rollout in expected if rollout.rollout_id.sample < 3]
    rollouts = [Rollout((sequence,), sequence.finish_reason) for sequence in trained]
    assert list(map(facts, groups.rollouts)) == list(map(facts, rollouts))
    assert torch.equal(groups.rewards[:, :, 0], rewards[:, :3])
    assert torch.equal(groups.greedy_rewards[:, :, 0], rewards[:, 3:])
    assert [one.num_tokens for one in groups.sequences] == [len(rollout.tokens) for rollout in trained]
    assert collector.in_flight.num_served == 5
    assert collector.counts["sampled_tokens"] == sum(len(rollout.completion) for rollout in expected)


def test_an_episode_is_freed_with_its_rollout():
    """Freeing an episode needs no garbage collection."""
    episodes = []

    async def noted(episode):
        episodes.append(weakref.ref(episode))
        await episode.generate(max_tokens=2)
        await episode.branch("abc").generate(max_tokens=2)

    gc.disable()
    try:
        make_collector(rollout=noted, group_size=1).collect(1)
        assert [episode() for episode in episodes] == [None]
    finally:
        gc.enable()


def assert_scored_as_sampled(sequence: SampledSequence) -> None:
    """Assert that training reproduces the sampled logprobs of a branch bit for bit."""
    with torch.no_grad():
        logprobs = scores_of(cached_model("mixed", torch.float32), [sequence])
    assert np.array_equal(logprobs, sequence.stream["logprob"])
    assert not sequence.stream["logprob"][~sequence.loss_mask].any()


def test_messages_follow_the_sampled_ids_and_close_each_turn_once():
    """A stop token already closes its turn. Special tokens in messages are plain text.

    Appended text and ids continue an answer; only appended messages end it.
    """
    endings = set()

    async def replying(episode):
        room = episode.remaining_tokens
        first = await episode.generate(max_tokens=15, stop=["ab", "f"])
        contents = (first.text[:2], "", " x<eos>"[: len(first.ids)])
        results = [{"role": "tool", "content": content} for content in contents]
        second = await episode.generate(after=results, max_tokens=episode.seed % 9 + 1)
        third = await episode.generate(after=" yes, ", max_tokens=3)
        fourth = await episode.generate(after=[5, 4], max_tokens=9)
        eos_id = TOKENS.index("<eos>")
        end = [] if first.ids[-1] == eos_id else [eos_id]
        ids = functools.partial(letter_tokenizer().encode_text, origin="f:1")
        written = "".join(f"<turn>t:{content}<eos>" for content in contents)
        expected = [*first.ids, *end, *ids(f"{written}<turn>a:"), *second.ids]
        expected += [*ids(" yes, "), *third.ids, 5, 4, *fourth.ids]
        assert episode.tokens == expected
        assert episode.remaining_tokens == room - len(expected)
        assert episode.turns == [first, second, third, fourth]
        assert len(second.logprobs) == len(second.ids)
        answer = assistant(f"{second.text} yes, {third.text}ba{fourth.text}")
        assert episode.messages[2:] == [*results, answer]
        endings.add((first.finish_reason, len(end)))

    for rollout in make_collector(chat_prompts(200), rollout=replying).collect(20).rollouts:
        assert_scored_as_sampled(*rollout.branches)
    assert endings == {("stop", 0), ("stop", 1), ("length", 1)}


def test_each_branch_has_the_requested_tokens_and_the_training_logprobs():
    seen = {}

    async def watched(episode):
        await branching(episode)
        seen[episode.seed] = episode

    collector = make_collector(chat_prompts(), rollout=watched)
    for rollout in collector.collect(10).rollouts:
        episode = seen[collector._prompts.rng_key(rollout.rollout_id._replace(branch=0))]
        numbers = [0, 1, 3] if episode.turns else [1, 3]
        assert [branch.rollout_id.branch for branch in rollout.branches] == numbers
        for branch in rollout.branches:
            asked = episode.branches[branch.rollout_id.branch]
            prompt = letter_tokenizer(CHAT, chat=True).encode(Row(asked.prompt, {}, "f:1"))
            assert branch.tokens.tolist() == prompt + asked.tokens
            sampled = itertools.chain(*(turn.ids for turn in asked.turns))
            assert branch.tokens[branch.loss_mask].tolist() == list(sampled)
            assert_scored_as_sampled(branch)


def test_row_61_a_branch_has_its_own_noise_and_keeps_its_initial_messages():
    """The caller may modify its list of messages later."""

    async def going_on(episode):
        messages = [user("abc")]
        await episode.branch(messages).generate(max_tokens=20)
        branch = episode.branch(messages)
        messages.append(assistant("not said"))
        await branch.generate(max_tokens=20)
        messages[0]["content"] = "xyz"

    prompts = chat_prompts()
    rollouts = make_collector(prompts, rollout=going_on).collect(1).rollouts
    for rollout in rollouts:
        question, answer = rollout_messages(rollout, prompts.tokenizer)
        assert (question["content"], answer["role"]) == ("abc", "assistant")
        assert answer["content"] != "not said"
    begun = [[branch.completion[:3] for branch in rollout.branches] for rollout in rollouts]
    assert any(first != second for first, second in begun)


def random_length():
    """Return a function that draws the length of each rollout in tokens."""
    lengths = random.Random(0)
    return functools.cache(lambda rollout_id: lengths.choice((1, 3, 6, 50)))


@pytest.mark.parametrize("max_staleness", [slow(1), 3])
def test_no_rollout_is_trained_on_too_late_and_prompts_come_in_order(max_staleness):
    """Each step takes the first complete groups in order, including all expiring groups. Pitfall 40."""
    collector = make_collector(
        Prompts(random_length()), group_size=2, round_tokens=5, max_staleness=max_staleness
    )
    ages = []
    for step in range(12):
        groups = collector.collect(3, weight_version=step)
        ordinals = [info.id.prompt_ordinal for info in groups.rollout_infos]
        assert ordinals == sorted(ordinals)
        assert len(set(ordinals)) == 3
        waiting = {one.rollout.rollout_id.prompt_ordinal for one in collector._rewarded}
        assert not waiting or min(waiting) > max(ordinals)
        assert len(collector.in_flight) - len(waiting) <= 2 * 3, "more than two steps' prompts are open"
        for rollout in groups.rollouts:
            (branch,) = rollout.branches
            versions = branch.stream["weight_version"][branch.loss_mask]
            assert step - int(versions[0]) <= max_staleness
            assert (np.diff(versions) >= 0).all()
            ages.append(step - int(versions[0]))
    assert max(ages) == max_staleness, "the bound was never reached"
    assert collector.engine.take_stats().decode_steps < 12 * 50 / 2, "long rollouts decode alone"
    with pytest.raises(InputError, match="prompts expire, but this step takes only 1"):
        collector.collect(1)
    collector.close()


def test_zero_variance_groups_are_replaced_or_fill_up_the_step():
    """Each refill draws one prompt per missing group. Rollouts keep their rewards and texts.

    The variance of a second reward does not matter. Pitfall 26.
    """
    prompts = Prompts(lambda _: 5)
    with_signal = {prompts.row(i).prompt for i in (1, 4, 6, 7, 8)}
    functions = {"differs": lambda prompts: [0, prompts[0] in with_signal], "shapes": lambda prompts: [0, 1]}
    collector = make_collector(prompts, functions=functions, group_size=2, max_refills=1)
    for taken, num_served in (([0, 1, 4], 5), ([6, 7, 8], 9)):
        groups = collector.collect(3)
        assert [info.id.prompt_ordinal for info in groups.rollout_infos[::2]] == taken
        assert collector.in_flight.num_served == num_served
        expected = [[0, prompts.row(i).prompt in with_signal] for i in taken]
        assert groups.rewards[:, :, 0].tolist() == expected
        assert [rewards[0] for _, _, rewards in groups.rewarded_rollouts] == list(itertools.chain(*expected))
        for rollout, text, _ in groups.rewarded_rollouts:
            assert text == prompts.tokenizer.decode(rollout.completion)
