"""The real engine with a stub model, to measure the scheduler's work at realistic sizes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
from torch import Tensor

from minirl.generation import kv_cache
from minirl.generation.engine import Engine
from minirl.model.families import config_from_dict
from minirl.rollouts import Request
from support.engines import make_request
from support.models import RAW_CONFIG

STOP = 0


@dataclass(frozen=True)
class Load:
    """Prompts with equally many completions, which end with probability 1 / mean_tokens after each token."""

    max_running_requests: int
    cache_tokens: int
    num_prompts: int
    group_size: int
    prompt_tokens: int
    mean_tokens: int
    max_new_tokens: int = 1024

    @property
    def num_requests(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def unique_prompt_tokens(self) -> int:
        return self.num_prompts * self.prompt_tokens


class StubModel:
    """A model that gives every token the same probability, so that completions end at random."""

    shard_group = None

    def __init__(self, vocab_size: int):
        sizes = {"vocab_size": vocab_size, "max_position_embeddings": 8192}
        self.config = config_from_dict(RAW_CONFIG | sizes | {"num_hidden_layers": 1})
        self.head = torch.zeros(vocab_size, 1)

    def __call__(self, tokens: Tensor, positions: Tensor, layout: object) -> Tensor:
        return torch.zeros(len(tokens), 1)


@contextmanager
def stub_engine(load: Load) -> Iterator[Engine]:
    """Yield an engine for this load, with block tables as on CUDA, which are faster than the CPU's index."""
    with mock.patch.object(kv_cache, "decode_kernel_for", return_value="paged"):
        yield Engine(
            StubModel(load.mean_tokens),
            max_running_requests=load.max_running_requests,
            cache_tokens=load.cache_tokens,
            dtype=torch.float32,
            device=torch.device("cpu"),
        )


def requests_of(load: Load) -> list[Request]:
    rng = random.Random(0)
    requests = []
    for prompt in range(load.num_prompts):
        ids = [rng.randrange(load.mean_tokens) for _ in range(load.prompt_tokens)]
        options = {"number": prompt, "max_new_tokens": load.max_new_tokens, "stop_ids": frozenset([STOP])}
        requests += [make_request(ids, member=sample, **options) for sample in range(load.group_size)]
    return requests
