"""Rewards of single calls, sampled tokens, and rollouts in two branches."""

from dataclasses import replace

from minirl.rewards.functions import arguments_of, scored_here
from minirl.rewards.reward_workers import RewardWorkers
from minirl.rollouts import rollout_of, unsampled


def rewards_of_call(function, row, completions):
    """The rewards that a function gives to completions of a row in one call."""
    is_text = isinstance(row.prompt, str)
    count = len(completions)
    same = {**row.columns, "prompts": row.prompt, "completion_ids": [7]}
    given = {name: [value] * count for name, value in same.items()}
    given["completions"] = [
        text if is_text else [{"role": "assistant", "content": text}] for text in completions
    ]
    arguments = arguments_of(function, given)
    if isinstance(function, RewardWorkers):
        return function.submit(arguments, row.place, completions).result()
    return scored_here(getattr(function, "__name__", "f"), function, arguments, row.place, completions)


def sampled(ids, *, logprobs=0.0, versions=0):
    """These ids as if they were sampled."""
    stream = unsampled(ids)
    stream["is_sampled"], stream["logprob"], stream["weight_version"] = True, logprobs, versions
    return stream


def in_two_branches(rollout):
    """The rollout in two branches: the prompt of the second one is all that came before. One token stays as it is."""
    places = rollout.loss_mask.nonzero()[0]
    if len(places) < 2:
        return rollout
    cut = int(places[len(places) // 2])
    first = replace(rollout, stream=rollout.stream[:cut], finish_reason="stop")
    last_id = rollout.rollout_id._replace(branch=1)
    last = rollout_of(last_id, rollout.tokens[:cut], rollout.stream[cut:], rollout.finish_reason)
    return replace(last, earlier=(first,))
