# ruff: noqa: F401
"""Import everything that a run may import; processes from `support.forked` inherit these imports."""

import gc

import pytest
import torch._dynamo
import torch.distributed.fsdp._fully_shard
import torch.profiler
import transformers.models.llama
import typeguard
from transformers import AutoTokenizer

import support.scripts
import train_grpo
import train_ppo
from minirl.run import embedded_model
from minirl.run.config import RunConfig

torch.set_num_threads(1)
# Preload the 20,000 rows of the bundled task, because all runs use the same rows and making them takes time.
_task = embedded_model.load_sorting()
embedded_model.EMBEDDED_TASKS["sorting"] = lambda: _task
RunConfig.eval_rows = 8  # instead of 256, because evaluations would dominate a short run
gc.collect()
gc.freeze()  # otherwise garbage collection in a forked process would copy all this memory
