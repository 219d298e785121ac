"""FSDP2 with one weight storage: the parameters that training computes with are those that the engine decodes with.

The optimizer holds sharded fp32 masters. Each rank also keeps the full weights in the compute dtype, gathered once and
never resharded; after an optimizer step they are refreshed in place, at addresses that never change. Gradients are
sums: the loss is weighted by global counts and nothing is averaged here. The only room that knows FSDP.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl.errors import GuardError, InputError
from minirl.model.batch_invariance import at_least_fp32
from minirl.model.config import ModelConfig
from minirl.model.transformer import Transformer
from minirl.model.weights import fill, load_weights
from minirl.ranks import watchdog
from minirl.ranks.process_group import gather_objects


class ShardedModel:
    """A trainable `Transformer`: `module` trains, `masters` are optimized, `compute_weights` are the storage shared by
    generate, score and update. `decoder` is the module for inference: the very same parameters without FSDP's hooks,
    which cost a decode step 5 %. The constructor, `step` and `backward(is_last=True)` are collective.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recompute_layers: bool = False,
    ):
        """Load the folder's weights, each rank its own shard, and gather the compute weights in `dtype`."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        with torch.device("meta"):
            self.module = Transformer(config, recompute_layers=recompute_layers)
        self.module.to(at_least_fp32(dtype))
        mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
        precision = MixedPrecisionPolicy(
            param_dtype=dtype,
            reduce_dtype=at_least_fp32(dtype),
            cast_forward_inputs=False,  # it would round the fp32 rope tables
        )
        self._units = [*self.module.model.layers, self.module]
        for unit in self._units:
            fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
            unit.set_reshard_after_backward(False)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
        self.module.to_empty(device=device)
        load_weights(self.module, folder)
        self.masters: dict[str, Tensor] = dict(self.module.named_parameters())
        self._names_by_layer: dict[str, list[str]] = {}  # "" for the root's own
        for name in self.masters:
            self._names_by_layer.setdefault(name.partition("layers.")[2].partition(".")[0], []).append(name)
        for unit in self._units:
            unit.unshard()
        self.compute_weights: dict[str, Tensor] = dict(self.module.named_parameters())
        with torch.device("meta"):
            self.decoder = Transformer(config)
        self.decoder.load_state_dict(dict(self.module.named_parameters(remove_duplicate=False)), assign=True)

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a microbatch's loss; the last one of an optimizer step sums over ranks (collective).

        Ranks may have different numbers of microbatches, but each has at least one (it may be empty).
        """
        watchdog.heartbeat()
        for unit in self._units:
            unit.set_requires_gradient_sync(is_last, recurse=False)
        loss.backward()

    def make_optimizer(self, *, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
        """AdamW over the masters; the learning rate is set by each `step`."""
        return torch.optim.AdamW(
            self.masters.values(), lr=0.0, betas=betas, eps=1e-8, weight_decay=weight_decay, fused=True
        )

    def step(self, optimizer: torch.optim.Optimizer, *, lr: float, max_grad_norm: float) -> float:
        """Clip the global gradient norm (0: do not), update the masters, refresh; returns the norm before clipping.

        A gradient of exactly 0 takes no step: there is nothing to learn, and momentum would still move the weights.
        Collective. Raises GuardError on all ranks, before any update, when the norm is not finite.
        """
        norm = float(torch.nn.utils.get_total_norm(self._gradients()).full_tensor())  # type: ignore[attr-defined]
        if not math.isfinite(norm):
            where = self._worst_gradients()
            raise GuardError(f"gradient norm is {norm}: {where}. Nothing was updated; try a lower --lr")
        if norm == 0:
            optimizer.zero_grad(set_to_none=True)
            return norm
        if max_grad_norm and norm > max_grad_norm:
            for gradient in self._gradients():
                gradient.mul_(max_grad_norm / norm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        self.refresh()
        return norm

    def state_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """Copies on the host of this rank's shards: "masters.NAME"; of the optimizer, "exp_avg.NAME" and the like."""
        tensors = {f"masters.{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            tensors |= {f"{key}.{name}": value for key, value in optimizer.state.get(master, {}).items()}
        local = {name: x.to_local() if hasattr(x, "to_local") else x for name, x in sorted(tensors.items())}
        return {name: torch.empty_like(x, device="cpu").copy_(x.detach()) for name, x in local.items()}

    @torch.no_grad()
    def load_state(self, optimizer: torch.optim.Optimizer, stored: Mapping[str, Any], *, place: str) -> None:
        """Take over what `state_tensors` of any number of ranks returned, whole, and refresh (collective).

        Raises InputError naming `place` and the tensor when it is another model's.
        """
        kinds = {name: name.partition(".")[::2] for name in stored}
        strange = {of for _, of in kinds.values()} ^ self.masters.keys()
        if strange:
            raise InputError(f"{place}: is of another model: {sorted(strange)[:5]} (first five)")
        for name, (kind, of) in kinds.items():
            master = self.masters[of]
            target = master
            if kind != "masters":
                is_scalar = not stored[name].get_shape()
                target = torch.zeros((), device=master.device) if is_scalar else torch.zeros_like(master)
                optimizer.state[master][kind] = target
            fill(target, stored[name], f"{place}: {name}")
        self.refresh()

    def _worst_gradients(self) -> str:
        """The first parameter whose gradient is not finite, and the ranks in whose shards (collective)."""
        flags = [bool(x.grad is None or x.grad.to_local().isfinite().all()) for x in self.masters.values()]  # type: ignore
        for name, finite in zip(self.masters, zip(*gather_objects(flags), strict=True), strict=True):
            if not all(finite):
                ranks = [str(rank) for rank, is_finite in enumerate(finite) if not is_finite]
                return f"first in {name}, in the shard of rank {', '.join(ranks)}"
        return "every element is finite, their squares overflow"

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the masters into the compute weights, in place, with one gather per layer (collective)."""
        world = torch.distributed.get_world_size()
        for names in self._names_by_layer.values():
            full = [self.compute_weights[name] for name in names]
            sizes = [
                -(-len(x) // world) * x[0].numel() for x in full
            ]  # of a shard, to which the last ones are padded
            own = torch.zeros(sum(sizes), dtype=full[0].dtype, device=full[0].device)
            for name, part in zip(names, own.split(sizes), strict=True):
                shard = self.masters[name].to_local()  # type: ignore[attr-defined]
                part[: shard.numel()] = shard.flatten()
            gathered = own.new_empty(world, len(own))
            torch.distributed.all_gather(list(gathered), own)
            for x, part in zip(full, gathered.split(sizes, 1), strict=True):
                x.copy_(part.reshape(-1, *x.shape[1:])[: len(x)])
