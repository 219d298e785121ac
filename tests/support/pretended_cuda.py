"""A pretended CUDA device: tensors with its name in host memory, which may not mix with those of the host.

All values are real, so code that depends on them runs, and so does backward (in which nothing is checked). It does not
show the results of CUDA's kernels, only the devices of their arguments.
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
# They only look at their arguments, for `nn.Module.to`.
QUESTIONS = (torch._C._nn._parse_to, torch._has_compatible_shallow_copy_type)
# They may take tensors of two devices.
MOVES = (Tensor.to, Tensor.cpu, Tensor.copy_, Tensor.data.__set__, torch._foreach_copy_)


class OnDevice(Tensor):
    """A tensor that says that it is on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    device = property(lambda self: CUDA)
    is_cuda = True


class ParameterOnDevice(OnDevice, nn.Parameter):
    """The class of a parameter whose data are set to a device's tensor."""


class PretendedCuda(TorchFunctionMode):
    """Within it, `torch.device("cuda")` is a device, and an operation on tensors of two devices is an error."""

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
    """The device type of a call's results: the one that it names, else that of its tensors.

    For operations that may take tensors of two devices, that of the first.
    """
    if func is Tensor.cpu:
        return "cpu"
    named = [leaf.type for leaf in leaves if isinstance(leaf, torch.device)]
    named += [leaf for leaf in leaves if leaf in ("cpu", "cuda")] if func is Tensor.to else []
    like = args[1:] if func is Tensor.to else ()
    places = [leaf.device.type for leaf in (*like, *leaves) if isinstance(leaf, Tensor)]
    return "cuda" if "cuda" in (named or places[: 1 if func in MOVES else None]) else "cpu"


def _placed(result: Any, goes_to_device: bool, inputs: list[Tensor]) -> Any:
    """A result on its device. Moving copies, so that the two share no memory."""
    if not isinstance(result, Tensor):
        return result
    if any(result is tensor for tensor in inputs) and isinstance(result, OnDevice) == goes_to_device:
        return result
    if inputs and all(isinstance(tensor, OnDevice) != goes_to_device for tensor in inputs):
        result = result.clone()
    return result.as_subclass(OnDevice if goes_to_device else Tensor)


class PretendedGraph(TorchDispatchMode):
    """`torch.cuda.CUDAGraph`: the operations of a capture, which a replay runs again on the same memory."""

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
                        old.copy_(new)  # a view or an argument onto itself


def plain_decode(q, keys, values, blocks, lengths, *, window):
    """`paged_attention.decode`, which reads nothing on the host."""
    k = keys[blocks.long()].transpose(1, 2).transpose(3, 4).flatten(2, 3)  # [B, K, n, C]
    v = values[blocks.long()].transpose(1, 2).flatten(2, 3)
    key = torch.arange(k.shape[2], device=q.device)
    is_seen = key < lengths[:, None]
    if window:
        is_seen &= key >= lengths[:, None] - window
    mask = is_seen[:, None, None]
    return F.scaled_dot_product_attention(q[:, :, None], k, v, attn_mask=mask, enable_gqa=True)[:, :, 0]
