"""The episode interface that a rollout function uses to sample turns.

    async def rollout(episode):
        turn = await episode.generate(stop=["</query>"])
        await episode.generate(after=await look_up(turn.text))

The engine samples the turns of all episodes together. Nothing is retokenized: sampled tokens stay as they are, and
appended text is tokenized separately. Appended messages are rendered with the chat template, then tokenized like
appended text.
"""

import copy
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from minirl.data import answers
from minirl.data.chat_tokenizer import ChatTokenizer
from minirl.data.conversation import branch_messages
from minirl.data.messages import After, Messages, is_messages, is_token_ids, read_message, read_prompt
from minirl.data.task import Row
from minirl.data.tokenizer import is_stop_string
from minirl.errors import InputError, refuse
from minirl.files.user_code import short_repr
from minirl.rewards.calls import MAX_REWARD, validate_number
from minirl.rollouts import Request, SampledSequence, Stream, TurnRecord

# Valid arguments to `Episode.end`.
END_REASONS = (
    "stop",
    "length",
    "max_turns",
    "max_tokens",
    "tool_error",
    "parse_error",
    "timeout",
    "env_done",
)
# The default name of a reward.
REWARD = "reward"


@dataclass(frozen=True)
class TurnRequest:
    """A request to append tokens and then sample a turn.

    after: text, token ids or, between turns of a chat, messages in the form that `read_message` returns. Non-text
    content in tool results is converted to text for the chat template, but passed to reward functions unchanged.
    stop: strings that end the turn, in addition to the model's stop tokens. The token that completes a stop string is
    kept whole.
    max_tokens: maximum number of tokens to sample; None means as many as fit.
    branch: index of the turn's branch in the episode.
    """

    after: After
    stop: tuple[str, ...]
    max_tokens: int | None
    branch: int

    def __post_init__(self) -> None:
        """Raise InputError if a field is invalid, naming the field.

        `Driver` checks the contents of `after` while tokenizing.
        """
        refuse(
            not isinstance(self.after, str | list | tuple),
            f"generate(after={self.after!r:.80}): expected text, a list of token ids, or messages",
        )
        refuse(
            not all(map(is_stop_string, self.stop)),
            f"generate(stop={self.stop!r:.80}): expected non-empty strings without U+FFFD or surrogates",
        )
        if self.max_tokens is not None:
            is_valid_limit = type(self.max_tokens) is int and self.max_tokens >= 1
            refuse(
                not is_valid_limit,
                f"generate(max_tokens={self.max_tokens!r:.80}): must be an integer of at least 1",
            )


@dataclass(slots=True)
class BranchTokens:
    """The tokens of a branch up to the end of its last turn, and the branch's finish reason if no further turn follows.

    The branch and its turns share one object, so that the tokens are stored once per branch, not once per turn.
    """

    sequence: SampledSequence = field(init=False)


@dataclass(eq=False, kw_only=True)
class Turn(TurnRecord):
    """A turn that a rollout function requested: appended tokens, then sampled tokens.

    tokens: the tokens of the turn's branch. number: the turn's position in the episode, starting at 1.
    """

    tokenizer: ChatTokenizer
    tokens: BranchTokens
    number: int = 0

    @property
    def ids(self) -> list[int]:
        """The sampled token ids, including the stop token."""
        return self._sampled["id"].tolist()

    @property
    def logprobs(self) -> list[float]:
        """The logprobs of the sampled tokens, under the weights that sampled them."""
        return self._sampled["logprob"].tolist()

    @functools.cached_property
    def text(self) -> str:
        """The sampled text, without special tokens."""
        return self.text_from(self.start)

    @functools.cached_property
    def message(self) -> dict[str, Any]:
        """The parsed message: the content and, if present, the reasoning and tool calls; see `data.answers`.

        Raises InputError if the model's tool-call format is unknown.
        """
        sequence = self.tokens.sequence
        preceding_tokens = sequence.tokens[: sequence.num_prompt_tokens + self.start]
        message = answers.parse_assistant_message(self.tokenizer, self.ids, preceding_tokens)
        self.parse_error = message.get("parse_error")
        return message

    def text_from(self, start: int) -> str:
        """Return the branch's text from the token at index `start` after the prompt to the end of this turn."""
        return self.tokenizer.decode(self.tokens.sequence.tokens_after_prompt["id"][start : self.end])

    @property
    def _sampled(self) -> Stream:
        """The sampled tokens, including the stop token."""
        return self.tokens.sequence.tokens_after_prompt[self.start : self.end]


