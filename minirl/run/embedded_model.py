"""The bundled model for runs without --model: a tiny Llama, warm-started on a bundled task.

Rank 0 creates the model folder, with weights and tokenizer, once per task. The folder name contains a hash of this file
and the task name. The folder is renamed into place once it is complete.
"""

import hashlib
import itertools
import random
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from minirl.data.calculator import CALL_TOKENS, load_calculator
from minirl.data.sorting import ALPHABET, load_sorting
from minirl.data.task import Row, Task
from minirl.files import durable
from minirl.model.families import config_from_dict
from minirl.model.transformer import Transformer
from minirl.model.weights import write_folder
from minirl.ranks.process_group import barrier, print0, rank
from minirl.training.batch import Batch, sequence_infos_from_lengths
from minirl.training.scoring import score_batch

CONFIG: dict[str, Any] = {
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
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
INIT_STD = 0.05
WARM_START_STEPS = {"sorting": 54, "calculator": 150}
BATCH_SIZE = 64
LR = 1e-3
WARMUP_STEPS = 20
SEED = 0

VOCABULARY = {token: i for i, token in enumerate(("<eos>", "<unk>", *ALPHABET, "*", *CALL_TOKENS))}
TOKEN_PATTERN = "|".join((*CALL_TOKENS, "."))

EMBEDDED_TASKS: dict[str, Callable[[], Task]] = {"sorting": load_sorting, "calculator": load_calculator}


def embedded_model_folder(root: Path, task: str = "sorting") -> Path:
    """Return the bundled model's folder for a task in `EMBEDDED_TASKS`; create it in `root` if needed (collective)."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + task.encode()).hexdigest()
    folder = root / f"toy-{digest[:8]}"
    if rank() == 0 and not folder.exists():
        print0(
            f"creating the bundled model in {folder}, with {WARM_START_STEPS[task]} supervised steps on {task}"
        )
        _make_folder(folder, EMBEDDED_TASKS[task]())
    barrier()
    return folder


def _make_folder(folder: Path, task: Task) -> None:
    """Warm-start the model and write the model folder. Another run may do the same concurrently."""
    weights = dict(warm_start(task).named_parameters())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".half-{folder.name}-", dir=folder.parent) as temporary:
        staging_folder = Path(temporary) / folder.name
        save_tokenizer(staging_folder)
        write_folder(staging_folder, weights, config=CONFIG)
        try:
            durable.publish(staging_folder, folder)
        except OSError:
            # If the folder exists now, another run has written the same model in the meantime.
            if not folder.exists():
                raise


def save_tokenizer(folder: Path) -> None:
    """Write a Hugging Face tokenizer with one token per character and one per entry in `CALL_TOKENS`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    rust_tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
    rust_tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN_PATTERN), "isolated")
    rust_tokenizer.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=rust_tokenizer, eos_token="<eos>", unk_token="<unk>")
    tokenizer.save_pretrained(folder)


def warm_start(task: Task) -> Transformer:
    """Return a new model, trained with cross-entropy on correct answers until some of its samples are correct.

    RL cannot start from a model whose samples are all wrong.
    """
    generator = torch.Generator().manual_seed(SEED)
    model = Transformer(config_from_dict(CONFIG))
    for param in model.parameters():
        if param.ndim == 2:  # norm weights stay at 1
            torch.nn.init.normal_(param, std=INIT_STD, generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rng = random.Random(SEED)
    for step in range(WARM_START_STEPS[task.name]):
        optimizer.param_groups[0]["lr"] = LR * min(1.0, (step + 1) / WARMUP_STEPS)
        loss = _answer_loss(model, rng.sample(task.warm_start_rows or task.train_rows, BATCH_SIZE))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def _answer_loss(model: Transformer, rows: list[Row]) -> torch.Tensor:
    """Return the mean cross-entropy of the answer tokens, including the EOS token after each answer."""
    sequences = []
    is_answer = []
    for row in rows:
        prompt_ids = _ids(str(row.prompt))
        answer_ids = [*_ids(row.columns["answer"]), VOCABULARY["<eos>"]]
        sequences.append(prompt_ids + answer_ids)
        is_answer += [False] * len(prompt_ids) + [True] * len(answer_ids)
    tokens = torch.tensor(list(itertools.chain(*sequences)))
    batch = Batch(sequence_infos_from_lengths(map(len, sequences)), tokens, loss_mask=torch.tensor(is_answer))
    logprobs, _ = score_batch(model, batch)
    return -logprobs.sum() / sum(is_answer)


def _ids(text: str) -> list[int]:
    return [VOCABULARY[token] for token in re.findall(TOKEN_PATTERN, text)]
