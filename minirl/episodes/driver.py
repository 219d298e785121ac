"""The driver runs the rollout function of one episode and turns the function's requests into engine requests."""

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from minirl.data.messages import is_messages
from minirl.data.prompts import PromptStream
from minirl.data.tokenizer import StopStrings, Tokenizer
from minirl.episodes.episode import (
    REWARD,
    Branch,
    Episode,
    RolloutFunction,
    Turn,
    TurnRequest,
    checked_reward,
)
from minirl.episodes.event_loop import event_loop
from minirl.errors import InputError, refuse
from minirl.files.json_files import json_text
from minirl.files.user_code import users_traceback
from minirl.rollouts import (
    NO_TOKENS,
    EpisodeRecord,
    Request,
    Rollout,
    SampledSequence,
    Stream,
    TurnRecord,
    concat_tokens,
    make_token_stream,
)

NO_BUDGET = sys.maxsize

# A rollout function's reply: a turn request, the error that the function raised, or None when the function returns.
Reply = TurnRequest | InputError | None


@dataclass(frozen=True)
class UserRollout:
    """The rollout function from --rollout, --tools or --environment.

    tools: JSON schemas of the tools that prompts describe. gives_reward: whether the environment has `get_reward`.
    """

    function: RolloutFunction
    tools: Sequence[dict[str, Any]] = ()
    gives_reward: bool = False


def check_rollout_function(function: Callable[..., Any], what: str) -> None:
    """Raise InputError, prefixed with `what`, unless the function is an `async def` without `yield`."""
    refuse(
        not inspect.iscoroutinefunction(function),
        f"{what}: expected `async def {function_name(function)}(episode)` with `turn = await episode.generate()`, and "
        "no `yield`; run a blocking call with `await asyncio.to_thread(call)`",
    )


def function_name(function: Callable[..., Any]) -> str:
    """Return the function's name for error messages."""
    return getattr(function, "__name__", "rollout")


