"""FSDP2 with one weight storage: the engine decodes with the same tensors that training computes with.

The optimizer holds sharded fp32 masters. Each rank also keeps the full weights in the compute dtype: gathered
once, never resharded, and refreshed in place after each optimizer step, at addresses that never change. Gradients are
summed over the ranks, not averaged, because loss weights already come from global counts. No other file uses FSDP.

With `shard_weights` a rank keeps full weights of embedding, head and last norm only. It decodes with its rows of the
layers' weights (`model.shards`), the rows of its shards. Training and scoring gather one layer at a time.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from minirl.errors import GuardError, refuse
from minirl.model.batch_invariance import at_least_fp32
from minirl.model.config import ModelConfig
from minirl.model.shards import share_layers
from minirl.model.transformer import Transformer, make_meta_model
from minirl.model.weights import check_shape, check_weights, fill_parameter, load_weights
from minirl.ranks.process_group import world_size
from minirl.ranks.time_account import spent_on, wait_for_device

GATHER_BATCH = 8  # parameters in one gather of `refresh`; with fewer, ranks wait more often


class ShardedModel:
    """A trainable `Transformer`, sharded over all ranks.

    folder: from which it was loaded, with config and tokenizer.
    module: the model that is trained, with FSDP's hooks.
    dtype: the compute dtype.
    masters: its trained parameters by name in fp32 (or fp64), sharded. The optimizer updates these.
    compute_weights: all its full parameters by name in the compute dtype. Generation, scoring and training use
        these. With `shard_weights`: the root's, and of the decoder's layers this rank's rows of matrices, and vectors.
    decoder: for inference, the same weights without FSDP's hooks, which cost a decode step 5 %. With `shard_weights` it
        is for generation only, and a model that never decodes has none.
    scorer: scores batches without gradient. It is the decoder, or with `shard_weights` the module, which all ranks must
        call equally often (collective).

    The constructor, `step`, `refresh`, `load_state` and `backward` are collective; without `shard_gradients` only an
    optimizer step's last `backward` is.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        recompute_layers: bool = False,
        shard_gradients: bool = False,
        offload_optimizer: bool = False,
        shard_weights: bool = False,
        is_frozen: Callable[[str], bool] = lambda name: False,
        base: "ShardedModel | None" = None,
    ):
        """Load the folder's weights, each rank its own shard, and gather the compute weights in `dtype`.

        shard_gradients: sum gradients over the ranks in each microbatch, unit by unit, so that a rank holds its
        shard of them and one unit's. Without it each rank holds them all until the last microbatch. On one rank
        it has no effect, unless shards are in host memory.

        offload_optimizer: keep masters, sharded gradients and the optimizer's state in host memory, pinned for copies
        from and to a GPU, and run the optimizer there. On the CPU nothing changes.

        shard_weights: see the module. It shards gradients too, and frozen parameters. Without effect on one rank.

        is_frozen: returns whether the parameter of this name is frozen: no master, gradient or moments. If `config` has
        adapters, all but these and a scalar head are frozen, too.

        base: a model with which this one shares the weights that both freeze, if their folder is the same and ranks
        hold them whole.
        """
        check_weights(config, folder)
        self.folder = folder
        self.dtype = dtype
        self._shards_weights = shard_weights and world_size() > 1
        has_shards = world_size() > 1 or offload_optimizer
        self._sums_every_microbatch = self._shards_weights or (shard_gradients and has_shards)

        # 1. Parameters without values. Frozen ones have no masters, so they have the compute dtype.
        self.module = make_meta_model(config, recompute_layers=recompute_layers).to(at_least_fp32(dtype))
        frozen: dict[str, Any] = {}
        for name, parameter in self.module.named_parameters():
            if is_frozen(name) or not parameter.requires_grad:
                parameter.requires_grad_(False)
                parameter.data = parameter.data.to(dtype)
                frozen[name] = parameter
        if base is not None and base.folder == folder and not self._shards_weights:
            frozen |= {name: base._frozen[name] for name in frozen.keys() & base._frozen.keys()}
            _assign_weights(self.module, frozen)

        # 2. Shards of them. Frozen parameters are whole where weights are.
        self._units = [*self.module.layers, self.module]
        full = set() if self._shards_weights else set(frozen.values())
        self._shard_units(device, full, offload_optimizer=offload_optimizer)

        # 3. Values.
        init_device = "cpu" if offload_optimizer else device
        self.module._apply(
            lambda tensor: torch.empty_like(tensor, device=init_device) if tensor.is_meta else tensor
        )
        if frozen:
            self.module.tie_weights()  # FSDP does it for the parameters that it knows
        load_weights(self.module, folder)
        self.masters: dict[str, Tensor] = dict(self.module.named_parameters())
        self._frozen: dict[str, Tensor] = {name: self.masters.pop(name) for name in frozen}

        # 4. Weights to compute with.
        if self._shards_weights:
            storage = sharded_storage(self.module, self._frozen, dtype, device)
        else:
            storage = full_storage(self.module, self._frozen, device)
        self.compute_weights, self.decoder, self.scorer = storage
        if self._shards_weights:
            self._copy_to_compute_weights(self._frozen)
            self.refresh()

    def _shard_units(
        self, device: torch.device, ignored: set[torch.nn.Parameter], *, offload_optimizer: bool
    ) -> None:
        """Wrap the units in FSDP, which leaves the ignored parameters as they are (collective)."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        precision = MixedPrecisionPolicy(
            param_dtype=self.dtype,
            reduce_dtype=at_least_fp32(self.dtype),
            cast_forward_inputs=False,  # that would round the fp32 rope tables
        )
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if offload_optimizer else OffloadPolicy()
        mesh = init_device_mesh(device.type, (world_size(),))
        for unit in self._units:
            reshards = self._shards_weights and unit is not self.module
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=reshards,
                ignored_params=ignored,
            )
            unit.set_reshard_after_backward(reshards, recurse=False)
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum

    def full_weights(self, *, keep: bool) -> dict[str, Tensor]:
        """A checkpoint's weights; {} without `keep`.

        These are the compute weights, or of a model with adapters all masters. Masters, and with `shard_weights` all
        weights, are gathered one after another, to the host (collective).
        """
        if self.module.config.adapters is not None:
            sharded, dtype = self.masters, at_least_fp32(self.dtype)
        elif self._shards_weights:
            sharded, dtype = self.masters | self._frozen, self.dtype
        else:
            return self.compute_weights if keep else {}
        gathered = {}
        for name, parameter in sharded.items():
            full = parameter.full_tensor()  # type: ignore[attr-defined]
            if keep:
                gathered[name] = full.detach().to("cpu", dtype)
        return gathered

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a microbatch's loss to the gradients.

        With `is_last`, the last microbatch of an optimizer step, also sum them over the ranks (collective).
        Ranks may have different numbers of microbatches, but each has at least one (it may be empty), or no
        rank has any. With `shard_gradients` every call sums (collective), so all ranks must have equally many
        microbatches; `assignment.plan_microbatches` sees to that.
        """
        for unit in self._units:
            unit.set_requires_gradient_sync(is_last or self._sums_every_microbatch, recurse=False)
        loss.backward()

    def make_optimizer(
        self, *, betas: tuple[float, float] = (0.9, 0.95), weight_decay: float = 0.0
    ) -> torch.optim.AdamW:
        """Make an AdamW over the masters, with its state, for `step`, which sets the learning rate.

        Only matrices decay: norms and biases do not.

        torch would allocate the moments in the first `step`, in the middle of the memory that the update freed: on
        CUDA that would leave no block as large as the next phase's cache.
        """
        masters = self.masters.values()
        groups = [
            {"params": [master for master in masters if master.ndim > 1], "weight_decay": weight_decay},
            {"params": [master for master in masters if master.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1.0, betas=betas, fused=True)
        for master in masters:
            optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        return optimizer

    def step(self, optimizer: torch.optim.Optimizer, *, lr: float, max_grad_norm: float) -> float:
        """Clip the gradient, update the masters and refresh the compute weights; returns the gradient norm.

        lr: the learning rate of this update. A group with another lr than the optimizer's default keeps their ratio.

        The norm, before clipping, covers the optimizer's parameters on all ranks; other parameters' gradients are
        dropped. max_grad_norm 0: do not clip. A gradient of exactly 0, for example without any `backward`, makes no
        update: momentum alone would still move the weights.

        Collective. Raises GuardError on all ranks: before the update if the norm is not finite, after it if the
        weights are not, so that they are never saved.
        """
        trained = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for other in {*self.masters.values()} - trained:
            other.grad = None
        gradients = {name: master.grad for name, master in self.masters.items() if master.grad is not None}
        norm = _total_norm(gradients.values()) if gradients else 0.0
        if not math.isfinite(norm):
            where = _first_nonfinite(gradients)
            raise GuardError(f"gradient norm is {norm}: {where}. Nothing was updated; try a lower --lr")
        if norm == 0:
            optimizer.zero_grad()
            return norm
        if max_grad_norm and norm > max_grad_norm:
            # One kernel for all local shards, not one each.
            torch._foreach_mul_(
                [_local_shard(gradient) for gradient in gradients.values()], max_grad_norm / norm
            )
        for group in optimizer.param_groups:
            own_lr = group.setdefault("initial_lr", group["lr"])
            group["lr"] = lr * (own_lr / optimizer.defaults["lr"])
        optimizer.step()
        optimizer.zero_grad()
        weight_norm = _total_norm(self.masters.values())
        if not math.isfinite(weight_norm):
            where = _first_nonfinite(self.masters)
            raise GuardError(
                f"after this update the norm of the weights is {weight_norm}: {where}. They are not saved, the last "
                "checkpoint is unchanged; try a lower --lr"
            )
        self.refresh()
        return norm

    def state_tensors(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """This rank's shards, for a checkpoint. Not collective.

        Names are "masters.NAME", and for the optimizer's state "exp_avg.NAME" and the like.
        """
        tensors = {}
        for name, master in self.masters.items():
            for kind, tensor in {"masters": master, **optimizer.state.get(master, {})}.items():
                tensors[f"{kind}.{name}"] = _local_shard(tensor).detach()
        return tensors

    @torch.no_grad()
    def load_state(
        self, optimizer: torch.optim.Optimizer, saved: Sequence[Mapping[str, Tensor]], *, origin: str
    ) -> None:
        """Load the masters and the optimizer's state, then refresh (collective).

        saved: the `state_tensors` of each rank that saved, of any number. Needs host memory for one whole tensor.

        Raises InputError naming `origin` and the tensor if the state belongs to another model.
        """
        # "exp_avg.model.norm.weight" is the "exp_avg" of "model.norm.weight".
        parts = {key: key.split(".", 1) for key in saved[0]}
        unmatched = {name for _, name in parts.values()} ^ self.masters.keys()
        refuse(unmatched, f"{origin}: belongs to another model: {sorted(unmatched)[:5]} (first five)")
        for key, (kind, name) in parts.items():
            master = self.masters[name]
            state = {"masters": master} if kind == "masters" else optimizer.state[master]
            shards = [tensors[key] for tensors in saved]
            if shards[0].ndim == 0:  # the count of steps, which each rank has
                state[kind] = shards[0].to(master.device, copy=True)
                continue
            if kind not in state:  # some optimizers make their state in the first step
                state[kind] = torch.zeros_like(master)
            full = torch.cat(shards)
            check_shape(full.shape, master, f"{origin}: {key}")
            fill_parameter(state[kind], full, f"{origin}: {key}")
        self.refresh()

    @torch.no_grad()
    @spent_on("refresh")
    def refresh(self) -> None:
        """Copy the masters into the compute weights, in place (collective).

        Needs twice the memory of GATHER_BATCH parameters; on one rank with its masters on the device none.
        """
        # Copies from the host are asynchronous. The optimizer next writes to the masters once it has gradients, which
        # are computed with the weights copied here: the copies end before that.
        self._copy_to_compute_weights(self.masters)
        wait_for_device()

    def _copy_to_compute_weights(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy sharded parameters into the compute weights, if these have them: own rows or all (collective)."""
        gathered: list[tuple[Tensor, Tensor]] = []  # weights, and this rank's shards of them
        for name, weight in self.compute_weights.items():
            if name in parameters:
                shard = _local_shard(parameters[name]).detach()
                if len(weight) < len(parameters[name]) or world_size() == 1:
                    weight[: len(shard)].copy_(shard, non_blocking=True)
                else:
                    gathered.append((weight, shard))
        for first in range(0, len(gathered), GATHER_BATCH):
            self._gather_weights(gathered[first : first + GATHER_BATCH])

    def _gather_weights(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Fill weights from all ranks' shards of them, given this rank's (collective)."""
        # FSDP cuts the rows into chunks of equally many; the last ones may have fewer, or none.
        sizes = [math.ceil(len(weight) / world_size()) * weight[0].numel() for weight, _ in pairs]
        own = pairs[0][0].new_zeros(sum(sizes))
        for slot, (_, shard) in zip(own.split(sizes), pairs, strict=True):
            slot[: shard.numel()].copy_(shard.flatten(), non_blocking=True)
        per_rank = own.new_empty(world_size(), len(own))
        # torch 2.13 warns about the old name, the only one in 2.11.
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        gather(per_rank.view(-1), own)
        for (weight, _), chunks in zip(pairs, per_rank.split(sizes, 1), strict=True):
            weight.copy_(chunks.reshape(-1, *weight.shape[1:])[: len(weight)])


class Storage(NamedTuple):
    """What `ShardedModel` computes with; see its attributes of these names."""

    compute_weights: dict[str, Tensor]
    decoder: Transformer
    scorer: Transformer


def full_storage(module: Transformer, frozen: Mapping[str, Tensor], device: torch.device) -> Storage:
    """Gather whole weights on each rank: from here on they are the module's parameters (collective)."""
    for parameter in frozen.values():
        parameter.data = parameter.data.to(device)
    # FSDP keeps the buffers of the last gather, so the root, with the embedding, is not the last.
    units: list[Any] = [module, *reversed(module.layers)]
    for unit in units:
        unit.unshard()
    decoder = make_meta_model(module.config)
    # Both names of a tied parameter.
    _assign_weights(decoder, dict(module.named_parameters(remove_duplicate=False)))
    return Storage(dict(module.named_parameters()), decoder, decoder)


def sharded_storage(
    module: Transformer, frozen: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device
) -> Storage:
    """Gather the root's weights, and make a decoder whose linear layers have this rank's rows, still 0 (collective).

    Rows of frozen parameters are the shards themselves where these have the same shape and place.
    """
    module.unshard()  # type: ignore[operator]
    in_layers = set(module.layers.parameters())
    named = module.named_parameters(remove_duplicate=False)
    roots = {name: root for name, root in named if root not in in_layers}
    weights: dict[str, Tensor] = {name: root for name, root in module.named_parameters() if name in roots}
    is_trained = any(parameter.requires_grad for parameter in module.parameters())
    if module.config.scalar_head or not is_trained:
        return Storage(weights, module, module)
    decoder = make_meta_model(module.config)
    decoder.shard_group = share_layers(decoder.layers, module.config.adapters)
    decoder.to(dtype).requires_grad_(False)
    decoder.layers._apply(lambda tensor: torch.zeros_like(tensor, device=device))
    _assign_weights(decoder, roots)
    layers = {name: own for name, own in decoder.named_parameters() if name not in roots}
    for name in frozen.keys() & layers.keys():
        shard = _local_shard(frozen[name])
        if shard.shape == layers[name].shape and shard.device == layers[name].device:
            layers[name].data = shard
    return Storage(weights | layers, decoder, module)


def _total_norm(tensors: Iterable[Tensor]) -> float:
    """The norm of sharded tensors; NaN or infinite if one of them is (collective)."""
    norm = torch.nn.utils.get_total_norm(tensors)
    return float(norm.full_tensor())  # type: ignore[attr-defined]


def _first_nonfinite(tensors: Mapping[str, Tensor]) -> str:
    """Name the first of these sharded tensors with a non-finite norm (collective)."""
    for name, tensor in tensors.items():
        if not math.isfinite(_total_norm([tensor])):
            return f"first in {name}"
    return "each tensor's norm is finite, the sum of their squares overflows"


def _assign_weights(model: Transformer, weights: Mapping[str, Tensor]) -> None:
    """Let the model compute with the storage of these of its parameters, by name."""
    for name, weight in weights.items():
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, weight)


def _local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a sharded tensor; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
