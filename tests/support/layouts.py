"""Packed layouts in which sequences share prompts."""

import random

import torch

from minirl.training.assignment import PromptPrefix
from minirl.training.batch import Batch


def shared_layout(families, seed=0):
    """Sequences of families (prompt, own tokens of each member), shuffled; the first of a family is the parent."""
    return layout_of(shuffled_members(families, seed))


def shuffled_members(families, seed):
    """The prompt and the number of own tokens of each member of these families."""
    members = [(PromptPrefix(i, prompt), n) for i, (prompt, *owns) in enumerate(families) for n in owns]
    random.Random(seed).shuffle(members)
    return members


def layout_of(members):
    """The layout of a batch of these members."""
    lengths, nothing = tuple(prompt.num_tokens + n for prompt, n in members), torch.empty(0)
    return Batch(lengths, nothing, nothing, prefixes=tuple(prefix for prefix, _ in members)).layout()


# Prompts around the borders of blocks, of one to five members, one without own tokens; two share nothing.
FAMILIES = [
    (1, 3, 140),
    (127, 1, 2, 60),
    (128, 5, 128, 1, 300),
    (129, 1, 0, 130, 7, 2),
    (300, 90, 1),
    (0, 250),
    (64, 65),
]