class Driver:
    """Runs one episode's rollout function, including its cleanup, as a task on the event loop.

    The function replies each time it requests a turn, and once more when it ends. `begin_turn` creates the turn,
    `next_engine_request` creates the turn's engine request, and `receive_tokens` hands the finished turn to the
    function. If a turn request is rejected, `fail` raises the error inside the function.

    budget: number of tokens that the episode may still sample in this round. branch: the branch of the last turn
    request. turn: the last turn that began. has_begun: whether any turn has begun. tokens: all tokens after the prompt
    of the turn's branch, including the turn's appended tokens. last_rejection: the error from the last rejected turn
    request, if any.
    """

    budget: int
    branch: Branch
    turn: Turn
    tokens: Stream
    has_begun = False
    last_rejection: InputError | None = None

    def __init__(
        self,
        request: Request,
        prompts: PromptStream,
        function: RolloutFunction,
        replies: "list[tuple[Driver, Reply]]",
    ):
        """replies: list that collects the replies of all rollout functions in a runner."""
        row = prompts.row(request.rollout_id.prompt_ordinal)
        tokenizer = prompts.tokenizer.with_tools(row.tools)
        self.episode = Episode(row, request, tokenizer.tools, is_chat=tokenizer.is_chat(row.prompt))
        self.episode.branches[0].request_turn = self._request_turn
        self.rollout_id = request.rollout_id
        self._prompts = prompts
        self._function = function
        self._replies = replies
        # The future is already done while the function works on its next reply.
        self._turn_future: asyncio.Future[Turn] = event_loop().create_future()
        self._turn_future.cancel()
        self.task = event_loop().create_task(self._run())

    @property
    def description(self) -> str:
        """The names of the rollout function and the row, for error messages."""
        return f"rollout {function_name(self._function)} for the row at {self.episode.row.origin}"

    def begin_turn(self, turn_request: TurnRequest) -> bool:
        """Begin the turn that the function requests; return False if the branch has no room for the turn.

        Raises InputError for an invalid request, naming the function and row.
        """
        episode = self.episode
        refuse(
            episode.end_reason is not None, f"episode.generate() after episode.end({episode.end_reason!r})"
        )
        branch = episode.branches[turn_request.branch]
        if not branch.request.prompt_ids:
            branch.request = self._prompts.branch_request(
                branch.request, branch.number, branch.prompt, self.description, tools=branch.tools
            )
        appended_ids = self._appended_ids(branch, turn_request) if turn_request.after else []
        self.branch = branch
        turn_start = branch.num_tokens + len(appended_ids)
        remaining_tokens = branch.remaining_tokens - len(appended_ids)
        if remaining_tokens < 1:
            refuse(
                not episode.num_turns,
                f"{self.description}: the first turn's prompt and `after` leave no room for sampled tokens",
            )
            return False
        self.has_begun = True
        self.turn = Turn(
            turn_start,
            branch=branch.number,
            inserted=turn_request.after if is_messages(turn_request.after) else [],
            tokenizer=self._prompts.tokenizer.with_tools(branch.tools),
            tokens=branch.engine_tokens,
        )
        previous_tokens = branch.engine_tokens.sequence.tokens_after_prompt if branch.turns else NO_TOKENS
        self.tokens = concat_tokens(previous_tokens, make_token_stream(appended_ids))
        self._request = replace(
            branch.request,
            max_new_tokens=turn_start + min(remaining_tokens, turn_request.max_tokens or remaining_tokens),
            parks_after_turn=True,
            stop_test=make_stop_test(self._prompts.tokenizer, turn_request.stop)
            if turn_request.stop
            else None,
            turn_start=turn_start,
        )
        return True

    def next_engine_request(self) -> Request:
        """Return the engine request that continues the current turn within this round's budget."""
        max_new_tokens = min(self._request.max_new_tokens, len(self.tokens) + self.budget)
        return replace(self._request, sampled=self.tokens, max_new_tokens=max_new_tokens)

    def receive_tokens(self, sequence: SampledSequence) -> bool:
        """Store sampled tokens; return whether the turn is finished. A finished turn is handed to the function."""
        num_tokens = len(sequence.tokens_after_prompt)
        self.budget -= num_tokens - len(self.tokens)
        self.tokens = sequence.tokens_after_prompt
        if sequence.finish_reason == "length" and num_tokens < self._request.max_new_tokens:
            return False
        turn = self.turn
        turn.num_tokens, turn.finish_reason = num_tokens - turn.start, sequence.finish_reason
        self.episode.add_turn(turn)
        turn.tokens.sequence = replace(sequence, finish_reason=self.branch.finish_reason)
        if not self._turn_future.done():  # otherwise the task was cancelled and will report an error
            self._turn_future.set_result(turn)
        return True

    def fail(self, error: InputError) -> None:
        """Raise the error in the function, at the `await` of the requested turn."""
        self.last_rejection = error
        if not self._turn_future.done():
            self._turn_future.set_exception(error)

    def cancel(self) -> None:
        """Cancel the function at its `await`, unless the function is already cleaning up.

        The function's `finally` block runs the next time the event loop runs. From now on, the function's replies are
        ignored.
        """
        if not self.episode.is_closed:
            self.episode.is_closed = True
            self.task.cancel()

    def finished_rollout(self, finish_reason: str | None, rewards: Mapping[str, float | None]) -> Rollout:
        """Return the rollout up to the end of the last turn. Raises InputError for an episode without turns.

        finish_reason: finish reason of the rollout and of its most recently requested branch; if None, both take the
        finish reason of that branch's last turn. Each other branch gets its finish reason from its last turn. rewards:
        all rewards, keyed by name.
        """
        episode = self.episode
        branches = [branch for branch in episode.branches if branch.turns]
        turns = [turn for branch in branches for turn in branch.turns]
        if not turns:
            rejection_note = (
                f"; the last turn request was rejected: {self.last_rejection}" if self.last_rejection else ""
            )
            raise InputError(f"ended without a turn; a rollout must await at least one turn{rejection_note}")
        if finish_reason is None:
            finish_reason = self.branch.finish_reason
        elif self.branch.turns:
            tokens = self.branch.engine_tokens
            tokens.sequence = replace(tokens.sequence, finish_reason=finish_reason)
        last_branch = branches[-1]
        # The record gets a fresh copy of the row, because the function may have changed the episode's copy.
        row = self._prompts.row(self.rollout_id.prompt_ordinal)
        episode_record = EpisodeRecord(
            list(map(turn_record, turns)),
            rewards,
            episode.environment,
            last_branch.prompt,
            last_branch.tools,
            row,
        )
        return Rollout(
            tuple(branch.engine_tokens.sequence for branch in branches), finish_reason, episode_record
        )

    async def _run(self) -> None:
        reply: Reply = None
        try:
            returned_rewards = await self._function(self.episode)
            refuse(
                not self._turn_future.done(),
                "ended while one of its turns was being sampled; await every turn",
            )
            if returned_rewards is not None:
                add_returned_rewards(self.episode.given_rewards, returned_rewards)
        except InputError as error:
            reply = error
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            reply = InputError(f"raised\n{users_traceback(error)}")
        self._reply(reply)
        for branch in self.episode.branches:
            # Break the reference cycle; otherwise only the garbage collector would free the episode.
            branch.request_turn = _reject_turn_request

    async def _request_turn(self, turn_request: TurnRequest) -> Turn:
        """Request a turn for the function; return the finished turn."""
        refuse(self.episode.is_closed, "generate(): the episode has ended")
        refuse(
            not self._turn_future.done(),
            "generate(): a second turn was requested while the first is still being sampled; await each turn before "
            "requesting the next",
        )
        self._turn_future = event_loop().create_future()
        self._reply(turn_request)
        try:
            return await self._turn_future
        except asyncio.CancelledError:
            self._reply(
                InputError("generate(): cancelled while its turn was being sampled, which cannot be undone")
            )
            raise

    def _reply(self, reply: Reply) -> None:
        if not self.episode.is_closed:
            self.episode.is_closed = not isinstance(reply, TurnRequest)
            self._replies.append((self, reply))
            event_loop().stop()

    def _appended_ids(self, branch: Branch, turn_request: TurnRequest) -> list[int]:
        """Return the token ids that a turn request appends. Raises InputError, naming the function and row."""
        stop_token_id, origin = None, self.description
        if is_messages(turn_request.after):
            refuse(
                not branch.turns,
                f"{origin}: messages cannot precede the first turn; see episode.branch, or write them into the "
                "row's prompt",
            )
            is_chat = self._prompts.tokenizer.is_chat(branch.prompt)
            refuse(not is_chat, f"{origin}: messages cannot follow a text prompt; see --chat, or append text")
            last_turn = branch.turns[-1]
            stop_token_id = last_turn.ids[-1] if last_turn.finish_reason == "stop" else None
        tokenizer = self._prompts.tokenizer.with_tools(branch.tools)
        return tokenizer.encode_between_turns(turn_request.after, origin, end_id=stop_token_id)


