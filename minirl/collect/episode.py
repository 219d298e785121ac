"""An episode, as the function sees it that writes a rollout.

Such a function is a generator. What it yields is sampled, together with the turns of all other episodes:

    def rollout(episode):
        turn = yield episode.generate(stop=["</query>"])
        yield episode.generate(after=look_up(turn.text))

Tokens are never tokenized again: what was sampled stays as it was, and appended text is tokenized by itself.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

import torch

from minirl.data.task import Row
from minirl.data.tokenizer import Tokenizer
from minirl.rollouts import Rollout


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
    """A turn that was sampled: the last tokens of a rollout, without what was appended before them."""

    def __init__(self, rollout: Rollout, start: int, tokenizer: Tokenizer):
        """start: where the turn begins among the rollout's tokens."""
        self.finish_reason = rollout.finish_reason  # "stop" or "length"
        self._rollout = rollout
        self._start = start
        self._tokenizer = tokenizer

    @property
    def ids(self) -> list[int]:
        """The sampled token ids, including the stop token."""
        return self._rollout.tokens[self._start :].tolist()

    @property
    def logprobs(self) -> list[float]:
        """Their logprobs."""
        return self._rollout.sample_logprobs[self._start :].tolist()

    @functools.cached_property
    def text(self) -> str:
        """Their text, without special tokens."""
        return self._tokenizer.decode(self._rollout.tokens[self._start :])


@dataclass
class Episode:
    """One rollout while it is made. The lists have one element per token after the prompt.

    row: of the data. seed: of this episode alone, for whatever in it is random; the same whenever it is run again.
    turns: those that have ended. max_tokens: limit of all tokens after the prompt, appended ones included.
    """

    row: Row
    seed: int
    max_tokens: int
    turns: list[Turn] = field(default_factory=list)
    rollout: Rollout | None = None

    @property
    def tokens(self) -> list[int]:
        """The tokens after the prompt, sampled and appended."""
        return [] if self.rollout is None else self.rollout.completion

    @property
    def loss_mask(self) -> list[bool]:
        """Which of `tokens` were sampled."""
        return self._after_prompt("loss_mask")

    @property
    def logprobs(self) -> list[float]:
        """Their logprobs when they were sampled; 0 for appended ones."""
        return self._after_prompt("sample_logprobs")

    @property
    def versions(self) -> list[int]:
        """The versions of the weights that sampled them; 0 for appended ones."""
        return self._after_prompt("weight_version")

    @property
    def room(self) -> int:
        """How many more tokens there may be."""
        return self.max_tokens - len(self.tokens)

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

    def _after_prompt(self, name: str) -> list:
        if self.rollout is None:
            return []
        stream: torch.Tensor = getattr(self.rollout, name)
        return stream[self.rollout.num_prompt_tokens :].tolist()


Turns = Generator[Generate, Turn, None]
RolloutFunction = Callable[[Episode], Turns]


def one_turn(episode: Episode) -> Turns:
    """The rollout of one completion."""
    yield episode.generate()
