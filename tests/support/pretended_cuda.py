"""A fake CUDA device: its tensors are in host memory but claim to be on the device, and may not mix with CPU tensors.

All values are real, so code that depends on them works. Backward works too, without checks. The fake tests only the
devices of arguments, not the results of CUDA kernels.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
# Functions that `nn.Module.to` uses to inspect its arguments.
QUESTIONS = (torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type)
# Functions whose tensors may be on two devices.
MOVES = (Tensor.to, Tensor.cpu, Tensor.copy_, Tensor.data.__set__, torch._foreach_copy_)


class OnDevice(Tensor):
    """A tensor that claims to be on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    device = property(lambda self: CUDA)
    is_cuda = True


class ParameterOnDevice(OnDevice, nn.Parameter):
    """The class of a parameter whose `data` is on the device."""


class PretendedCuda(TorchFunctionMode):
    """A mode that provides `torch.device("cuda")` and raises errors for operations on tensors from two devices."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func in QUESTIONS:
            return func(*args, **kwargs)
        if func is Tensor.pin_memory:
            return args[0]
        leaves = tree_leaves((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func not in MOVES:
            _refuse_mixed(func, inputs)
        goes_to_device = _target(func, args, leaves) == "cuda"
        args, kwargs = tree_map(lambda leaf: CPU if isinstance(leaf, torch.device) else leaf, (args, kwargs))
        result = func(*args, **kwargs)
        if func == Tensor.data.__set__ and isinstance(args[0], nn.Parameter):
            args[0].__class__ = ParameterOnDevice if isinstance(args[1], OnDevice) else nn.Parameter
        return tree_map(lambda leaf: _placed(leaf, goes_to_device, inputs), result)


def _refuse_mixed(func: Any, inputs: list[Tensor]) -> None:
    places = {tensor.device.type for tensor in inputs if tensor.ndim > 0}
    if len(places) > 1:
        shapes = [(tensor.device.type, tuple(tensor.shape)) for tensor in inputs]
        raise RuntimeError(f"{getattr(func, '__name__', func)} on tensors of two devices: {shapes}")


def _target(func: Any, args: Any, leaves: list[Any]) -> str:
    """Return the device type of a call's results: the named device, otherwise the device of its tensors.

    For operations whose tensors may be on two devices, the first tensor decides.
    """
    if func is Tensor.cpu:
        return "cpu"
    named = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
    named += [leaf for leaf in leaves if leaf in ("cpu", "cuda")] if func is Tensor.to else []
    like = args[1:] if func is Tensor.to else ()
    places = [leaf.device.type for leaf in (*like, *leaves) if isinstance(leaf, Tensor)]
    return "cuda" if "cuda" in (named or places[: 1 if func in MOVES else None]) else "cpu"


def _placed(result: Any, goes_to_device: bool, inputs: list[Tensor]) -> Any:
    """Return a result on its device. A move makes a copy, so that the two share no memory."""
    if not isinstance(result, Tensor):
        return result
    if any(result is tensor for tensor in inputs) and isinstance(result, OnDevice) == goes_to_device:
        return result
    if inputs and all(isinstance(tensor, OnDevice) != goes_to_device for tensor in inputs):
        result = result.clone()
    return result.as_subclass(OnDevice if goes_to_device else Tensor)


class PretendedGraph(TorchDispatchMode):
    """A fake `torch.cuda.CUDAGraph`: records the operations of a capture; a replay runs them on the same memory."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def capture_begin(self, **options):
        self.calls = []
        self.__enter__()

    def capture_end(self):
        self.__exit__(None, None, None)

    def replay(self):
        with torch._C.DisableTorchFunction():
            for func, args, kwargs, result in self.calls:
                for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor):
                        old.copy_(new)  # has no effect for views and arguments


def plain_decode(q, keys, values, blocks, lengths, *, window):
    """Compute `paged_attention.decode` without reading any value on the host."""
    k = keys[blocks.long()].transpose(1, 2).transpose(3, 4).flatten(2, 3)  # [B, K, n, C]
    v = values[blocks.long()].transpose(1, 2).flatten(2, 3)
    key = torch.arange(k.shape[2], device=q.device)
    is_seen = key < lengths[:, None]
    if window:
        is_seen &= key >= lengths[:, None] - window
    mask = is_seen[:, None, None]
    return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True)[:, :, 0]
