"""An episode, as the function sees it that writes a rollout.

Such a function is a generator. What it yields is sampled, together with the turns of all other episodes:

    def rollout(episode):
        turn = yield episode.generate(stop=["</query>"])
        yield episode.generate(after=look_up(turn.text))

Tokens are never tokenized again: what was sampled stays as it was, and appended text is tokenized by itself. So are
messages, which the chat template writes.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from minirl.data.answers import parsed_answer
from minirl.data.chat_turns import After
from minirl.data.task import Messages, Row
from minirl.data.tokenizer import Tokenizer, as_messages
from minirl.rollouts import Rollout


@dataclass(frozen=True)
class Generate:
    """What an episode asks for: tokens to be appended, then a turn of at most `max_tokens` sampled ones.

    after: text, token ids or, between turns of a chat, messages.
    stop: strings that end the turn, as the model's stop tokens do; the token in which one ends is kept whole.
    max_tokens: None for as many as there is room for.
    """

    after: After = ""
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

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        """What the turn says: content, and where there are any, reasoning and calls of tools; see `parsed_answer`."""
        return parsed_answer(self._tokenizer, self.ids, self._rollout.tokens[: self._start])


@dataclass(frozen=True)
class Inserted:
    """Messages between two turns, and where their tokens are among those after the prompt."""

    messages: Messages
    start: int
    end: int


@dataclass
class Episode:
    """One rollout while it is made. The lists have one element per token after the prompt.

    row: of the data. seed: of this episode alone, for whatever in it is random; the same whenever it is run again.
    turns: those that have ended. max_tokens: limit of all tokens after the prompt, appended ones included.
    inserted: the messages that were appended.
    """

    row: Row
    seed: int
    max_tokens: int
    tokenizer: Tokenizer
    turns: list[Turn] = field(default_factory=list)
    rollout: Rollout | None = None
    inserted: list[Inserted] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """The tokens after the prompt, sampled and appended."""
        return [] if self.rollout is None else self.rollout.completion

    @property
    def messages(self) -> Messages:
        """The conversation so far: the prompt (text is the user's), the answers, and what was appended as messages.

        An answer is all text between messages, without special tokens: what was sampled and what was appended as text
        or ids. One that continues the prompt's last message is one with it.
        """
        messages = [dict(message) for message in as_messages(self.row.prompt)]
        tokens = self.tokens
        start = 0
        for inserted in self.inserted:
            _add_answer(messages, self.tokenizer.decode(tokens[start : inserted.start]))
            messages += (dict(message) for message in inserted.messages)
            start = inserted.end
        if start < len(tokens):
            _add_answer(messages, self.tokenizer.decode(tokens[start:]))
        return messages

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of the tools that the prompt tells of."""
        return self.tokenizer.tools

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
        after: After | dict[str, str] = "",
        stop: str | Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Generate:
        """What to yield for a turn; see `Generate`. Where `after` leaves no room the episode ends with "length".

        after: also a single message.
        """
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        return Generate([after] if isinstance(after, dict) else after, strings, max_tokens)

    def _after_prompt(self, name: str) -> list:
        if self.rollout is None:
            return []
        stream: torch.Tensor = getattr(self.rollout, name)
        return stream[self.rollout.num_prompt_tokens :].tolist()


def _add_answer(messages: Messages, text: str) -> None:
    """Add an answer to a conversation. Only the prompt's last message can be the assistant's: it goes on."""
    if messages[-1]["role"] == "assistant":
        messages[-1]["content"] += text
    else:
        messages.append({"role": "assistant", "content": text})


Turns = Generator[Generate, Turn, None]
RolloutFunction = Callable[[Episode], Turns]


def one_turn(episode: Episode) -> Turns:
    """The rollout of one completion."""
    yield episode.generate()
