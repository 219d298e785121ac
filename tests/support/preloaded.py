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
from minirl.data import prompts
from minirl.run import embedded_model
from minirl.run.config import RunConfig

torch.set_num_threads(1)
# Making and tokenizing the 20,000 rows of the embedded task takes a third of a short run. They are the same for all
# runs with the same tokenizer.
_task = embedded_model.load_sorting()
embedded_model.EMBEDDED_TASKS["sorting"] = lambda: _task
RunConfig.eval_rows = 8  # of 256: evaluations take most of a short run
_check_prompts = prompts._check_prompts
_checked = {}


def _check_prompts_once(rows, tokenizer, vocab_size, **options):
    if rows is not _task.train_rows or tokenizer.chat or options:
        return _check_prompts(rows, tokenizer, vocab_size, **options)
    key = (vocab_size, (tokenizer.folder / "tokenizer.json").read_bytes())
    if key not in _checked:
        _checked[key] = _check_prompts(rows, tokenizer, vocab_size)
    return _checked[key]


prompts._check_prompts = _check_prompts_once
gc.collect()
gc.freeze()  # a collection in a forked process would copy the memory of all this
