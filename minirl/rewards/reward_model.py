"""A reward model as a reward function."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from minirl.data.task import Messages, RewardFunction
from minirl.data.tokenizer import Tokenizer
from minirl.errors import InputError, RewardError
from minirl.model.attention import PackedLayout
from minirl.model.weights import load_replica
from minirl.training.assignment import plan_microbatches
from minirl.training.frozen_models import unparked
from minirl.training.scoring import scalar_outputs


def load_reward_model(
    folder: Path, *, dtype: torch.dtype, device: torch.device, chat: bool, max_tokens: int, park: bool
) -> RewardFunction:
    """The scalar that a sequence classifier gives prompt and completion at their last token, as a reward function.

    A whole replica on this rank, run packed in microbatches of `max_tokens` tokens; `park` keeps it in host memory
    between calls, `chat` wraps text prompts as for the policy. Not collective. Raises InputError for another model.
    """
    model, tokenizer = load_replica(folder, dtype=dtype, scalar_head=True), Tokenizer(folder, chat=chat)
    if chat and tokenizer.backend.chat_template is None:
        raise InputError(f"--reward-model {folder}: its tokenizer has no chat template; leave out --chat")
    longest = min(model.config.max_position_embeddings, max_tokens)
    unread = json.loads((folder / "config.json").read_text()).get("pad_token_id")

    @torch.no_grad()
    def reward_model(prompts: Sequence[str | Messages], completions: Sequence[str | Messages]) -> list[float]:
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        ids = [tokenizer.encode_answered(p, text) for p, text in zip(prompts, texts, strict=True)]
        for x in ids:
            while (
                len(x) > 1 and x[-1] == unread
            ):  # transformers scores at the last token that is not this one
                x.pop()
        if (worst := max(map(len, ids))) > longest:
            raise RewardError(
                f"--reward-model {folder}: a text of {worst} tokens, {longest} fit; see --max-new-tokens"
            )
        scores = torch.zeros(len(ids))
        ((*microbatches,),) = plan_microbatches([len(x) for x in ids], num_ranks=1, max_tokens=max_tokens)
        with unparked(model, device, park=park):
            for members in microbatches:
                tokens = torch.tensor([t for i in members for t in ids[i]], device=device)
                layout = PackedLayout(tuple(len(ids[i]) for i in members), device)
                none = torch.zeros_like(tokens, dtype=torch.bool)
                scores[members] = scalar_outputs(model, tokens, layout, select=none)[1].float().cpu()
        return scores.tolist()

    return reward_model
