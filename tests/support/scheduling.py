"""The real engine with a model that computes nothing, to count what the scheduler does at real sizes."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from minirl.generation import kv_cache
from minirl.generation.engine import Engine
from minirl.generation.sampling import request_key
from minirl.model.config import ModelConfig
from minirl.model.families import config_from_dict
from minirl.rollouts import Request, RolloutId

STOP = 0


@dataclass(frozen=True)
class Load:
    """Prompts with as many completions each, which end with the chance 1 / mean_tokens after each token."""

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
    """Gives every token of the vocabulary the same probability, so that completions end at random."""

    def __init__(self, vocab_size: int):
        self.config = stub_config(vocab_size)
        self.lm_head = SimpleNamespace(weight=torch.zeros(vocab_size, 1))

    def __call__(self, tokens: Tensor, positions: Tensor, layout: object) -> Tensor:
        return torch.zeros(len(tokens), 1)


def stub_config(vocab_size: int) -> ModelConfig:
    return config_from_dict(
        {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "head_dim": 8,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 1e-6,
        }
    )


@contextmanager
def stub_engine(load: Load, **options: int | bool) -> Iterator[Engine]:
    """An engine for this load. It keeps block tables as on CUDA, which is quicker than the CPU's index."""
    with mock.patch.object(kv_cache, "decode_kernel_for", return_value="paged"):
        yield Engine(
            StubModel(load.mean_tokens),
            max_running_requests=load.max_running_requests,
            cache_tokens=load.cache_tokens,
            dtype=torch.float32,
            device=torch.device("cpu"),
            **options,
        )


def requests_of(load: Load, *, seed: int = 0) -> list[Request]:
    rng = random.Random(seed)
    requests = []
    for prompt in range(load.num_prompts):
        ids = tuple(rng.randrange(load.mean_tokens) for _ in range(load.prompt_tokens))
        for sample in range(load.group_size):
            key = request_key(seed, purpose="train", prompt_ordinal=prompt, sample=sample)
            limit = load.max_new_tokens
            requests.append(Request(ids, RolloutId(prompt, sample), key, limit, 1.0, frozenset([STOP])))
    return requests
