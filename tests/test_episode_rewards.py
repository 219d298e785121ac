"""Rewards from rollout functions, reward functions of whole groups, and the arguments that they get from episodes."""

from dataclasses import replace

import pytest
import torch

from minirl.errors import InputError
from minirl.rewards.functions import EpisodeReward
from minirl.rollouts import all_branches
from minirl.training.batch import pack
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


def test_an_episode_that_hits_a_limit_keeps_its_rewards_and_accepts_no_more():
    refused = []

    async def mine(episode):
        try:
            while True:
                await episode.generate(max_tokens=3)
                episode.reward(1.0, "early")
        finally:
            with pytest.raises(InputError, match="the episode has ended; set rewards before `await"):
                episode.reward(1.0, "total")
            refused.append(True)

    groups = make_collector(functions=OF_EPISODE, rollout=mine, max_turns=4).collect(2)
    assert groups.rewards.view(-1, 2).tolist() == [[0.0, 4.0]] * 6
    assert {r.finish_reason for r in groups.rollouts} == {"max_turns"}
    assert len(refused) == 6


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
    rollouts = make_collector(Prompts(lambda _: 5), rollout=noting).collect(2).rollouts
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
    """A worker gets all rollouts of a prompt in one call, even greedy ones. The functions recompute `giving`."""
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
