"""Rewards of single calls, and rollouts in two branches."""

from dataclasses import replace

import torch

from minirl.rewards.functions import arguments_of, judged
from minirl.rewards.reward_workers import RewardWorkers


def rewards_of_call(function, row, completions):
    """The rewards that a function gives to completions of a row in one call."""
    is_text = isinstance(row.prompt, str)
    count = len(completions)
    given = {name: [value] * count for name, value in row.columns.items()}
    given["prompts"] = [row.prompt] * count
    given["completions"] = [
        text if is_text else [{"role": "assistant", "content": text}] for text in completions
    ]
    given["completion_ids"] = [[7]] * count
    arguments = arguments_of(function, given, row.columns)
    if isinstance(function, RewardWorkers):
        return function.submit(arguments, row.place, completions).result()
    return judged(function, arguments, row.place, completions)


def in_two_branches(rollout):
    """The rollout in two branches: the prompt of the second one is all that came before. One token stays as it is."""
    places = rollout.loss_mask.nonzero()[:, 0]
    if len(places) < 2:
        return rollout
    cut = int(places[len(places) // 2])
    is_second = torch.arange(len(rollout.tokens)) >= cut
    first = replace(
        rollout,
        tokens=rollout.tokens[:cut],
        loss_mask=rollout.loss_mask[:cut],
        sample_logprobs=rollout.sample_logprobs[:cut],
        weight_version=rollout.weight_version[:cut],
        finish_reason="stop",
    )
    return replace(
        rollout,
        loss_mask=rollout.loss_mask & is_second,
        sample_logprobs=rollout.sample_logprobs * is_second,
        weight_version=rollout.weight_version * is_second,
        num_prompt_tokens=cut,
        rollout_id=rollout.rollout_id._replace(branch=1),
        earlier=(first,),
    )
