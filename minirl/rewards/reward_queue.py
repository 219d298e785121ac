"""Compute rewards while other rollouts decode, with one call to each function per prompt."""

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from typing import Any

import numpy as np

from minirl.data.prompts import PromptStream
from minirl.ranks.time_account import spent_on
from minirl.rewards.functions import FunctionReward, PromptGroup, Reward, RewardLike
from minirl.rollouts import RewardedRollout, Rollout


class RewardQueue:
    """Computes rewards while other rollouts decode. Not collective.

    Each call gets one prompt's completions in sample order. In a worker process, a call also gets the seed of the first
    rollout.

    groups: groups that have not been taken yet, each with its reward calls, keyed by prompt ordinal.
    episode_rewards: names of the rewards that every episode must record.
    """

    def __init__(
        self,
        functions: Mapping[str, RewardLike],
        prompts: PromptStream,
        *,
        call_timeout: float | None = None,
    ):
        """call_timeout: time limit (s) for one call to a bare function; see `FunctionReward`."""
        self._rewards = {
            name: function if isinstance(function, Reward) else FunctionReward(function, call_timeout)
            for name, function in functions.items()
        }
        self._prompts = prompts
        self.episode_rewards = [
            reward.episode_reward_name for reward in self._rewards.values() if reward.episode_reward_name
        ]
        self._in_flight: set[Future[Any]] = set()
        self.groups: dict[int, tuple[PromptGroup, list[Future[Any]]]] = {}

    def add(self, rollouts: Sequence[Rollout]) -> None:
        """Add all rollouts of one prompt, in any order, and submit their reward calls without blocking."""
        rollouts = sorted(rollouts, key=lambda rollout: rollout.rollout_id.sample)
        prompt_ordinal = rollouts[0].rollout_id.prompt_ordinal
        tokenizer = self._prompts.tokenizer
        group = PromptGroup(
            self._prompts.row(prompt_ordinal),
            rollouts,
            [tokenizer.decode(rollout.completion) for rollout in rollouts],
            tokenizer,
            seed=self._prompts.rng_key(rollouts[0].branches[0].rollout_id),
        )
        reward_futures = [reward.submit(name, group) for name, reward in self._rewards.items()]
        self._in_flight.update(reward_futures)
        self.groups[prompt_ordinal] = group, reward_futures

    @property
    def is_busy(self) -> bool:
        """Whether any call is running or waiting for a free process or thread."""
        return not all(call.done() for call in self._in_flight)

    def ready_prompts(self) -> set[int]:
        """Return the ordinals of prompts whose calls have all finished."""
        return {ordinal for ordinal, (_, calls) in self.groups.items() if all(call.done() for call in calls)}

    @spent_on("wait_rewards")
    def poll(self, timeout_s: float = 0.0) -> None:
        """Wait up to `timeout_s` for an in-flight call to finish. Raises the error of any failed call; see `finish`."""
        finished, self._in_flight = wait(self._in_flight, timeout_s, FIRST_COMPLETED)
        for call in finished:
            call.result()

    @spent_on("wait_rewards")
    def finish(self, ordinals: Iterable[int]) -> list[RewardedRollout]:
        """Remove the groups of these prompts, wait for the groups' rewards, and return the rewarded rollouts.

        The rollouts follow the order of `ordinals`. Raises RewardError, naming the function and row.
        """
        groups_and_calls = [self.groups.pop(ordinal) for ordinal in ordinals]
        for call in as_completed([call for _, calls in groups_and_calls for call in calls]):
            call.result()  # raises the first error, without waiting for later calls
        rollouts = [rollout for group, _ in groups_and_calls for rollout in group.rollouts]
        texts = [text for group, _ in groups_and_calls for text in group.texts]
        rewards_per_function = [
            reward.finish([calls[k].result() for _, calls in groups_and_calls])
            for k, reward in enumerate(self._rewards.values())
        ]
        # NumPy converts None, which means that a reward does not apply, to NaN.
        rewards = np.array(rewards_per_function, dtype=np.float64)
        rewards_by_rollout = rewards.reshape(len(self._rewards), len(rollouts)).T.tolist()
        return list(map(RewardedRollout, rollouts, texts, rewards_by_rollout))
