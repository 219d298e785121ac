"""Load what the flags name: the task with its rewards, the function of rollouts, the prompts with their tokenizer."""

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
from minirl.data.task import RewardFunction, Row, Task
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
from minirl.run.config import ROLLOUT_CODE, RunConfig, model_folder_of_field, rollout_flags
from minirl.run.embedded_model import EMBEDDED_TASKS
from minirl.run.planning import default_microbatch_tokens

# Names of metrics under reward/ and eval/ that a reward function must not have.
RESERVED = {
    "",
    *"reward reward_model overlong before mean std frac_equal_groups not_applicable"
    " len_mean truncated majority".split(),
}


def load_rollout(config: RunConfig) -> UserRollout | None:
    """The function of --rollout, --tools or --environment; None without these flags.

    Raises InputError. Not collective.
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
            loaded = UserRollout(functions[0])
        else:
            from minirl.extras.agents import tool_loop

            is_tools = kind == "tools"
            loaded = (
                tool_loop.tools_rollout(functions)
                if is_tools
                else tool_loop.environment_rollout(functions[0])
            )
    for reward in config.reward:
        is_given = kind == "rollout" or (loaded.gives_reward and reward == EPISODE)
        refuse(
            reward.partition(":")[0] == EPISODE and not is_given,
            f"--reward {reward}: --{kind} {spec} gives no such reward; an --environment gives --reward {EPISODE} if it "
            "has `get_reward(self)`. Or write a function of completions or `environments`: --reward FILE.py:FUNCTION",
        )
    return loaded


def load_task(config: RunConfig, *, has_rewards: bool = False) -> Task:
    """Load the task that the flags name, and check all rows of its files. Not collective.

    has_rewards: whether the script has rewards of its own. Raises InputError naming file, line, field or flag.
    """
    data, eval_data = config.data, config.eval_data
    name: str = config.task
    if name == "auto":
        name = "jsonl" if data else "sorting"
    if name in EMBEDDED_TASKS:
        refuse(data or eval_data, f"--task {name} makes its own prompts; leave out --data and --eval-data")
        return EMBEDDED_TASKS[name]()
    if data is None:
        refuse(name != "gsm8k", f"--task {name} needs --data")
        data, eval_data = TRAIN_DATA, eval_data or (TEST_DATA,)
    refuse(
        len({Path(path).stem for path in eval_data}) < len(eval_data),
        f"--eval-data {' '.join(eval_data)}: two files of one name; metrics go by name",
    )
    if name == "gsm8k":
        return load_gsm8k(data, eval_data)
    refuse(
        config.is_rewarded and not (config.reward or config.reward_model or has_rewards),
        "--data needs --reward FILE.py:FUNCTION, or --reward episode where the rollouts give it, --reward-model DIR or "
        "--task gsm8k",
    )
    return load_jsonl_task(data, eval_data)


def load_rewards(
    config: RunConfig, task: Task, script_rewards: Mapping[str, RewardFunction] | None = None
) -> tuple[Mapping[str, RewardLike], Mapping[str, RewardLike]]:
    """The rewards to train on, and those that are only logged, by name. Not collective.

    script_rewards: the script's, which replace the task's and those of --reward. With --reward or --reward-model (which
    the caller adds) the task's own rewards are only logged, not trained on.

    It starts the processes of --reward, whose functions say which arguments they take: call it once flags and data have
    been checked and the run's folder is locked. Raises InputError naming flag and function, and the file, line and
    field of a row that lacks an argument.
    """
    if not config.reward and not config.reward_model:
        return task.rewards if script_rewards is None else script_rewards, task.extra_scores
    logged = {**task.rewards, **task.extra_scores}
    specs: dict[str, str] = {}
    for spec in config.reward:
        name = spec.rpartition(":")[2]
        refuse(
            name in {*RESERVED, *config.reward_models, *logged, *specs},
            f"--reward {spec}: the name {name!r} is that of another reward or metric; rename the function",
        )
        specs[name] = spec
    loaded = {name: _load_reward(config, spec) for name, spec in specs.items()}
    rows = itertools.chain(task.train_rows, *task.eval_sets.values())
    check_columns(loaded, rows, has_environment=bool(config.environment))
    return loaded if script_rewards is None else script_rewards, logged


def _load_reward(config: RunConfig, spec: str) -> Reward:
    """A reward of --reward: in processes, or in this one if it asks for OBJECT_ARGUMENTS. Raises InputError."""
    source, _, name = spec.rpartition(":")
    if spec == EPISODE:
        return EpisodeReward()
    if source == EPISODE:
        return EpisodeReward(name)
    reward = WorkerReward(spec, timeout_s=config.call_timeout, num_workers=config.workers)
    if not any(map(reward.signature.takes, OBJECT_ARGUMENTS)):
        return reward
    # Its calls cannot leave this process, which only the loaded function could tell.
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
    """The policy's config, and the training prompts and the held-out ones with their tokenizer.

    tools, scalar_head: see `Setup`. If the folder has weights, these are checked, too. Raises InputError naming files,
    rows and flags.
    """
    model_config = read_config(model_folder, scalar_head=None if scalar_head else False)
    model_config = dataclasses.replace(model_config, scalar_head=scalar_head, adapters=config.adapters)
    if any(model_folder.glob("*.safetensors")):
        check_weights(model_config, model_folder)
    tokenizer = load_tokenizer(config, model_folder, tools, user_rollout, model_config.vocab_size)
    max_new_tokens = config.max_new_tokens or task.max_new_tokens
    sizes = (config.cache_tokens, config.max_tokens_per_microbatch)
    limits = [default_microbatch_tokens(max_new_tokens) if size == "auto" else size for size in sizes]
    limits.append(model_config.max_position_embeddings)
    if teacher_folder := model_folder_of_field(config, "teacher"):
        limits.append(_check_teacher(teacher_folder, tokenizer, model_config.vocab_size))
    held_out: list[Row] = []
    notes_on_rows = []
    for source, rows in task.eval_sets.items():
        num_rows = min(len(rows), config.eval_rows)
        # A constant seed: the same rows in any run. The first ones of a sorted file would be no fair sample.
        sample = random.Random(0).sample(range(len(rows)), num_rows)
        held_out += [rows[i] for i in sorted(sample)]
        if num_rows < len(rows):
            notes_on_rows.append(f"{source}: a fixed sample, {num_rows:,} of {len(rows):,} rows")
    stream = functools.partial(
        PromptStream,
        tokenizer=tokenizer,
        seed=config.seed,
        max_tokens=min(limits),
        max_new_tokens=max_new_tokens,
    )
    train = stream(task.train_rows, purpose="train")
    return model_config, train, stream(held_out, purpose="eval", notes=notes_on_rows)


def _check_teacher(folder: Path, tokenizer: ChatTokenizer, vocab_size: int) -> int:
    """Return a teacher's most positions. Raises InputError if one of the policy's ids is not the same token for it."""
    teacher = read_config(folder, scalar_head=False)
    ids, teachers_ids = (one.backend.get_vocab() for one in (tokenizer, Tokenizer(folder)))
    different = sorted(token for token, _ in ids.items() ^ teachers_ids.items())[:3]
    refuse(
        different,
        f"--teacher {folder}: its tokenizer differs from that of {tokenizer.folder}, in "
        f"{', '.join(different)}; take a teacher with the same ids",
    )
    known = min(max(ids.values()) + 1, vocab_size)
    refuse(
        teacher.vocab_size < known,
        f"--teacher {folder}: has {teacher.vocab_size} embeddings and the tokenizer {known} tokens",
    )
    return teacher.max_position_embeddings


def load_tokenizer(
    config: RunConfig,
    folder: Path,
    tools: Sequence[Tool],
    user_rollout: UserRollout | None,
    vocab_size: int | None = None,
) -> ChatTokenizer:
    """The tokenizer, whose prompts describe the script's tools, or those of --tools or --environment.

    Raises InputError if it cannot read the calls of the latter or write their results, and for template arguments that
    change no prompt.
    """
    user_tools = [] if user_rollout is None else user_rollout.tools
    refuse(
        tools and user_tools,
        "--tools or --environment: this script describes its own tools, which nobody calls; use --rollout",
    )
    tokenizer = ChatTokenizer(
        folder,
        chat=config.chat,
        template_arguments=config.template_arguments,
        tools=tools or user_tools,
        vocab_size=vocab_size,
    )
    tokenizer.check_arguments("--chat-template-kwargs")
    if user_tools:
        check_calls_parsable(tokenizer)
        result = {"role": "tool", "name": user_tools[0]["function"]["name"], "content": "a"}
        tokenizer.encode_following_messages([result], "the result of a tool", end_id=None)
    return tokenizer
