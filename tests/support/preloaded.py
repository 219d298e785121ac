# ruff: noqa: F401
"""What a run imports sooner or later; the processes of `support.forked` begin with all of it."""

import functools

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

torch.set_num_threads(1)
# Its 20,000 rows are the same for all runs, and take a quarter of a short one.
embedded_model.EMBEDDED_TASKS["sorting"] = functools.cache(embedded_model.load_sorting)
embedded_model.EMBEDDED_TASKS["sorting"]()
