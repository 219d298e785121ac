"""The workload that a plan is made for, and the sizes that it chooses."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from minirl.model.config import ModelConfig


@dataclass(frozen=True)
class Sizes:
    """The flags of these names, with a value for each "auto"."""

    max_running_requests: int
    cache_tokens: int
    max_tokens_per_microbatch: int
    recompute_layers: bool
    shard_gradients: bool
    decode_group: int = 1  # as in `Workload`

    def flags(self, *, trains: bool = True) -> str:
        """The sizes as flags of a command line; trains: also those of an update."""
        of_generation = (
            f"--max-running-requests {self.max_running_requests} --cache-tokens {self.cache_tokens}"
        )
        of_update = (
            f" --max-tokens-per-microbatch {self.max_tokens_per_microbatch} "
            f"--recompute-layers {'on' if self.recompute_layers else 'off'} "
            f"--shard-gradients {'on' if self.shard_gradients else 'off'}"
        )
        if self.decode_group > 1:
            of_update += f" --shard-decode on --decode-group {self.decode_group}"
        return of_generation + (of_update if trains else "")


@dataclass(frozen=True)
class Workload:
    """The inputs of the plan besides `Sizes`: the models of a run, and the most that a step asks of a rank.

    trains: false in an evaluation, where the policy has neither masters nor an update.
    trained: policy, then value models; frozen: reference, teacher and reward models, by name.
    shares_base: value models have adapters on the policy's own weights.
    longest_prompt, longest: tokens of the longest prompt, and of it with the longest completion.
    num_shards: ranks that hold a model's shards together, of all `num_ranks` or of a node.
    decode_group: the same ranks if they decode together from their shards; 1: each decodes from whole weights.
    parks_frozen, offloads_optimizer: frozen models between their uses, and the optimizer's state, are in the host's
    memory beside a GPU. On the CPU there is nothing to offload.
    requests: completions that an engine decodes in one phase. in_flight: completions that decode in rounds, which the
    cache should all hold. update_tokens: tokens that a rank trains on in one update.
    enough_tokens: see the function of that name. taught_tokens: a step's tokens whose teacher's states are kept.
    """

    trained: tuple[ModelConfig, ...]
    frozen: Mapping[str, ModelConfig]
    dtype: torch.dtype
    device_type: str
    num_ranks: int
    num_shards: int
    parks_frozen: bool
    offloads_optimizer: bool
    longest_prompt: int
    longest: int
    requests: int
    update_tokens: int
    enough_tokens: int
    in_flight: int = 0
    taught_tokens: int = 0
    trains: bool = True
    shares_base: bool = False
    decode_group: int = 1

    @property
    def policy(self) -> ModelConfig:
        """The model that generates."""
        return self.trained[0]

    @property
    def is_cuda(self) -> bool:
        """True if the models run on a GPU, which frozen ones may leave between their uses."""
        return self.device_type == "cuda"

    @property
    def shards_weights(self) -> bool:
        """True if no rank holds whole weights, except those that it has just gathered."""
        return self.decode_group > 1

    @property
    def can_shard_gradients(self) -> bool:
        """True if gradients summed in each microbatch can go elsewhere: to other ranks, or the host."""
        return self.num_shards > 1 or self.offloads_optimizer


def enough_tokens(max_new_tokens: int) -> int:
    """The size of a microbatch above which more tokens are not worth recomputing layers."""
    return max(8192, 2 * max_new_tokens)
