"""Rewards that rollout functions return or give, rewards of whole groups, and what reward functions get of episodes."""

from dataclasses import replace

import pytest
import torch

import train_grpo
import train_ppo
from minirl.errors import InputError
from minirl.rewards.functions import EpisodeReward
from minirl.rollouts import all_branches
from minirl.training.batch import exchange, pack
from minirl.training.losses import sequence_sums
from support.collecting import (
    Prompts,
    chat_prompts,
    make_collector,
)
from support.scripts import ROOT, load_script, patched_fork
from support.texts import user

OF_EPISODE = {"total": EpisodeReward("total"), "early": EpisodeReward("early")}


async def giving(episode):
    """Three turns; "early" is what their lengths say, "total" is returned."""
    episode.reward(0.5, "early")
    await episode.generate(max_tokens=5, stop="e")
    episode.reward(len(episode.turns[-1].ids), "early")
    episode.reward(10, "early")
    await episode.generate(after="abc", max_tokens=4)
    await episode.generate(after="d", max_tokens=6, stop=["a", "b"])
    episode.reward(100.0, "early")
    return {"total": float(sum(episode.turns[-1].ids)), "early": 1000.0}


async def rewriting(episode):
    """Two branches, the second of which may be cut off; rewards given in both and returned."""
    other = episode.branch("abc")
    await episode.generate(max_tokens=2)
    episode.reward(1.0)
    await other.generate(max_tokens=2)
    episode.reward(0.5)
    await other.generate(after="de")
    return episode.seed % 5


def test_an_episode_that_ends_at_a_limit_has_what_it_gave_and_nothing_can_be_given_behind_it():
    refused = []

    async def mine(episode):
        try:
            while True:
                await episode.generate(max_tokens=3)
                episode.reward(1.0, "early")
        finally:
            with pytest.raises(InputError, match="the episode has ended; give rewards before `await"):
                episode.reward(1.0, "total")
            refused.append(True)

    groups = make_collector(functions=OF_EPISODE, rollout=mine, max_turns=4).collect(2)
    assert groups.rewards.view(-1, 2).tolist() == [[0.0, 4.0]] * 6
    assert {r.finish_reason for r in groups.rewarded.rollouts} == {"max_turns"}
    assert len(refused) == 6


def branches_of_a_step(rank):
    """Of two groups: the mean advantage that GRPO gives each branch, PPO's returns, and the groups."""
    prompts = Prompts(lambda rollout_id: 5)
    groups = make_collector(prompts, functions={"reward": EpisodeReward()}, rollout=rewriting).collect(2)
    batch = exchange(groups.rewarded.rollouts, [[[groups.sequences]]])
    stream = train_grpo.token_advantages(train_grpo.Config(), groups, batch)
    means = sequence_sums(stream, batch.lengths) / batch.num_loss_tokens
    config = train_ppo.Config(gamma=0.5, gae_lambda=0.5, bootstrap_truncated=True)
    zeros, sevens = torch.zeros(len(batch.tokens)), torch.full((12,), 7.0)
    batch = batch.replace(values=zeros)
    _, returns = train_ppo.advantages_and_returns(config, groups.weighted_rewards, zeros, sevens, batch)
    return means, returns.split(batch.num_loss_tokens.tolist()), groups


def test_each_branch_is_trained_with_its_rollouts_reward_and_bootstrapped_if_it_was_cut_off(one_rank):
    """A branch has its rollout's advantage in GRPO; in PPO it is paid the reward at its own end. By the recursion:

    A_t = r_t + gamma V_end + gamma lambda A_(t+1), with values of 0 except of 7 after the end.
    """
    ((means, returns, groups),) = one_rank.run(branches_of_a_step)
    scores = groups.weighted_rewards
    assert scores.flatten().tolist() == [r.episode.rewards["reward"] for r in groups.rewarded.rollouts]
    assert len(scores.unique()) > 2
    expected = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    torch.testing.assert_close(means.view(6, 2), expected.view(6, 1).expand(6, 2), rtol=0, atol=1e-9)
    for score, first, second in zip(scores.flatten().tolist(), returns[::2], returns[1::2], strict=True):
        assert first.tolist() == [score / 4, score]
        assert second.tolist() == [(score + 3.5) / 16, (score + 3.5) / 4, score + 3.5]


