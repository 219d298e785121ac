"""Rewards from rollout functions, reward functions of whole groups, and the arguments that they get from episodes."""

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
    """Sample three turns; give "early" by their lengths, and return "total"."""
    episode.reward(0.5, "early")
    await episode.generate(max_tokens=5, stop="e")
    episode.reward(len(episode.turns[-1].ids), "early")
    episode.reward(10, "early")
    await episode.generate(after="abc", max_tokens=4)
    await episode.generate(after="d", max_tokens=6, stop=["a", "b"])
    episode.reward(100.0, "early")
    return {"total": float(sum(episode.turns[-1].ids)), "early": 1000.0}


async def rewriting(episode):
    """Sample two branches, of which the second may be truncated; give and return rewards."""
    other = episode.branch("abc")
    await episode.generate(max_tokens=2)
    episode.reward(1.0)
    await other.generate(max_tokens=2)
    episode.reward(0.5)
    await other.generate(after="de")
    return episode.seed % 5


def test_an_episode_that_hits_a_limit_keeps_its_rewards_and_accepts_no_more():
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
    """Collect two groups; return each branch's mean GRPO advantage, PPO's returns, and the groups."""
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


def test_each_branch_gets_its_rollouts_reward_and_is_bootstrapped_if_truncated(one_rank):
    """In GRPO a branch has its rollout's advantage; in PPO it gets the reward at its last token. The recursion is

    A_t = r_t + gamma V_end + gamma lambda A_(t+1), where all values are 0 except 7 after the end.
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
    """Sample two turns in two branches, each with a reward in `extra` that only a fork of the script uses."""
    turn = await episode.generate(max_tokens=2)
    turn.extra["reward"] = 1.0
    turn = await episode.branch("abc").generate(max_tokens=3)
    turn.extra["reward"] = float(episode.seed % 5)


def test_a_fork_rewards_each_turn_with_the_value_in_turn_extra(tmp_path):
    """The reward is at the turn's last token."""
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


def test_a_reward_function_sees_its_prompts_episodes_and_episode_rewards_are_reward_columns(load_reward):
    """A worker gets all rollouts of a prompt in one call, greedy ones included. The functions recompute `giving`."""
    by_hand = {f"{name} by hand": load_reward(name) for name in OF_EPISODE}
    functions = {"size": load_reward("size"), **by_hand, **OF_EPISODE}
    groups = make_collector(functions=functions, rollout=giving, num_greedy=1).collect(5)
    for rewards in (groups.rewards, groups.greedy_rewards):
        assert rewards[..., 0].unique().tolist() == [4.0]
        assert torch.equal(rewards[..., 1:3], rewards[..., 3:])
        assert len(rewards[..., 1].unique()) > 3


# The arguments of reward functions.


def test_reward_functions_get_messages_and_given_rewards_by_name_and_chat_completions_as_in_trl():
    """In a chat, the completion is the episode's messages after the prompt, including tool results.

    A data column takes precedence over an episode argument of the same name.
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