@functools.cache
def make_stop_test(tokenizer: Tokenizer, strings: tuple[str, ...]) -> StopStrings:
    """Return the stop test for these strings.

    All turns with the same stop strings share one test, which the engine runs once per step.
    """
    return StopStrings(tokenizer, strings)


async def _reject_turn_request(turn_request: TurnRequest) -> Turn:
    raise InputError("generate(): the episode has ended")


def turn_record(turn: Turn) -> TurnRecord:
    """Return the record of a turn. Raises InputError for values that JSON cannot represent."""
    if turn.extra or turn.inserted:
        try:
            json_text([turn.extra, turn.inserted])
        except (TypeError, ValueError, RecursionError) as error:
            raise InputError(
                f"turn.extra or a message appended before the turn is not valid JSON: {error}"
            ) from None
    return TurnRecord(*(getattr(turn, field.name) for field in fields(TurnRecord)))


def add_returned_rewards(given_rewards: dict[str, float | None], returned: Any) -> None:
    """Add the rewards that a function returned to `given_rewards`. A function may return None for a reward that does
    not apply.

    A bare number is the reward named "reward". Raises InputError for a value that is not a valid reward.
    """
    if not isinstance(returned, dict):
        returned = {REWARD: checked_reward(returned, "returns")}
    for name, value in returned.items():
        if value is not None:
            value = (given_rewards.get(name) or 0.0) + checked_reward(value, f"returns {name!r}:")
        given_rewards[name] = value
