"""Do TRL's own reward functions give the same in minirl and in TRL? Rewards and advantages compared.

    pip install trl==1.16.0 math_verify    # the CPU will do
    PYTHONPATH=. python benchmarks/rewards.py

TRL's side is its trainer's `_generate_and_score_completions`, with generation and the forward pass replaced: its code
calls the functions and makes advantages of their results. minirl's side loads the same functions by the names that
`--reward` takes, each in its worker process, and makes advantages of groups. Both get the same chat prompts, with a
column `solution`, and the same completions: answers right, wrong, unreadable and missing, some repetitive. This
file adds an `async def` that returns None for every second completion. The advantages are compared once with all
rewards, and once with only those that may be None, so that some completions have none at all.
TRL holds rewards in fp32, so they are compared after rounding, and advantages to 1e-5. Exits with 1 above that, with 2
without TRL.
"""

import importlib.util
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from objectives import EOS, TOKEN, save_model, start_beside_trl
from torch import Tensor

from minirl.data.task import Row
from minirl.rewards.functions import arguments_of
from minirl.rewards.reward_workers import RewardWorkers
from minirl.training.advantages import group_advantages, weighted_scores

OWN_REWARDS = """
import asyncio
from trl.rewards import get_repetition_penalty_reward

repetition = get_repetition_penalty_reward(ngram_size=2)

async def every_second(completions, **columns):
    await asyncio.sleep(0.01)
    return [None if i % 2 else len(c[0]["content"]) / 100 for i, c in enumerate(completions)]
"""
TRL_NAMES = ("accuracy_reward", "think_format_reward")
OWN_NAMES = ("repetition", "every_second")
GROUP_SIZE = 8
TOLERANCE = 1e-5
SOLUTIONS = (r"\(\frac{1}{3}\)", r"\(12\)", r"\(x^2 + 1\)", "twelve", r"\(\sqrt{2}\)")
ANSWERS = (
    r"<think>easy</think>It is \(\frac{1}{3}\).",
    r"<think>a</think><think>b</think>\(12\)",
    r"\boxed{12}",
    r"<think>no end \(x^2 + 1\)",
    r"<think>so</think>\(1 + x^2\)",
    "I do not know",
    r"\(\frac{2}{6}\)",
    "",
)


def repeated_ids(index: int) -> list[int]:
    """Token ids of a completion; the repetitive ones repeat a token."""
    varied = [1 + (index + i) % 13 for i in range(index % 7)]
    return [*varied, *[TOKEN] * (index % 5), EOS]


def minirl_columns(own_file: str, rows: list[Row], texts: list[str], ids: list[list[int]]) -> Tensor:
    """Rewards fp64 [N, K], NaN for None."""
    specs = [*(f"trl.rewards:{name}" for name in TRL_NAMES), *(f"{own_file}:{name}" for name in OWN_NAMES)]
    columns = []
    for spec in specs:
        function = RewardWorkers(spec, timeout_s=120.0)
        completions = [[{"role": "assistant", "content": text}] for text in texts]
        columns_of_rows = {name: [row.columns.get(name) for row in rows] for name in rows[0].columns}
        given = {"prompts": [row.prompt for row in rows], "completions": completions, "completion_ids": ids}
        arguments = arguments_of(function, {**columns_of_rows, **given}, columns_of_rows.keys())
        rewards = function.submit(arguments, rows[0].place, texts).result()
        columns.append([math.nan if reward is None else reward for reward in rewards])
    return torch.tensor(columns, dtype=torch.float64).T


def trl_rewards(
    folder: str,
    own_file: str,
    rows: list[Row],
    texts: list[str],
    ids: list[list[int]],
    *,
    scale: str,
    kept: Tensor,
) -> tuple[Tensor, Tensor]:
    """TRL's rewards fp32 [N, K], NaN for None, and its advantages fp32 [N] of the columns `kept`."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer, rewards

    spec = importlib.util.spec_from_file_location("own", own_file)
    assert spec is not None
    assert spec.loader is not None
    own = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(own)
    functions = [getattr(rewards, name) for name in TRL_NAMES] + [getattr(own, name) for name in OWN_NAMES]
    inputs = [{"prompt": row.prompt, **row.columns} for row in rows]
    trainer = GRPOTrainer(
        model=folder,
        reward_funcs=functions,
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=False,
            report_to=[],
            per_device_train_batch_size=len(rows),
            num_generations=GROUP_SIZE,
            scale_rewards=scale,
        ),
        train_dataset=Dataset.from_list(inputs),
    )

    def generate(prompts: list[Any]) -> tuple[Any, ...]:
        prompt_ids = [[TOKEN] for _ in prompts]
        messages = [[{"role": "assistant", "content": text}] for text in texts]
        return prompt_ids, ids, None, messages, None, {}, None, None

    def forward(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        zeros = torch.zeros(len(ids), max(map(len, ids)))
        return zeros, zeros, None

    calculate = trainer._calculate_rewards
    seen: list[Tensor] = []

    def remember(*args: Any) -> Tensor:
        seen.append(calculate(*args))
        return seen[0].masked_fill(~kept, math.nan)

    trainer._generate = generate
    trainer._get_per_token_logps_and_entropies = forward
    trainer._calculate_rewards = remember
    outputs = trainer._generate_and_score_completions(inputs)
    return seen[0], outputs["advantages"]


def main() -> None:
    version = start_beside_trl()
    rows = []
    for solution in SOLUTIONS:
        row = Row([{"role": "user", "content": "?"}], {"solution": solution}, place="here")
        rows += [row] * GROUP_SIZE
    texts = [ANSWERS[i % len(ANSWERS)] * (1 + i % 2) for i in range(len(rows))]
    ids = [repeated_ids(i) for i in range(len(rows))]
    weights = torch.ones(len(TRL_NAMES) + len(OWN_NAMES), dtype=torch.float64)
    is_equal = True
    print(f"TRL {version}, {len(rows)} completions in groups of {GROUP_SIZE}")
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        own_file = str(Path(folder) / "own_rewards.py")
        Path(own_file).write_text(OWN_REWARDS)
        own = minirl_columns(own_file, rows, texts, ids)
        everything = torch.ones(len(weights), dtype=torch.bool)
        sometimes = own.isnan().any(0)
        for what, kept in (("all rewards", everything), ("rewards that may be None", sometimes)):
            for scale, norm in (("group", "group_std"), ("batch", "batch_std"), ("none", "none")):
                theirs, expected = trl_rewards(folder, own_file, rows, texts, ids, scale=scale, kept=kept)
                scores = weighted_scores(own.masked_fill(~kept, math.nan), weights)
                grouped = scores.view(-1, GROUP_SIZE)
                advantages = group_advantages(grouped, baseline="mean", norm=norm, eps=1e-4).flatten()
                difference = float((advantages - expected).abs().max())
                is_equal = is_equal and difference <= TOLERANCE
                print(f"advantages of {what}, {norm}: greatest difference {difference:.1e}")
            print(f"    {int(scores.isnan().sum())} of {len(rows)} completions without a reward")
        for name, mine, others in zip(TRL_NAMES + OWN_NAMES, own.T, theirs.T, strict=True):
            is_same = torch.isclose(mine.float(), others, rtol=0, atol=0, equal_nan=True)
            is_equal = is_equal and bool(is_same.all())
            print(f"{name:20} {int(is_same.sum())} of {len(rows)} equal, {int(mine.isnan().sum())} None")
    sys.exit(0 if is_equal else 1)


if __name__ == "__main__":
    main()