async def noting(episode):
    """Two turns in two branches, each with a reward that only a fork of the script uses."""
    turn = await episode.generate(max_tokens=2)
    turn.extra["reward"] = 1.0
    turn = await episode.branch("abc").generate(max_tokens=3)
    turn.extra["reward"] = float(episode.seed % 5)


def test_a_fork_pays_each_turn_the_reward_that_its_function_noted(tmp_path):
    """At its last token."""
    ppo = load_script(
        patched_fork(tmp_path, ROOT / "docs/examples/turn_rewards_ppo.patch", name="turn_rewards")
    )
    rollouts = make_collector(Prompts(lambda _: 5), rollout=noting).collect(2).rewarded.rollouts
    paid = ppo.turn_rewards(rollouts)[pack(all_branches(rollouts)).loss_mask].view(-1, 5)
    seconds = [rollout.episode.turns[1].extra["reward"] for rollout in rollouts]
    assert paid.tolist() == [[0, 1, 0, 0, second] for second in seconds]


# Groups


SOURCE = """
def size(episodes):
    return [float(len(episodes))] * len(episodes)

def total(episodes):
    return [float(sum(one["tokens"][-one["turns"][-1]["num_tokens"] :])) for one in episodes]

def early(episodes):
    return [0.5 + one["turns"][0]["num_tokens"] + 10 + 100 + 1000 for one in episodes]
"""


def test_a_function_of_episodes_gets_all_of_a_prompt_and_what_is_returned_and_given_are_columns(load_reward):
    """In a worker, at once; the greedy one is scored with the others. Here functions compute what `giving` gives."""
    by_hand = {f"{name} by hand": load_reward(name) for name in OF_EPISODE}
    functions = {"size": load_reward("size"), **by_hand, **OF_EPISODE}
    groups = make_collector(functions=functions, rollout=giving, num_greedy=1).collect(5)
    for rewards in (groups.rewards, groups.greedy_rewards):
        assert rewards[..., 0].unique().tolist() == [4.0]
        assert torch.equal(rewards[..., 1:3], rewards[..., 3:])
        assert len(rewards[..., 1].unique()) > 3


# The arguments of functions.


def test_functions_that_name_them_get_messages_and_what_was_given_and_chats_have_completions_as_in_trl():
    """In a chat the completion is the episode's own messages after the prompt, with tool results between.

    A field of the data is given before what episodes have by its name.
    """
    conversations, seen = {}, {}

    async def chatting(episode):
        await episode.generate(max_tokens=5)
        episode.reward(episode.seed % 7, "early")
        if episode.seed % 2:
            await episode.generate(after={"role": "tool", "content": "four"}, max_tokens=4)
        conversations[tuple(episode.tokens)] = episode.messages, {"early": episode.seed % 7}

    def mine(prompts, completions, episodes, environments, **others):
        assert sorted(others) == ["answer", "completion_ids"]
        assert set(environments) == {"of the file"}
        for asked, said, episode in zip(prompts, completions, episodes, strict=True):
            assert [*asked, *said] == episode["messages"]
            seen[tuple(episode["tokens"])] = episode["messages"], episode["rewards"]
        return [0.0] * len(episodes)

    prompts = chat_prompts(200)
    for i, row in enumerate(prompts._rows):
        columns = {**row.columns, "environments": "of the file"}
        asked = [user(row.prompt)]
        prompts._rows[i] = replace(row, prompt=asked, columns=columns)
    functions = {"mine": mine, "early": EpisodeReward("early")}
    make_collector(prompts, functions=functions, rollout=chatting).collect(6)
    assert seen == conversations
