r"""Process rewards by a model with another tokenizer: a step is a turn, which the reward model reads as text.

patch -o turn_rewards.py train_grpo.py docs/objectives/turn_rewards.diff
PRM=DIR torchrun --nproc-per-node 8 turn_rewards.py --model Qwen/Qwen2.5-1.5B-Instruct --chat --task gsm8k \
    --data train.jsonl --rollout docs/examples/process_rewards.py:solve

PRM is the folder or hub id of a token classifier of steps, such as TRL's PRMTrainer makes. A step ends with an empty
line, or with $STEP_END. Turns end between two tokens of the policy, so no score is mapped from token to token.
"""

import os

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

STEP_END = os.environ.get("STEP_END", "\n\n")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Loaded with this file, before the run plans its memory.
TOKENIZER = AutoTokenizer.from_pretrained(os.environ["PRM"])
MODEL = AutoModelForTokenClassification.from_pretrained(os.environ["PRM"], dtype="auto").to(DEVICE).eval()


@torch.no_grad()
def score_steps(prompt, steps):
    """Return the probability that each step is right: that of the last label, at the step's last token."""
    ids = TOKENIZER(prompt)["input_ids"]
    ends = []
    for step in steps:
        ids += TOKENIZER(step, add_special_tokens=False)["input_ids"]
        ends.append(len(ids) - 1)
    logits = MODEL(torch.tensor([ids], device=DEVICE)).logits[0, ends]
    return logits.float().softmax(-1)[:, -1].tolist()


async def solve(episode):
    """Sample one completion, a turn for each step. The same tokens as in one turn: nothing is appended."""
    turn = await episode.generate(stop=STEP_END)
    while STEP_END in turn.text and episode.remaining_tokens:
        turn = await episode.generate(stop=STEP_END)
    prompt = episode.row.prompt
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    scores = score_steps(question, [turn.text for turn in episode.turns])
    for turn, score in zip(episode.turns, scores, strict=True):
        turn.extra["reward"] = score