@dataclass(eq=False)
class Branch:
    """A prompt and the turns that follow it, in a running episode. The finished branch becomes a `SampledSequence`.

    number: the branch's index in the episode. turns: the finished turns. tools: JSON schemas of the tools in the
    prompt; None means the run's tools.

    The driver sets three more fields. request: the engine request, excluding sampled tokens; for a branch that the
    rollout function began, it has no prompt ids until the first turn. request_turn: async function that samples a turn.
    engine_tokens: the tokens of the finished turns.
    """

    prompt: str | Messages | list[int]
    request: Request = field(repr=False)
    number: int = 0
    turns: list[Turn] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    request_turn: Callable[[TurnRequest], Awaitable[Turn]] = field(init=False)
    engine_tokens: BranchTokens = field(default_factory=BranchTokens)

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's token ids; [] before the first turn of a branch that the rollout function began."""
        return list(self.request.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """The number of tokens after the prompt, sampled and appended."""
        return self.turns[-1].end if self.turns else 0

    @property
    def remaining_tokens(self) -> int:
        """The number of tokens, sampled or appended, that still fit into the branch."""
        return self.request.max_new_tokens - self.num_tokens

    @property
    def tokens(self) -> list[int]:
        """All tokens after the prompt, sampled and appended."""
        return self.engine_tokens.sequence.completion[: self.num_tokens] if self.turns else []

    @property
    def messages(self) -> Messages:
        """The conversation so far: the prompt, the assistant messages, and the appended messages.

        A text prompt becomes a user message. An assistant message comprises all the text, sampled or appended, between
        two other messages, without special tokens. An assistant message that continues the prompt's last message is
        merged with that message. Raises InputError if the prompt is a list of token ids.
        """
        refuse(
            is_token_ids(self.prompt),
            f"branch {self.number}: a prompt of token ids has no messages",
        )
        return branch_messages(cast(str | Messages, self.prompt), self.turns, Turn.text_from)

    @property
    def finish_reason(self) -> str:
        """The branch's finish reason if no further turn follows."""
        last_turn = self.turns[-1]
        return (
            "turn_length"
            if last_turn.finish_reason == "length" and self.remaining_tokens > 0
            else last_turn.finish_reason
        )

    async def generate(
        self,
        *,
        after: After | dict[str, str] | None = None,
        stop: str | Sequence[str] = (),
        max_tokens: int | None = None,
    ) -> Turn:
        """Append `after`, sample a turn, and return the finished turn. See `TurnRequest`.

        after: may also be a single message, or None to append nothing. If `after` leaves no room, or the episode
        reaches a limit, the episode ends and its function is cancelled at this `await`. Raises InputError for an
        invalid argument, a call after `end`, or a call while another turn of the episode is being sampled.
        """
        stop_strings = tuple(stop) if isinstance(stop, list | tuple) else (cast(str, stop),)
        appended = "" if after is None else _read_appended(after)
        return await self.request_turn(TurnRequest(appended, stop_strings, max_tokens, self.number))


class Episode:
    """A rollout in progress, which the rollout function gets as its argument.

    branches: all branches, ordered by number. The first branch begins with the row's prompt; the episode exposes the
    first branch's `generate`, `turns`, `messages`, `tokens`, `prompt`, `prompt_ids` and `remaining_tokens`.
    row: a copy of the data row. seed: seed for all randomness in this episode, the same in every run.
    tools: JSON schemas of the tools in the prompt. is_chat: whether the chat template rendered the prompt.
    temperature: sampling temperature of all turns. num_turns: number of finished turns in all branches.
    given_rewards: the rewards so far, keyed by name, including returned rewards once the function has ended. A reward
    that does not apply is None.
    end_reason: the argument of the call to `end`, if any. is_closed: whether the function has ended or was cancelled.
    environment: the --environment object, or any object that the function sets for reward functions to use.
    """

    environment: Any = None
    end_reason: str | None = None
    num_turns = 0
    is_closed = False

    def __init__(
        self,
        row: Row,
        request: Request,
        tools: list[dict[str, Any]] | None = None,
        *,
        is_chat: bool = False,
    ):
        self.row = row
        self.seed = request.rng_key
        self.tools = copy.deepcopy(tools or [])
        self.is_chat = is_chat
        self.temperature = request.temperature
        first_branch = Branch(copy.deepcopy(row.prompt), request, tools=self.tools)
        self.branches = [first_branch]
        self.prompt = first_branch.prompt
        self.prompt_ids = first_branch.prompt_ids
        self.turns = first_branch.turns
        self.generate = first_branch.generate
        self.given_rewards: dict[str, float | None] = {}

    @property
    def messages(self) -> Messages:
        """The first branch's conversation; see `Branch.messages`."""
        return self.branches[0].messages

    @property
    def tokens(self) -> list[int]:
        """All tokens after the first branch's prompt, both sampled and appended."""
        return self.branches[0].tokens

    @property
    def remaining_tokens(self) -> int:
        """The number of tokens, sampled or appended, that still fit into the first branch."""
        return self.branches[0].remaining_tokens

    def add_turn(self, turn: Turn) -> None:
        """Add a finished turn to its branch. Only the driver calls this method."""
        self.num_turns += 1
        turn.number = self.num_turns
        self.branches[turn.branch].turns.append(turn)

    def branch(
        self, prompt: str | Messages | list[int], *, tools: list[dict[str, Any]] | None = None
    ) -> Branch:
        """Begin another branch with its own prompt: text, messages or token ids.

        Each branch is a separate training sample with the rollout's advantage. All branches share the rollout's weight
        in the loss. tools: JSON schemas of the tools for a prompt given as messages; None means the run's tools. Raises
        InputError for an invalid prompt.
        """
        if not is_token_ids(prompt):
            prompt = read_prompt(prompt, "branch(...): the prompt")
        first = self.branches[0]
        number = len(self.branches)
        rollout_id = first.request.rollout_id._replace(branch=number)
        # The driver tokenizes the prompt when the branch's first turn begins.
        request = replace(first.request, rollout_id=rollout_id, prompt_ids=())
        # Keep copies, because the caller may change the lists later.
        prompt_copy, tools_copy = copy.deepcopy((prompt, tools))
        branch = Branch(prompt_copy, request, number, tools=tools_copy)
        branch.request_turn = first.request_turn
        self.branches.append(branch)
        return branch

    def reward(self, value: float, name: str = REWARD) -> None:
        """Add a value to one of the rollout's rewards. Raises InputError for an invalid value or an ended episode."""
        origin = f"episode.reward, for the row at {self.row.origin}:"
        refuse(
            self.is_closed, f"{origin} the episode has ended; set rewards before `await episode.generate()`"
        )
        valid_value = checked_reward(value, f"{origin} {name!r} is")
        self.given_rewards[name] = (self.given_rewards.get(name) or 0.0) + valid_value

    def end(self, reason: str) -> None:
        """Set the episode's finish reason; the rollout function should return next.

        reason: one of `END_REASONS`; any other reason raises InputError. Without a call to `end`, an episode has the
        finish reason of its last turn.
        """
        refuse(
            reason not in END_REASONS,
            f"episode.end({reason!r:.80}): expected one of {', '.join(END_REASONS)}",
        )
        self.end_reason = reason


def _read_appended(after: After | dict[str, str]) -> After:
    """Return `after` with validated copies of its messages, because the caller may change the originals later."""
    appended = [after] if isinstance(after, dict) else after
    if is_messages(appended):
        return [read_message(copy.deepcopy(one), "generate(after=...)") for one in appended]
    return appended


def checked_reward(value: Any, what: str) -> float:
    """Return a reward as a float. Raises InputError, prefixed with `what`, unless the value is a finite number."""
    reward_or_error = validate_number(value)
    if not isinstance(reward_or_error, float):
        raise InputError(
            f"{what} {short_repr(value)}; a reward must be a finite number with an absolute value of at most "
            f"{MAX_REWARD:g}"
        )
    return reward_or_error


# A rollout function returns a dict of rewards (None where a reward does not apply), a number (the reward named
# "reward"), or None.
RolloutFunction = Callable[[Episode], Coroutine[Any, Any, Any]]


async def one_turn(episode: Episode) -> None:
    """Sample one completion; the rollout function for single-turn runs."""
    await episode.generate()
