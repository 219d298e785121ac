# ruff: noqa: F401
"""All that a run imports sooner or later; the processes of `support.forked` begin with it."""

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
# Making the 20,000 rows of the embedded task takes a part of a short run. They are the same for all runs.
_task = embedded_model.load_sorting()
embedded_model.EMBEDDED_TASKS["sorting"] = lambda: _task
RunConfig.eval_rows = 8  # of 256: evaluations take most of a short run
gc.collect()
gc.freeze()  # a collection in a forked process would copy the memory of all this
