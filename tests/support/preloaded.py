# ruff: noqa: F401
"""What a run imports sooner or later; the processes of `support.forked` begin with all of it."""

import dataclasses

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
# To make 20,000 rows and to tokenize them takes a third of a short run. The model is still warm-started on all.
_task = embedded_model.load_sorting()
_task = dataclasses.replace(_task, train_rows=_task.train_rows[: support.scripts.NUM_ROWS])
embedded_model.EMBEDDED_TASKS["sorting"] = lambda: _task
