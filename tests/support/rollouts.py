"""Make sampled tokens and rollouts with one or two branches, and call reward functions."""

from dataclasses import replace
from types import SimpleNamespace

from minirl.rewards.functions import FunctionReward, PromptGroup, Reward
from minirl.rollouts import Rollout, RolloutId, SampledSequence, concat_tokens, make_token_stream


def rewards_of_call(function, row, completions):
    """Return a function's rewards for completions of one row, in one call."""
    rollouts = [rollout_of(RolloutId(0, 0), [5], make_token_stream([7]), "stop")] * len(completions)
    texts = iter(completions)
    tokenizer = SimpleNamespace(decode=lambda ids: next(texts))
    reward = function if isinstance(function, Reward) else FunctionReward(function)
    return reward.submit("mine", PromptGroup(row, rollouts, completions, tokenizer)).result()


def sampled(ids, *, logprobs=0.0, versions=0):
    """Return these ids as a stream of sampled tokens."""
    stream = make_token_stream(ids)
    stream["is_sampled"], stream["logprob"], stream["weight_version"] = True, logprobs, versions
    return stream


def rollout_of(rollout_id, prompt_ids, completion, finish_reason):
    """Return a rollout with this prompt and completion."""
    stream = concat_tokens(make_token_stream(prompt_ids), completion)
    return Rollout((SampledSequence(stream, len(prompt_ids), rollout_id, finish_reason),), finish_reason)


def in_two_branches(rollout):
    """Split a rollout into two branches; the second branch's prompt is everything before. Single tokens stay whole."""
    (branch,) = rollout.branches
    places = branch.loss_mask.nonzero()[0]
    if len(places) < 2:
        return rollout
    cut = int(places[len(places) // 2])
    first = replace(branch, stream=branch.stream[:cut], finish_reason="stop")
    last_id = branch.rollout_id._replace(branch=1)
    last = rollout_of(last_id, branch.tokens[:cut], branch.stream[cut:], branch.finish_reason)
    return replace(rollout, branches=(first, *last.branches))
