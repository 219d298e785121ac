"""Prompts and rollouts of letters."""

import torch

from minirl.data.prompts import PromptStream
from minirl.data.tokenizer import Tokenizer
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
