"""Load the inputs that a run's flags specify: task, rewards, rollout function, prompts and tokenizer."""

import dataclasses
import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from minirl.data.answers import check_calls_parsable
from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.gsm8k import TEST_DATA, TRAIN_DATA, load_gsm8k
from minirl.data.jsonl import load_jsonl_task
from minirl.data.messages import Tool
from minirl.data.prompts import PromptStream
from minirl.data.task import Row, Task
from minirl.data.tokenizer import Tokenizer
from minirl.episodes.driver import UserRollout, check_rollout_function
from minirl.errors import refuse
from minirl.files.user_code import find_functions, loading_user_code, source_and_name
from minirl.model.config import ModelConfig
from minirl.model.families import read_config
from minirl.model.weights import check_weights
from minirl.rewards.functions import (
    EPISODE,
    OBJECT_ARGUMENTS,
    EpisodeReward,
    FunctionReward,
    Reward,
    RewardLike,
    check_columns,
)
from minirl.rewards.reward_workers import WorkerReward
from minirl.run.config import ROLLOUT_CODE, RunConfig, model_folder_from_config, rollout_flags
from minirl.run.embedded_model import EMBEDDED_TASKS
from minirl.run.planning import default_microbatch_tokens

# Names that reward functions may not use, because other metrics under reward/ and eval/ already use them.
RESERVED = {
    "",
    *"reward reward_model overlong before mean std frac_equal_groups not_applicable"
    " len_mean truncated majority".split(),
}


def load_rollout_function(config: RunConfig) -> UserRollout | None:
    """Load the rollout function that --rollout, --tools or --environment defines, or return None.

    Raises InputError if the code cannot be loaded or used. Not collective.
    """
    flags = rollout_flags(config)
    if not flags:
        return None
    ((kind, spec),) = flags
    source, name = source_and_name(f"--{kind}", spec, ROLLOUT_CODE[kind])
    with loading_user_code(f"--{kind} {spec}"):
        functions = find_functions(source, *(name.split(",") if kind == "tools" else [name]))
        if kind == "rollout":
            check_rollout_function(functions[0], "a rollout")
            user_rollout = UserRollout(functions[0])
        else:
            from minirl.extras.agents.tool_loop import environment_rollout, tools_rollout

            user_rollout = tools_rollout(functions) if kind == "tools" else environment_rollout(functions[0])
    for reward in config.reward:
        gives_this_reward = kind == "rollout" or (user_rollout.gives_reward and reward == EPISODE)
        refuse(
            reward.partition(":")[0] == EPISODE and not gives_this_reward,
            f"--reward {reward}: --{kind} {spec} does not return a reward with this name; an --environment must define "
            f"`get_reward(self)` to use --reward {EPISODE}. Alternatively, score completions or `environments` with "
            "--reward FILE.py:FUNCTION",
        )
    return user_rollout


def load_task(config: RunConfig, *, has_rewards: bool = False) -> Task:
    """Load the task that the flags select, and check all rows of the task's data. Not collective.

    has_rewards: whether the script defines its own rewards. Raises InputError, naming the file, line, field or flag.
    """
    data, eval_data = config.data, config.eval_data
    name: str = config.task
    if name == "auto":
        name = "jsonl" if data else "sorting"
    if name in EMBEDDED_TASKS:
        refuse(data or eval_data, f"--task {name}: generates its own prompts; drop --data and --eval-data")
        return EMBEDDED_TASKS[name]()
    if data is None:
        refuse(name != "gsm8k", f"--task {name} needs --data")
        data, eval_data = TRAIN_DATA, eval_data or (TEST_DATA,)
    refuse(
        len({Path(path).stem for path in eval_data}) < len(eval_data),
        f"--eval-data {' '.join(eval_data)}: two files have the same name and would share a metric; rename one file",
    )
    if name == "gsm8k":
        return load_gsm8k(data, eval_data)
    refuse(
        config.trains_on_rewards and not (config.reward or config.reward_model or has_rewards),
        "--data needs --reward FILE.py:FUNCTION, --reward episode (if rollouts return rewards), --reward-model DIR or "
        "--task gsm8k",
    )
    return load_jsonl_task(data, eval_data)


def load_rewards(config: RunConfig, task: Task) -> tuple[Mapping[str, RewardLike], Mapping[str, RewardLike]]:
    """Return the rewards to train on, and the rewards that are only logged, both keyed by name. Not collective.

    With --reward or --reward-model, the task's rewards are only logged; the caller adds the reward models.

    Starts the --reward worker processes, which inspect the functions' arguments. Call this function only after the
    flags and data have been checked and the run folder is locked. Raises InputError that names the flag and function;
    if a row lacks an argument, the error also names the file, line and field.
    """
    if not config.reward and not config.reward_model:
        return task.rewards, task.extra_scores
    logged_rewards = {**task.rewards, **task.extra_scores}
    specs: dict[str, str] = {}
    for spec in config.reward:
        name = spec.rpartition(":")[2]
        refuse(
            name in {*RESERVED, *config.reward_models, *logged_rewards, *specs},
            f"--reward {spec}: the name {name!r} belongs to another reward or metric; rename the function",
        )
        specs[name] = spec
    loaded = {name: _load_reward(config, spec) for name, spec in specs.items()}
    rows = itertools.chain(task.train_rows, *task.eval_sets.values())
    check_columns(loaded, rows, has_environment=bool(config.environment))
    return loaded, logged_rewards


