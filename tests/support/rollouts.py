"""Prompts and rollouts of letters, and rollouts in two branches."""

from dataclasses import replace

import torch

from minirl.data.prompts import PromptStream
from minirl.data.tokenizer import Tokenizer
from minirl.rewards.functions import arguments_of, judged
from minirl.rewards.reward_queue import RewardQueue
from minirl.rewards.reward_workers import RewardWorkers
from minirl.rollouts import Rollout, RolloutId
from support.texts import ids, save_tokenizer


def make_prompts(folder, rows):
    """The policy's prompts: its own tokenizer numbers the letters as `ids` does."""
    save_tokenizer(folder, None)
    return PromptStream(rows, Tokenizer(folder), purpose="train", max_tokens=60, max_new_tokens=20)


def make_rollout(prompts, ordinal, sample, completion):
    """A rollout of the `ordinal`-th prompt whose completion is this text, specials written out, in the policy's ids."""
    prompt, sampled = prompts.prompt_ids(ordinal), ids(completion)
    tokens = torch.tensor([*prompt, *sampled])
    mask, length = torch.arange(len(tokens)) >= len(prompt), len(tokens)
    streams = (mask, torch.zeros(length), torch.zeros(length, dtype=torch.int32))
    return Rollout(tokens, *streams, len(prompt), RolloutId(ordinal, sample), "stop")


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
    return judged(getattr(function, "__name__", "f"), function, arguments, row.place, completions)


def reward_rollouts(functions, prompts, rollouts):
    """The rewards of these rollouts by a queue that gets them prompt by prompt."""
    queue = RewardQueue(functions, prompts)
    groups = {}
    for rollout in rollouts:
        groups.setdefault(rollout.rollout_id.prompt_ordinal, []).append(rollout)
    for group in groups.values():
        queue.add(group)
        queue.poll()
    return queue.finish(groups)


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
