"""Read the policy's config, the tokenizer and the prompts that the flags name, for a run or a dry run."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from minirl.data.answers import check_readable
from minirl.data.appended_messages import following_ids
from minirl.data.prompts import PromptStream
from minirl.data.task import Task
from minirl.data.tokenizer import Tokenizer
from minirl.data.tools import Tool, tool_name
from minirl.episodes.running import UserRollout
from minirl.errors import refuse
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.model.weights import check_weights
from minirl.run.config import RunConfig, named_folder
from minirl.run.planning import enough_tokens

# The policy's config, the training prompts and the held-out ones.
LoadedPrompts = tuple[ModelConfig, PromptStream, PromptStream]


def load_prompts(
    config: RunConfig,
    task: Task,
    model_folder: Path,
    *,
    tools: Sequence[Tool],
    user_rollout: UserRollout | None,
    scalar_head: bool = False,
) -> LoadedPrompts:
    """The policy's config, and the training prompts and the held-out ones with their tokenizer.

    tools, scalar_head: see `Setup`. If the folder has weights, these are checked, too. Raises InputError naming files,
    rows and flags.
    """
    model_config = read_config(model_folder, scalar_head=None if scalar_head else False)
    model_config = dataclasses.replace(model_config, scalar_head=scalar_head, adapters=config.adapters)
    if any(model_folder.glob("*.safetensors")):
        check_weights(model_config, model_folder)
    tokenizer = load_tokenizer(config, model_folder, tools, user_rollout)
    max_new_tokens = config.max_new_tokens or task.max_new_tokens
    limits = [model_config.max_position_embeddings]
    limits += [
        enough_tokens(max_new_tokens) if size == "auto" else size
        for size in (config.cache_tokens, config.max_tokens_per_microbatch)
    ]
    if teacher_folder := named_folder(config, "teacher"):
        teacher = read_config(teacher_folder, scalar_head=False)
        # Each of the policy's token ids must be the same token for the teacher.
        ids, teachers_ids = (one.backend.get_vocab() for one in (tokenizer, Tokenizer(teacher_folder)))
        different = sorted(token for token, _ in ids.items() ^ teachers_ids.items())[:3]
        refuse(
            ids != teachers_ids,
            f"--teacher {teacher_folder}: its tokenizer differs from that of {tokenizer.folder}, in "
            f"{', '.join(different)}; take a teacher with the same ids",
        )
        known = min(max(ids.values()) + 1, model_config.vocab_size)
        refuse(
            teacher.vocab_size < known,
            f"--teacher {teacher_folder}: has {teacher.vocab_size} embeddings and the tokenizer {known} tokens",
        )
        limits.append(teacher.max_position_embeddings)
    held_out = [row for rows in task.eval_sets.values() for row in rows[: config.eval_rows]]
    train, held_out_stream = (
        PromptStream(
            rows,
            tokenizer,
            purpose=purpose,
            seed=config.seed,
            max_tokens=min(limits),
            max_new_tokens=max_new_tokens,
            vocab_size=model_config.vocab_size,
        )
        for purpose, rows in (("train", task.train_rows), ("eval", held_out))
    )
    held_out_stream.row_notes += [
        f"{path}: only the first {config.eval_rows:,} of {len(rows):,} rows"
        for path, rows in task.eval_sets.items()
        if len(rows) > config.eval_rows
    ]
    return model_config, train, held_out_stream


def load_tokenizer(
    config: RunConfig, folder: Path, tools: Sequence[Tool], user_rollout: UserRollout | None
) -> Tokenizer:
    """The tokenizer, whose prompts describe the script's tools, or those of --tools or --environment.

    Raises InputError if it cannot read the calls of the latter or write their results, and for template arguments that
    change no prompt.
    """
    called = [] if user_rollout is None else user_rollout.tools
    refuse(
        bool(tools and called),
        "--tools or --environment: this script describes its own tools, which nobody calls; use --rollout",
    )
    tokenizer = Tokenizer(
        folder,
        chat=config.chat,
        template_arguments=config.template_arguments,
        tools=tools or called,
    )
    tokenizer.check_arguments("--chat-template-kwargs")
    if called:
        check_readable(tokenizer)
        result = {"role": "tool", "name": tool_name(called[0]), "content": "a"}
        following_ids(tokenizer, [result], "the result of a tool", end_id=None)
    return tokenizer
