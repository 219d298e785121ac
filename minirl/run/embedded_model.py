"""The embedded default: a tiny Llama folder with its own tokenizer, warm-started on the sorting task.

The folder is a function of `RECIPE`, made once by rank 0 and cached under a name that holds the recipe's hash; it
appears by a rename, so a half-made one is never used.
"""

import hashlib
import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from minirl.data.sorting import ALPHABET, load_sorting
from minirl.data.task import Row, Task
from minirl.model.attention import PackedLayout
from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer
from minirl.model.weights import named_parameters, save_folder
from minirl.objective.losses import sft_loss
from minirl.ranks.process_group import barrier, print0, rank
from minirl.training.scoring import score

RECIPE: dict[str, Any] = {
    "config": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 16,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
    },
    "init_std": 0.05,
    "warm_start_steps": 54,
    "batch_size": 64,
    "lr": 1e-3,
    "warmup_steps": 20,
    "seed": 0,
    "version": 1,
}

VOCABULARY = {token: i for i, token in enumerate(("<eos>", "<unk>", *ALPHABET))}


def embedded_model_folder(root: Path) -> Path:
    """The folder of the tiny model, made on first use (collective)."""
    recipe = json.dumps(RECIPE, sort_keys=True).encode()
    folder = root / f"toy-{hashlib.sha256(recipe).hexdigest()[:8]}"
    if rank() == 0 and not folder.exists():
        print0(
            f"making the embedded model: {RECIPE['warm_start_steps']} supervised steps on sorting, into {folder}"
        )
        model = warm_start(load_sorting())
        with tempfile.TemporaryDirectory() as tokenizer:
            save_tokenizer(Path(tokenizer))
            try:
                save_folder(
                    folder, named_parameters(model), config=RECIPE["config"], tokenizer_from=Path(tokenizer)
                )
            except OSError:
                if not folder.exists():  # else another run has made it in the meantime
                    raise
    barrier()
    return folder


def save_tokenizer(folder: Path, vocabulary: Mapping[str, int] = VOCABULARY) -> None:
    """Write a Hugging Face tokenizer with one token per character of the task."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel(dict(vocabulary), unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>").save_pretrained(
        folder
    )


def warm_start(task: Task) -> Transformer:
    """Train a new model on answers of the task's training rows, by cross entropy, until it sorts now and then."""
    generator = torch.Generator().manual_seed(RECIPE["seed"])
    model = Transformer(config_from_dict(RECIPE["config"]))
    for name, param in named_parameters(model).items():
        if param.ndim == 2:
            torch.nn.init.normal_(param, std=RECIPE["init_std"], generator=generator)
        else:
            assert "norm" in name, f"{name} has no initial value"
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rng = random.Random(RECIPE["seed"])
    for step in range(RECIPE["warm_start_steps"]):
        optimizer.param_groups[0]["lr"] = RECIPE["lr"] * min(1.0, (step + 1) / RECIPE["warmup_steps"])
        loss = _answer_loss(model, rng.sample(task.train_rows, RECIPE["batch_size"]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def _answer_loss(model: Transformer, rows: list[Row]) -> torch.Tensor:
    """Mean cross entropy of the answers' tokens, end of sequence included."""
    prompts = [[VOCABULARY[c] for c in str(row.prompt)] for row in rows]
    answers = [[VOCABULARY[c] for c in (*row.columns["answer"], "<eos>")] for row in rows]
    pairs = list(zip(prompts, answers, strict=True))
    tokens = torch.tensor([token for prompt, answer in pairs for token in (*prompt, *answer)])
    is_answer = torch.tensor([i >= len(p) for p, a in pairs for i in range(len(p) + len(a))])
    layout = PackedLayout(tuple(len(p) + len(a) for p, a in pairs), tokens.device)
    logprobs, _ = score(model, tokens, layout, select=is_answer, temperature=1.0)
    return sft_loss(logprobs).sum() / is_answer.sum()
