"""Collectors with a tiny model whose tokens are letters."""

import asyncio
import functools
import math
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.prompts import PromptStream
from minirl.data.task import Row
from minirl.episodes.collector import Collector
from minirl.episodes.episode import Episode
from minirl.rollouts import Rollout
from support.engines import VOCAB, cached_model, make_engine
from support.texts import TOKENS, save_tokenizer, user

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_NEW_TOKENS = 60


# Both the start and the end of a turn are special tokens.
CHAT = (
    "{% for m in messages %}<turn>{{ m.role[0] }}:{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<turn>a:{% endif %}"
)


@functools.cache
def letter_tokenizer(template=None, *, chat=False) -> ChatTokenizer:
    """Return a tokenizer with one id per letter and the model's vocabulary size."""
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(folder, template, tokens=(*TOKENS, *"ABCDEFGHIJKLMN"), single="$A")
        tokenizer = ChatTokenizer(Path(folder), chat=chat)
    assert len(tokenizer.backend) == VOCAB
    return tokenizer


class Prompts(PromptStream):
    """Prompts whose completions have given lengths: requests have no stop tokens, and each has its own limit."""

    def __init__(self, length_of=None, *, num_rows=40, max_new_tokens=MAX_NEW_TOKENS, tokenizer=None):
        rng = random.Random(0)
        texts = ["".join(rng.choices(LETTERS, k=rng.randint(1, 9))) for _ in range(num_rows)]
        rows = [Row(text, {"answer": text[:1]}, f"f:{i}") for i, text in enumerate(texts)]
        super().__init__(
            rows,
            tokenizer or letter_tokenizer(),
            purpose="train",
            max_tokens=20 + max_new_tokens,
            max_new_tokens=max_new_tokens,
        )
        self._length_of = length_of

    def request(self, rollout_id, *arguments):
        request = super().request(rollout_id, *arguments)
        if self._length_of is None:
            return request
        return replace(request, max_new_tokens=self._length_of(rollout_id), stop_ids=frozenset())


def sums(completion_ids):
    """Return rewards that differ for any two completions."""
    return [float(sum(i * n for n, i in enumerate(ids, 1))) for ids in completion_ids]


def make_collector(
    prompts=None, *, functions=None, engine_options=None, round_tokens=None, **options
) -> Collector:
    """Return a collector with groups of three, rewarded by `functions` or by `sums`.

    round_tokens: maximum number of tokens per rollout and round, with `max_staleness`.
    """
    prompts = prompts or Prompts()
    model = cached_model("mixed", torch.float32)
    engine = make_engine(model, **(engine_options or {}))
    functions = {"sums": sums} if functions is None else functions
    collector = Collector(engine, prompts, functions, **{"group_size": 3, **options})
    if options.get("max_staleness") and round_tokens:
        collector._max_tokens_per_round = round_tokens
    return collector


async def calculator(episode: Episode):
    """Sample three turns; the reply after each turn depends on the sampled text."""
    turn = await episode.generate(stop="e", max_tokens=15)
    for _ in range(2):
        reply = "xyz" if "a" in turn.text else LETTERS[len(turn.ids)] * (episode.seed % 40)
        turn = await episode.generate(after=reply, stop=["ab", "e"], max_tokens=9)


def chat_prompts(max_new_tokens=MAX_NEW_TOKENS, template=CHAT) -> Prompts:
    tokenizer = letter_tokenizer(template, chat=True)
    return Prompts(max_new_tokens=max_new_tokens, tokenizer=tokenizer)


def unhurried(rollout):
    """Return a rollout function with a random delay before each of its requests."""

    async def waiting(episode):
        ask = episode.branches[0].request_turn

        async def ask_later(asked):
            await asyncio.sleep(random.SystemRandom().random() / 250)
            return await ask(asked)

        episode.branches[0].request_turn = ask_later
        return await rollout(episode)

    return waiting


async def branching(episode: Episode):
    """Sample turns in several branches. One episode in three has no turn in its first branch."""
    if episode.seed % 3 > 0:
        await episode.generate(max_tokens=5)
    other = episode.branch("xyz" + "".join(turn.text[:2] for turn in episode.turns))
    turn = await other.generate(max_tokens=6, stop="e")
    if episode.seed % 3 > 0:
        await episode.generate(after="q", max_tokens=3)
    await other.generate(after=f"{turn.text[:1]}p", max_tokens=4)
    unused = episode.branch("abc")
    last = episode.branch([*other.messages, user("more")])
    await last.generate(max_tokens=unused.number + 1)
    await other.generate(after="z", max_tokens=2)


def facts(rollout: Rollout) -> tuple:
    """Return the parts of a rollout that must be bitwise equal."""
    fields = ["id", "is_sampled", "logprob"]
    branches = [(one.rollout_id, one.finish_reason, one.stream[fields].tolist()) for one in rollout.branches]
    return rollout.rollout_id, rollout.finish_reason, branches


def resumed(first: Collector, second: Collector) -> Collector:
    """Return the second collector, resumed from the first collector's checkpoint."""
    second.in_flight.restore(first.in_flight.num_served, first.in_flight.ordinals)
    first.close()
    return second


def collected(
    collector: Collector, num_steps: int, num_groups: int = 4, *, first_step: int = 0
) -> list[list[tuple]]:
    """Return the rollouts and rewards of several steps. NaN rewards become infinite, so that they compare equal."""
    steps = []
    for step in range(first_step, first_step + num_steps):
        groups = collector.collect(num_groups, weight_version=step)
        assert not collector.engine.is_busy, "the engine keeps finished requests"
        rewarded = [
            (*facts(rollout), [math.inf if math.isnan(x) else x for x in rewards])
            for rollout, _, rewards in groups.rewarded_rollouts
        ]
        steps.append(rewarded)
    return steps


def assert_pauses_change_nothing(make, whole: Collector, *, budget=6) -> None:
    """Assert that pauses between rounds and restarts after a checkpoint do not change the rollouts.

    make: returns a collector for given options. whole: a collector that makes the same rollouts in one step.
    """
    pausing = {"round_tokens": budget, "max_staleness": 3}
    collector = make(**pausing)
    found = {row[0]: row for step in collected(collector, 2, 2) for row in step}
    assert collector.in_flight.ordinals, "nothing is in flight"
    again = resumed(collector, make(**pausing))
    later = {row[0]: row for step in collected(again, 2, 2, first_step=2) for row in step}
    again.close()
    assert not found.keys() & later.keys(), "a prompt is drawn twice"
    found |= later
    (expected,) = collected(whole, 1, 1 + max(found)[0])
    assert found == {row[0]: row for row in expected if row[0] in found}