def _load_reward(config: RunConfig, spec: str) -> Reward:
    """Load a --reward function in worker processes, or in this process if an argument is in OBJECT_ARGUMENTS.

    Raises InputError if the function cannot be loaded.
    """
    source, _, name = spec.rpartition(":")
    if spec == EPISODE:
        return EpisodeReward()
    if source == EPISODE:
        return EpisodeReward(name)
    reward = WorkerReward(spec, timeout_s=config.call_timeout, num_workers=config.workers)
    if not any(map(reward.signature.takes, OBJECT_ARGUMENTS)):
        return reward
    # Objects cannot be sent to another process. A function's arguments are known only once the function is loaded.
    reward.stop()
    with loading_user_code(f"--reward {spec}"):
        (function,) = find_functions(source, name)
    return FunctionReward(function, config.call_timeout)


def load_prompts(
    config: RunConfig,
    task: Task,
    model_folder: Path,
    *,
    tools: Sequence[Tool],
    user_rollout: UserRollout | None,
    scalar_head: bool = False,
) -> tuple[ModelConfig, PromptStream, PromptStream]:
    """Return the policy's config and two `PromptStream`s: the training prompts and the held-out prompts.

    Each `PromptStream` carries the tokenizer.

    tools, scalar_head: see `Setup`. Also checks the folder's weights, if any. Raises InputError, naming the files, rows
    and flags at fault.
    """
    model_config = read_config(model_folder, scalar_head=None if scalar_head else False)
    model_config = dataclasses.replace(model_config, scalar_head=scalar_head, adapters=config.adapters)
    if any(model_folder.glob("*.safetensors")):
        check_weights(model_config, model_folder)
    tokenizer = load_tokenizer(config, model_folder, tools, user_rollout, model_config.vocab_size)
    max_new_tokens = config.max_new_tokens or task.max_new_tokens
    limits = (config.cache_tokens, config.max_tokens_per_microbatch, model_config.max_position_embeddings)
    token_limits = [
        default_microbatch_tokens(max_new_tokens) if limit == "auto" else limit for limit in limits
    ]
    if teacher_folder := model_folder_from_config(config, "teacher"):
        token_limits.append(_check_teacher(teacher_folder, tokenizer, model_config.vocab_size))
    held_out: list[Row] = []
    eval_sampling_notes = []
    for source, rows in task.eval_sets.items():
        num_rows = min(len(rows), config.eval_rows)
        # A constant seed selects the same rows in every run. The first rows of a sorted file would be a biased sample.
        sampled_indices = random.Random(0).sample(range(len(rows)), num_rows)
        held_out += [rows[i] for i in sorted(sampled_indices)]
        if num_rows < len(rows):
            eval_sampling_notes.append(f"{source}: a fixed sample, {num_rows:,} of {len(rows):,} rows")
    make_stream = functools.partial(
        PromptStream,
        tokenizer=tokenizer,
        seed=config.seed,
        max_tokens=min(token_limits),
        max_new_tokens=max_new_tokens,
    )
    train_prompts = make_stream(task.train_rows, purpose="train")
    return model_config, train_prompts, make_stream(held_out, purpose="eval", notes=eval_sampling_notes)


def _check_teacher(folder: Path, tokenizer: ChatTokenizer, vocab_size: int) -> int:
    """Return a teacher's maximum number of positions. Raises InputError if teacher and policy token ids differ."""
    teacher_config = read_config(folder, scalar_head=False)
    ids, teachers_ids = (one.backend.get_vocab() for one in (tokenizer, Tokenizer(folder)))
    mismatched_tokens = sorted(token for token, _ in ids.items() ^ teachers_ids.items())[:3]
    refuse(
        mismatched_tokens,
        f"--teacher {folder}: its tokenizer and the policy's tokenizer ({tokenizer.folder}) disagree on these tokens: "
        f"{', '.join(mismatched_tokens)}; use a teacher with the same token ids",
    )
    num_tokens = min(max(ids.values()) + 1, vocab_size)
    refuse(
        teacher_config.vocab_size < num_tokens,
        f"--teacher {folder}: has only {teacher_config.vocab_size} embeddings for {num_tokens} tokens; use a "
        "teacher with the policy's vocabulary",
    )
    return teacher_config.max_position_embeddings


def load_tokenizer(
    config: RunConfig,
    folder: Path,
    tools: Sequence[Tool],
    user_rollout: UserRollout | None,
    vocab_size: int | None = None,
) -> ChatTokenizer:
    """Load the tokenizer. Chat prompts describe the tools from the script, --tools or --environment.

    Raises InputError if the tokenizer cannot parse tool calls or render tool results (for --tools or --environment), or
    if the chat template ignores a template argument.
    """
    user_tools = [] if user_rollout is None else user_rollout.tools
    refuse(
        tools and user_tools,
        "--tools or --environment: this script describes its own tools and would never call yours; use --rollout",
    )
    tokenizer = ChatTokenizer(
        folder,
        chat=config.chat,
        template_arguments=config.template_arguments,
        tools=tools or user_tools,
        vocab_size=vocab_size,
    )
    tokenizer.check_template_arguments()
    if user_tools:
        check_calls_parsable(tokenizer)
        tool_message = {"role": "tool", "name": user_tools[0]["function"]["name"], "content": "a"}
        tokenizer.encode_following_messages([tool_message], "the result of a tool", end_id=None)
    return tokenizer
