"""Packed layouts in which sequences share prompts."""

import random

import torch

from minirl.rollouts import RolloutId
from minirl.training.batch import Batch, SequenceInfo

# Prompts around block borders, each with one to five members. One member is only its prompt; two families share
# nothing.
FAMILIES = [
    (1, 3, 140),
    (127, 1, 2, 60),
    (128, 5, 128, 1, 300),
    (129, 1, 0, 130, 7, 2),
    (300, 90, 1),
    (0, 250),
    (64, 65),
]


def shared_layout():
    """Return the layout of the shuffled families; the first member of a family is the parent."""
    nothing = torch.empty(0)
    return Batch(shuffled_members(FAMILIES, seed=0), nothing, nothing).layout()


def shuffled_members(families, seed):
    """Return the shuffled sequence infos of families (prompt tokens, each member's further tokens)."""
    infos = [
        SequenceInfo(RolloutId(i, sample), prompt + n, prompt)
        for i, (prompt, *owns) in enumerate(families)
        for sample, n in enumerate(owns)
    ]
    random.Random(seed).shuffle(infos)
    return tuple(infos)
