"""Triton's interpreter, which runs kernels on the CPU. Import this module before triton."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.forked import python_path

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
has_no_triton = importlib.util.find_spec("triton") is None
needs_interpreter = pytest.mark.skipif(
    has_no_triton or torch.cuda.is_available(), reason="test_gpu runs the kernels themselves"
)


def run_with_compiler(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a process without the interpreter, because the interpreter's kernels cannot be compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = python_path()
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def mend_interpreter(monkeypatch):
    """Fix Triton 3.6, which multiplies bf16 bits as integers, and creates loop bounds that NumPy 2.4 rejects."""
    import triton.language as tl
    from triton.runtime import interpreter

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def widening_dot(self, a, b, *args):
        return dot(
            self, *(self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b)), *args
        )

    patch_tensor, dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", widening_dot)
