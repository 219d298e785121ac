"""An episode, as the function sees it that writes a rollout.

Such a function is a generator. What it yields is sampled, together with the turns of all other episodes:

    def rollout(episode):
        turn = yield episode.generate(stop=["</query>"])
        yield episode.generate(after=look_up(turn.text))

Tokens are never tokenized again: what was sampled stays as it was, and appended text is tokenized by itself.

Standard library only: a process that runs such a function (`rollout_worker`) starts quickly.
"""

import functools
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minirl.data.task import Row


@dataclass(frozen=True)
class Generate:
    """What an episode asks for: tokens to be appended, then a turn of at most `max_tokens` sampled ones.

    after: text or token ids. stop: strings that end the turn, as the model's stop tokens do; the token in which one
    ends is kept whole. max_tokens: None for as many as there is room for.
    """

    after: str | Sequence[int] = ""
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None


class Turn:
    """A turn that was sampled, without what was appended before it.

    ids: the token ids, including the stop token. logprobs: of these tokens. finish_reason: "stop" or "length". start:
    where the turn begins among the episode's tokens.
    """

    def __init__(
        self,
        ids: list[int],
        logprobs: list[float],
        finish_reason: str,
        *,
        start: int,
        decode: Callable[[list[int]], str],
    ):
        """decode: makes text of token ids, without special tokens."""
        self.ids = ids
        self.logprobs = logprobs
        self.finish_reason = finish_reason
        self.start = start
        self._decode = decode

    @functools.cached_property
    def text(self) -> str:
        """Their text, without special tokens."""
        return self._decode(self.ids)


@dataclass
class Episode:
    """One rollout while it is made. The lists have one element per token after the prompt.

    row: of the data. seed: of this episode alone, for whatever in it is random; the same whenever it is run again.
    max_tokens: limit of all tokens after the prompt, appended ones included. turns: those that have ended.
    tokens: sampled and appended. loss_mask: which of them were sampled. logprobs: when they were sampled; 0 for
    appended ones. versions: of the weights that sampled them; 0 for appended ones.
    """

    row: "Row"
    seed: int
    max_tokens: int
    turns: list[Turn] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def room(self) -> int:
        """How many more tokens there may be."""
        return self.max_tokens - len(self.tokens)

    def add(self, appended: Sequence[int], turn: Turn, versions: Sequence[int]) -> None:
        """Add a turn that has ended, with the tokens that were appended before it. For who runs the episode."""
        none = [0] * len(appended)
        self.tokens += [*appended, *turn.ids]
        self.loss_mask += [False] * len(appended) + [True] * len(turn.ids)
        self.logprobs += [*none, *turn.logprobs]
        self.versions += [*none, *versions]
        self.turns.append(turn)

    def generate(
        self,
        *,
        after: str | Sequence[int] = "",
        stop: str | Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Generate:
        """What to yield for a turn; see `Generate`. Where `after` leaves no room the episode ends with "length"."""
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        return Generate(after, strings, max_tokens)


Turns = Generator[Generate, Turn, None]
AsyncTurns = AsyncGenerator[Generate, Turn]
RolloutFunction = Callable[[Episode], Turns]


def one_turn(episode: Episode) -> Turns:
    """The rollout of one completion."""
    yield episode.generate()
