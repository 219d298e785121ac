# ruff: noqa: F401
"""What a run imports sooner or later; the processes of `support.forked` begin with all of it."""

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

torch.set_num_threads(1)
