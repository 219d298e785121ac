"""The work around the model at real sizes: CPU seconds of one rank for rewards, exchange, layouts, files and data.

    PYTHONPATH=. python benchmarks/around_the_model.py [--rollouts 8192] [--rows 100000]

No model: the rollouts have random tokens, a prompt of 200 and completions of 900 on average, 16 of a prompt. The
tokenizer is a byte-level BPE of 8,192 tokens, trained here on random words. Each row is the CPU time of this process,
of all its threads; the step itself waits only for `of this thread`.

judge: a reward queue with a function that only counts, so mainly the texts. exchange: the table of all rollouts, and
the exchange at one rank. streams: the microbatches of a batch, and a number for each sequence spread over its tokens.
layouts: of all microbatches, without the portable kernel's index. log_rollouts: writing the texts. data: reading and
checking a JSONL file of rows of about 190 bytes, and the requests of one step; memory is the growth of the process.
"""

import argparse
import contextlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from minirl.data.jsonl import load_jsonl_task
from minirl.data.prompts import PromptStream
from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.ranks import process_group
from minirl.report.logger import Logger, rollout_records
from minirl.rewards.reward_queue import RewardQueue
from minirl.rollouts import Rollout, RolloutId
from minirl.training.assignment import plan_updates
from minirl.training.batch import exchange, gather_table

VOCAB_SIZE = 8192
GROUP_SIZE = 16
PROMPT_TOKENS = 200
MAX_TOKENS = 16_384  # limit of a microbatch


@contextlib.contextmanager
def measured(name: str) -> Iterator[None]:
    """Print the CPU seconds that the block takes."""
    process_s = time.process_time()
    thread_s = time.thread_time()
    yield
    process_s = time.process_time() - process_s
    thread_s = time.thread_time() - thread_s
    print(f"| {name:22} | {process_s:6.2f} s | {thread_s:6.2f} s of this thread |", flush=True)


def words(rng: random.Random, count: int) -> str:
    """Random words, which a BPE cuts into a token or two each."""
    lengths = rng.choices((2, 3, 4, 5, 7), k=count)
    return " ".join("".join(rng.choices("etaoinshrdlu", k=length)) for length in lengths)


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE with an end-of-sequence token."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((words(rng, 1000) for _ in range(50)), trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>").save_pretrained(folder)


def make_rollouts(count: int, prompts: PromptStream) -> list[Rollout]:
    """Rollouts with random tokens, whose prompts are those of the stream."""
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i in range(count):
        ordinal, sample = divmod(i, GROUP_SIZE)
        if sample == 0:
            prompt = torch.randint(1, VOCAB_SIZE, (PROMPT_TOKENS,), generator=generator)
        num_sampled = int(torch.randint(600, 1200, (), generator=generator))
        sampled = torch.randint(1, VOCAB_SIZE, (num_sampled,), generator=generator)
        mask = torch.arange(PROMPT_TOKENS + num_sampled) >= PROMPT_TOKENS
        rollout = Rollout(
            tokens=torch.cat([prompt, sampled]),
            loss_mask=mask,
            sample_logprobs=-mask.float(),
            weight_version=mask.int(),
            num_prompt_tokens=PROMPT_TOKENS,
            rollout_id=RolloutId(ordinal, sample),
            finish_reason="stop",
        )
        rollouts.append(rollout)
    return rollouts


def measure_step(count: int, folder: Path) -> None:
    """Process a step's rollouts as a step does before and after the model."""
    process_group.start()
    rows = [Row(f"row {i}", {"answer": i}, f"f:{i}") for i in range(count // GROUP_SIZE)]
    prompts = PromptStream(
        rows, Tokenizer(folder), purpose="train", max_tokens=4096, max_new_tokens=1200, vocab_size=VOCAB_SIZE
    )
    rollouts = make_rollouts(count, prompts)

    with measured("judge"):
        queue = RewardQueue({"length": num_characters}, prompts)
        for first in range(0, count, GROUP_SIZE):
            queue.add(rollouts[first : first + GROUP_SIZE])
        judged = queue.finish(range(len(rows)))
    with measured("exchange"):
        table = gather_table(rollouts, judged.rewards)
        batch = exchange(rollouts, table, [0] * count)
    with measured("plan"):
        plan = plan_updates(
            [range(count)],
            table.num_tokens.tolist(),
            table.prefixes,
            num_ranks=1,
            max_tokens=MAX_TOKENS,
        )
    microbatches = plan.of_rank(0)[0]
    with measured("streams"):
        batch.spread(torch.ones(count))
        micros = [batch.select(members) for members in microbatches]
    with measured("layouts"):
        layouts = [micro.layout() for micro in micros]
        for layout in layouts:
            assert len(layout.positions) == len(layout.computed_tokens) <= len(layout.hidden_index)
            assert len(layout.cu_queries) == len(layout.cu_seqlens)
    logger = Logger(folder, {}, wandb_mode="off")
    with measured("log_rollouts"):
        logger.log_rollouts(1, rollout_records(judged, ["length"], advantage=torch.zeros(count)))


def num_characters(completions: list[str]) -> list[float]:
    """The reward: the number of characters."""
    return [float(len(text)) for text in completions]


def resident_mib() -> float:
    """The process's own memory now, in MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def write_rows(path: Path, count: int) -> None:
    rng = random.Random(1)
    texts = [words(rng, 30) for _ in range(1000)]
    with open(path, "w") as file:
        for i in range(count):
            file.write(json.dumps({"prompt": f"{i} {texts[i % 1000]}", "answer": str(i)}) + "\n")


def measure_data(path: Path, folder: Path) -> None:
    """The start of a run with this file, and the requests of one step."""
    tokenizer = Tokenizer(folder)
    tokenizer.encode(Row("warm", {}, ""))
    before = resident_mib()
    with measured("data: read"):
        task = load_jsonl_task(str(path), [])
    with measured("data: check"):
        prompts = PromptStream(
            task.train_rows,
            tokenizer,
            purpose="train",
            max_tokens=4096,
            max_new_tokens=1200,
            vocab_size=VOCAB_SIZE,
        )
        prompts.notes(per_step=512)
    with measured("data: 512 prompts x 16"):
        prompts.requests(0, 512, group_size=GROUP_SIZE)
    print(f"| data: memory           | {resident_mib() - before:6.0f} MiB |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--only-data", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_data:
        measure_data(*map(Path, args.only_data))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_tokenizer(folder)
        print(f"{args.rollouts} rollouts, {args.rows} rows")
        if args.rollouts:
            measure_step(args.rollouts, folder)
        write_rows(folder / "rows.jsonl", args.rows)
        command = [sys.executable, __file__, "--only-data", str(folder / "rows.jsonl"), name]
        subprocess.run(command, check=True, env=dict(os.environ))


if __name__ == "__main__":
    main()
