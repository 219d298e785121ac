"""Use a reward model as a reward function."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.messages import Messages
from minirl.errors import RewardError, refuse
from minirl.files.json_files import read_json_object
from minirl.model.folders import model_file
from minirl.model.weights import load_unsharded_model
from minirl.ranks.time_account import spent_on
from minirl.rewards.functions import StepReward
from minirl.training.assignment import plan_microbatches
from minirl.training.batch import Batch, sequence_infos_from_lengths
from minirl.training.frozen_models import FrozenModel
from minirl.training.scoring import predict_values


def load_reward_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    chat: bool,
    template_arguments: Mapping[str, Any] | None = None,
    max_tokens: int,
) -> StepReward:
    """Load a sequence classifier as a reward model.

    The reward is the classifier's score at the completion's last token.

    Not collective. Each rank holds a full replica, which scores packed microbatches of up to `max_tokens` tokens.
    chat: whether to render text prompts with the chat template and `template_arguments`, as for the policy. Raises
    InputError if the model is not a sequence classifier with one label.
    """
    model = load_unsharded_model(folder, dtype=dtype, scalar_head=True)
    tokenizer = ChatTokenizer(folder, chat=chat, template_arguments=template_arguments)
    refuse(
        chat and tokenizer.backend.chat_template is None,
        f"--reward-model {folder}: the tokenizer has no chat template; leave out --chat",
    )
    max_length = min(model.config.max_position_embeddings, max_tokens)
    pad_id = read_json_object(model_file(folder, "config.json")).get("pad_token_id")

    scorer = FrozenModel(model, predict_values, names=["values", "end_values"], device=device)

    def reward_model(prompts: Sequence[str | Messages], completions: Sequence[str | Messages]) -> list[float]:
        sequences = []
        for prompt, completion in zip(prompts, completions, strict=True):
            ids = tokenizer.encode_with_completion(prompt, completion)
            # transformers reads a classifier's score at the last token that is not config.json's pad token.
            while len(ids) > 1 and ids[-1] == pad_id:
                del ids[-1]
            sequences.append(ids)
        lengths = [len(ids) for ids in sequences]
        max_text_tokens = max(lengths)
        if max_text_tokens > max_length:
            raise RewardError(
                f"--reward-model {folder}: a text has {max_text_tokens} tokens, but at most {max_length} fit; lower "
                "--max-new-tokens"
            )

        tokens = torch.tensor(list(itertools.chain(*sequences)), device=device)
        # No token is in the loss mask, because only the value at the end of each sequence is read.
        sequence_infos = sequence_infos_from_lengths(lengths)
        batch = Batch(sequence_infos, tokens, loss_mask=torch.zeros_like(tokens, dtype=torch.bool))
        # Each rank scores its own completions, so the plan is for a single rank.
        (microbatches,) = plan_microbatches(sequence_infos, num_ranks=1, max_tokens=max_tokens)
        with spent_on("score"):
            batch = scorer.add_outputs(batch, microbatches)
        return batch.end_values[batch.last_token_index].float().tolist()

    return StepReward(reward_model)
