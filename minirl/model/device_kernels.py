"""Where kernels of optional packages replace operations of torch."""

import functools
import importlib

import torch

from minirl.ranks.process_group import print0


def may_be_of_packages(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether optional packages have kernels for such tensors: on CUDA in 16 bits."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def has_fla(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether flash-linear-attention (the extra `fla`) computes the gated delta rule of packed sequences."""
    is_for_them = may_be_of_packages(device, dtype)
    return is_for_them and can_import("fla.ops.gated_delta_rule", "chunk_gated_delta_rule")


@functools.cache
def can_import(module: str, *functions: str) -> bool:
    """Return whether an optional package has these functions. Not collective.

    If it is installed and they cannot be imported, rank 0 prints why, once: it was built for another torch, or a
    folder has its name.
    """
    package = module.partition(".")[0]
    try:
        absent = [name for name in functions if not hasattr(importlib.import_module(module), name)]
        if absent:
            raise ImportError(f"cannot import name {absent[0]!r}")
    except Exception as error:  # a mismatched build may raise anything
        if not (isinstance(error, ModuleNotFoundError) and error.name == package):
            reason = " ".join(str(error).split())
            print0(f"note: torch's kernels replace those of {package}, which cannot be imported: {reason}")
        return False
    return True
