"""Rewards: functions from texts to numbers, in TRL's shape, and the check that what they return can be trained on.

A reward model is such a function too: texts go through its own tokenizer and template.

A reward function is called with keyword arguments `prompts`, `completions`, `completion_ids` and one list per other
column of the data, as far as it names them (or takes `**kwargs`), and returns one finite number per completion. Text
prompts come with text completions, chat prompts with `[{"role": "assistant", "content": text}]`.
"""

import importlib.util
import inspect
import json
import math
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
from minirl.errors import InputError
from minirl.plan import plan_microbatches
from minirl.scoring import predict, unparked
from minirl.tasks import Messages, RewardFunction, Row
from minirl.weights import load_replica


def load_reward(spec: str) -> RewardFunction:
    """The function that "file.py:name" names. Raises InputError saying what is wrong with it."""
    path, _, name = spec.rpartition(":")
    if not path.endswith(".py") or not name:
        raise InputError(f"--reward {spec}: expected file.py:function")
    if not Path(path).is_file():
        raise InputError(f"--reward {spec}: there is no file {path}")
    module_spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise InputError(f"--reward {spec}: {path} has no function {name}")
    return function


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
            raise InputError(f"--reward-model {folder}: a text of {worst} tokens, {longest} fit; see --max-new-tokens")
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


def accepted_arguments(function: RewardFunction, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `arguments` that the function can take."""
    parameters = inspect.signature(function).parameters
    named = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    if missing := sorted(named - arguments.keys()):
        called = getattr(function, "__name__", str(function))
        raise InputError(f"reward {called} asks for {missing[0]!r}; the data has {sorted(arguments)}")
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(arguments)
    return {name: value for name, value in arguments.items() if name in parameters}


@dataclass(frozen=True)
class Judged:
    """Rollouts of this rank with their rows, texts and rewards fp64 [N, K], aligned."""

    rollouts: list[Rollout]
    rows: list[Row]
    texts: list[str]
    rewards: Tensor

    def __add__(self, other: "Judged") -> "Judged":
        rewards = torch.cat([self.rewards, other.rewards])
        return Judged(self.rollouts + other.rollouts, self.rows + other.rows, self.texts + other.texts, rewards)

    def select(self, places: Sequence[int]) -> "Judged":
        """Those at these places."""
        rollouts, rows, texts = [self.rollouts[i] for i in places], [self.rows[i] for i in places], self.texts
        return Judged(rollouts, rows, [texts[i] for i in places], self.rewards[list(places)])


def judge(functions: Mapping[str, RewardFunction], prompts: Prompts, rollouts: Sequence[Rollout]) -> Judged:
    """This rank's rollouts of these prompts with the rewards of K functions. Not collective.

    Raises as `compute_rewards`.
    """
    rows = [prompts.row(rollout.rollout_id.prompt) for rollout in rollouts]
    ids = [rollout.completion for rollout in rollouts]
    texts = [prompts.tokenizer.decode(completion) for completion in ids]
    columns = []
    for name, function in functions.items():
        watch.beat(f"reward {name}")
        columns.append(compute_rewards(function, rows, completions=texts, completion_ids=ids))
        watch.beat("")
    rewards = torch.tensor(columns, dtype=torch.float64).view(len(functions), len(rows)).T
    return Judged(list(rollouts), rows, texts, rewards)


def compute_rewards(
    function: RewardFunction,
    rows: Sequence[Row],
    *,
    completions: Sequence[str],
    completion_ids: Sequence[Sequence[int]],
) -> list[float]:
    """Rewards of this rank's completions of these rows' prompts. Not collective.

    Raises InputError naming function, row and value unless there is one finite number per completion.
    """
    if not completions:
        return []
    shaped = [
        text if isinstance(row.prompt, str) else [{"role": "assistant", "content": text}]
        for row, text in zip(rows, completions, strict=True)
    ]
    arguments: dict[str, Any] = {"prompts": [row.prompt for row in rows], "completions": shaped}
    arguments["completion_ids"] = list(completion_ids)
    for name in sorted({name for row in rows for name in row.columns} - arguments.keys()):
        arguments[name] = [row.columns.get(name) for row in rows]
    rewards = function(**accepted_arguments(function, arguments))
    called = getattr(function, "__name__", str(function))
    if not hasattr(rewards, "__len__") or getattr(rewards, "ndim", 1) == 0:
        raise InputError(f"reward {called} returned {rewards!r}; expected a list of {len(completions)} numbers")
    if len(rewards) != len(completions):
        raise InputError(f"reward {called} returned {len(rewards)} values for {len(completions)} completions")
    return [_number(called, r, row.place, text) for r, row, text in zip(rewards, rows, completions, strict=True)]


def _number(function: str, value: Any, place: str, completion: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or isinstance(value, str):
        raise InputError(
            f"reward {function} returned {value!r} for the row at {place}, completion {completion[:80]!r}; "
            "return a finite number for every completion"
        )
    return number
