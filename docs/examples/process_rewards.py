r"""Process rewards from a model with another tokenizer: each step is a turn, which the reward model reads as text.

patch -o turn_rewards.py train_grpo.py docs/objectives/turn_rewards.diff
PRM=DIR torchrun --nproc-per-node 8 turn_rewards.py --model Qwen/Qwen2.5-1.5B-Instruct --chat --task gsm8k \
    --data train.jsonl --rollout docs/examples/process_rewards.py:solve

PRM is the folder or Hub id of a token classifier that scores steps, such as a model from TRL's PRMTrainer. A step ends
with an empty line, or with $STEP_END. Turns end between two policy tokens, so no score needs token alignment.
"""

import os

import torch
from transformers import AutoModelForTokenClassification, AutoTokenizer

STEP_END = os.environ.get("STEP_END", "\n\n")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Loaded on import, before the run plans its memory.
TOKENIZER = AutoTokenizer.from_pretrained(os.environ["PRM"])
MODEL = AutoModelForTokenClassification.from_pretrained(os.environ["PRM"], dtype="auto").to(DEVICE).eval()


@torch.no_grad()
def score_steps(prompt, steps):
    """Return each step's probability of being correct: the last label's probability at the last token."""
    ids = TOKENIZER(prompt)["input_ids"]
    ends = []
    for step in steps:
        ids += TOKENIZER(step, add_special_tokens=False)["input_ids"]
        ends.append(len(ids) - 1)
    logits = MODEL(torch.tensor([ids], device=DEVICE)).logits[0, ends]
    return logits.float().softmax(-1)[:, -1].tolist()


async def solve(episode):
    """Sample a completion with one turn per step. Nothing is appended, so the tokens equal a single turn's."""
    turn = await episode.generate(stop=STEP_END)
    while STEP_END in turn.text and episode.remaining_tokens:
        turn = await episode.generate(stop=STEP_END)
    prompt = episode.row.prompt
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    scores = score_steps(question, [turn.text for turn in episode.turns])
    for turn, score in zip(episode.turns, scores, strict=True):
        turn.extra["reward"] = score
