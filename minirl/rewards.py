"""Rewards: functions from texts to numbers, in TRL's shape, and the check that what they return can be trained on.

A reward model is such a function too: texts go through its own tokenizer and template.

A reward function is called with keyword arguments `prompts`, `completions`, `completion_ids` and one list per other
column of the data, as far as it names them (or takes `**kwargs`), and returns one finite number per completion. Text
prompts come with text completions, chat prompts with `[{"role": "assistant", "content": text}]`.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minirl import watch
from minirl.attention import PackedLayout
from minirl.batch import Rollout
from minirl.data import Prompts, Tokenizer
from minirl.errors import InputError, RewardError
from minirl.plan import plan_microbatches
from minirl.reward_process import RewardProcess
from minirl.reward_worker import as_numbers
from minirl.sampling import request_key
from minirl.scoring import predict, unparked
from minirl.tasks import Messages, RewardFunction, Row
from minirl.weights import load_replica


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
            while len(x) > 1 and x[-1] == unread:  # transformers scores at the last token that is not this one
                x.pop()
        if (worst := max(map(len, ids))) > longest:
            raise RewardError(f"--reward-model {folder}: a text of {worst} tokens, {longest} fit; see --max-new-tokens")
        scores = torch.zeros(len(ids))
        ((*microbatches,),) = plan_microbatches([len(x) for x in ids], num_ranks=1, max_tokens=max_tokens)
        with unparked(model, device, park=park):
            for members in microbatches:
                tokens = torch.tensor([t for i in members for t in ids[i]], device=device)
                layout = PackedLayout(tuple(len(ids[i]) for i in members), device)
                none = torch.zeros_like(tokens, dtype=torch.bool)
                scores[members] = predict(model, tokens, layout, select=none)[1].float().cpu()
        return scores.tolist()

    return reward_model


def overlong_penalty(*, limit: int, buffer: float) -> RewardFunction:
    """A reward of 0 up to limit - buffer tokens, then linearly down to -1 at `limit` and beyond.

    Soft overlong punishment, DAPO, arXiv:2503.14476 eq. 13.
    """

    def overlong(completion_ids: Sequence[Sequence[int]]) -> list[float]:
        return [min(0.0, max(-1.0, (limit - buffer - len(ids)) / buffer)) for ids in completion_ids]

    return overlong


def weighted(
    functions: Mapping[str, RewardFunction], weights: Sequence[float], *, logged: Mapping[str, RewardFunction]
) -> tuple[dict[str, RewardFunction], Tensor]:
    """All functions, rewards first, and their weights fp64 [K]: 1 each unless given, 0 for those only `logged`.

    Raises InputError when the number of weights is not that of the rewards.
    """
    if weights and len(weights) != len(functions):
        raise InputError(f"--reward-weights {' '.join(map(str, weights))}: the rewards are {', '.join(functions)}")
    all_weights = [*(weights or [1.0] * len(functions)), *[0.0] * len(logged)]
    return {**functions, **logged}, torch.tensor(all_weights, dtype=torch.float64)


def required_arguments(function: RewardFunction) -> set[str]:
    """Names of the arguments that the function cannot do without."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


def check_columns(functions: Mapping[str, RewardFunction], rows: Sequence[Row]) -> None:
    """Raise InputError naming row, field and function unless each row has what each function requires."""
    for name, function in functions.items():
        required = required_arguments(function) - {"prompts", "completions", "completion_ids"}
        for row in rows:
            if missing := sorted(required - row.columns.keys()):
                there = f"only {sorted(row.columns)}, and prompts, completions, completion_ids"
                raise InputError(f"{row.place}: no field {missing[0]!r}, which the reward {name} asks for; {there}")


def accepted_arguments(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that the function can take."""
    parameters = inspect.signature(function).parameters
    if missing := sorted(required_arguments(function) - arguments.keys()):
        called = getattr(function, "__name__", str(function))
        raise InputError(f"reward {called} asks for {missing[0]!r}; the data has {sorted(arguments)}")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


@dataclass(frozen=True)
class Judged:
    """Rollouts of this rank with their rows, texts and rewards fp64 [N, K], aligned.

    failed bool [N]: a function failed there, and its reward is 0 (`--on-reward-error zero`).
    """

    rollouts: list[Rollout]
    rows: list[Row]
    texts: list[str]
    rewards: Tensor
    failed: Tensor

    def __add__(self, other: "Judged") -> "Judged":
        rewards, failed = torch.cat([self.rewards, other.rewards]), torch.cat([self.failed, other.failed])
        return Judged(self.rollouts + other.rollouts, self.rows + other.rows, self.texts + other.texts, rewards, failed)

    def select(self, places: Sequence[int]) -> "Judged":
        """Those at these places."""
        rollouts, rows = [self.rollouts[i] for i in places], [self.rows[i] for i in places]
        texts, where = [self.texts[i] for i in places], list(places)
        return Judged(rollouts, rows, texts, self.rewards[where], self.failed[where])


def judge(functions: Mapping[str, RewardFunction], prompts: Prompts, rollouts: Sequence[Rollout]) -> Judged:
    """This rank's rollouts of these prompts with the rewards of K functions. Not collective.

    A worker's calls are seeded by rollout ids: a random reward does not depend on what ran before. Raises as
    `compute_rewards`.
    """
    rows = [prompts.row(rollout.rollout_id.prompt) for rollout in rollouts]
    ids = [rollout.completion for rollout in rollouts]
    texts = [prompts.tokenizer.decode(completion) for completion in ids]
    names = [rollout.rollout_id for rollout in rollouts]
    seeds = [request_key(prompts.seed, purpose=prompts.purpose, prompt=n.prompt, sample=n.sample) for n in names]
    columns = []
    for name, function in functions.items():
        watch.beat(f"reward {name}")
        columns.append(compute_rewards(function, rows, completions=texts, completion_ids=ids, seeds=seeds))
        watch.beat("")
    rewards = torch.tensor(columns, dtype=torch.float64).view(len(functions), len(rows)).T
    failed = rewards.isnan()
    return Judged(list(rollouts), rows, texts, rewards.masked_fill(failed, 0), failed.any(dim=1))


def compute_rewards(
    function: RewardFunction,
    rows: Sequence[Row],
    *,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
    seeds: Sequence[int] | None = None,
) -> list[float]:
    """Rewards of this rank's completions of these rows' prompts; nan where a worker's failure is forgiven.

    Not collective. Raises RewardError naming function, row and value unless there is one finite number per completion.
    """
    if not completions:
        return []
    shaped = [
        text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, completions, strict=True)
    ]
    arguments: dict[str, Any] = {"prompts": [row.prompt for row in rows], "completions": shaped}
    arguments["completion_ids"] = [list(ids) for ids in completion_ids]
    for name in sorted({name for row in rows for name in row.columns} - arguments.keys()):
        arguments[name] = [row.columns.get(name) for row in rows]
    accepted, places = accepted_arguments(function, arguments), [row.place for row in rows]
    if isinstance(function, RewardProcess):
        return function.judge(accepted, places=places, texts=completions, seeds=seeds or [0] * len(rows))
    answers = as_numbers(function(**accepted), len(completions))
    called = getattr(function, "__name__", str(function))
    if isinstance(answers, str):
        raise RewardError(f"reward {called} {answers}")
    for answer, place, text in zip(answers, places, completions, strict=True):
        if isinstance(answer, str):
            raise RewardError(f"reward {called} for the row at {place}, completion {text[:80]!r}: {answer}")
    return [float(answer) for answer in answers]
