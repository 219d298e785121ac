"""The collector turns prompts into complete groups of rewarded rollouts for the update.

A step's groups depend on the prompts, the rollout lengths and the rewards, but not on timing. The groups are
deterministic and do not depend on the number of ranks.

With `max_staleness`, a rollout may continue under new weights in a later step. All in-flight rollouts then decode in
rounds of a few tokens each. A step ends after the first round that completes enough groups, and takes the first
complete groups in prompt order. Because a step does not wait for slow rollout functions or rewards, its groups may
depend on timing. A complete rollout stays in flight until a step takes it. A checkpoint stores only the ordinals of
prompts in flight, and these prompts start over after a resume.
"""

import functools
import itertools
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from minirl.data.prompts import PromptStream
from minirl.episodes.episode import RolloutFunction, one_turn
from minirl.episodes.in_flight import PromptsInFlight
from minirl.episodes.runner import EpisodeRunner
from minirl.episodes.step_groups import Groups, select_step_groups
from minirl.generation.engine import Engine
from minirl.ranks.process_group import gather_objects
from minirl.rewards.functions import RewardLike
from minirl.rollouts import RewardedRollout

# Maximum number of tokens that a rollout samples per round, as a fraction of the maximum completion length. The number
# is clamped to ROUND_LIMITS.
# Shorter rounds replace finished prompts sooner; longer rounds synchronize the ranks less often.
ROUND_FRAC = 1 / 8
ROUND_LIMITS = (4, 512)


class Collector:
    """Collects rollouts for one prompt stream.

    engine: the engine that samples the rollouts. in_flight: the prompts that have been started but not yet taken by a
    step. temperature: sampling temperature of new rollouts that are not greedy. A script may change the temperature
    between steps.
    counts: this rank's counters; `pop` reads and resets a counter. See `EpisodeRunner`.
    evaluator: creates a runner for another prompt stream, with the same engine, rewards and rollout function.
    """

    def __init__(
        self,
        engine: Engine,
        prompts: PromptStream,
        functions: Mapping[str, RewardLike],
        *,
        rollout: RolloutFunction = one_turn,
        max_turns: int = 0,
        group_size: int = 1,
        num_greedy: int = 0,
        temperature: float = 1.0,
        reward_weights: Tensor | None = None,
        max_refills: int | None = None,
        max_staleness: int = 0,
        call_timeout: float | None = None,
    ):
        """functions: the K rewards, keyed by name. rollout: see `episode`. call_timeout: see `EpisodeRunner`.

        max_turns: maximum number of turns per episode (0 means MAX_TURNS).
        group_size: sampled rollouts per prompt, in addition to `num_greedy` greedy rollouts.
        reward_weights: fp64 [K]; if None, each reward has weight 1.
        max_refills: maximum number of refills per step. A refill drops the groups whose first reward has zero variance,
        and generates groups for new prompts in their place. After the last refill, zero-variance groups fill the rest
        of the step. If None, no group is replaced.
        max_staleness: maximum number of steps between a rollout's first token and the step that trains on the rollout.
        With 0, each step trains only on rollouts that began in the same step.
        """
        self.engine = engine
        self.temperature = temperature
        self.in_flight = PromptsInFlight(max_staleness)
        self._prompts = prompts
        if reward_weights is None:
            reward_weights = torch.ones(len(functions), dtype=torch.float64)
        self._reward_weights = reward_weights
        self._group_size = group_size
        self._num_greedy = num_greedy
        self._max_refills = max_refills
        self.evaluator = functools.partial(
            EpisodeRunner,
            engine,
            functions=functions,
            rollout=rollout,
            max_turns=max_turns,
            call_timeout=call_timeout,
        )
        self._runner = self.evaluator(prompts)
        self.counts = self._runner.counts
        self._queue = self._runner.queue
        # Rollouts on this rank that have rewards but have not yet been selected for a step. The other in-flight
        # rollouts are still in the runner or in the queue.
        self._rewarded: list[RewardedRollout] = []

    def collect(self, num_groups: int, *, weight_version: int = 0) -> Groups:
        """Collect the groups for the next step (collective).

        weight_version: version of the current weights. Raises RewardError or RolloutError, naming the function and row.
        """
        num_wanted_groups = num_groups
        with self._runner.step_scope():
            # Replace zero-variance groups with groups for new prompts, up to `max_refills` times; then keep the rest.
            for num_refills in itertools.count():
                if self.in_flight.max_staleness:
                    ready_prompts = self._run_rounds(num_groups, num_wanted_groups, weight_version)
                else:
                    self._begin_prompts(num_wanted_groups - len(self.in_flight))
                    self._runner.run_round(weight_version=weight_version)
                    ready_prompts = set(self._queue.groups)
                self._rewarded += self._queue.finish(sorted(ready_prompts))
                selection = select_step_groups(
                    self._rewarded,
                    num_groups,
                    self._group_size,
                    self._num_greedy,
                    reward_weights=self._reward_weights,
                    replaces_zero_variance=self._max_refills is not None,
                )
                if selection.num_missing_groups <= 0 or num_refills == self._max_refills:
                    break
                num_wanted_groups = num_groups + selection.num_zero_variance_groups
        self._rewarded = [
            one
            for one in self._rewarded
            if one.rollout.rollout_id.prompt_ordinal not in selection.finished_prompts
        ]
        self.in_flight.end_step(selection.finished_prompts)
        return selection.groups

    def close(self) -> None:
        """Cancel the in-flight rollouts and let their functions clean up. Not collective."""
        self._runner.close()

    @functools.cached_property
    def _max_tokens_per_round(self) -> int:
        """Maximum number of tokens that a rollout samples per round."""
        min_tokens, max_tokens = ROUND_LIMITS
        return min(max(min_tokens, round(ROUND_FRAC * self._prompts.max_new_tokens)), max_tokens)

    def _run_rounds(self, num_groups: int, num_wanted: int, weight_version: int) -> set[int]:
        """Run rounds until `num_wanted` groups are ready, including the groups of all expiring prompts (collective).

        Return the prompts whose ready groups are still in this rank's queue.
        """
        expiring_ordinals = self.in_flight.expiring_prompts(num_groups)
        while len(ready := self._ready_prompts()) < num_wanted or not expiring_ordinals <= ready:
            self._begin_prompts(
                self.in_flight.num_prompts_to_begin(num_groups, num_wanted=num_wanted, num_ready=len(ready))
            )
            self._runner.run_round(self._max_tokens_per_round, weight_version=weight_version)
        return self._queue.groups.keys() & ready

    def _ready_prompts(self) -> set[int]:
        """Return the in-flight prompts whose groups are complete and rewarded, across all ranks (collective)."""
        # Wait for the rewards of newly finished groups, but no longer than a round waits for rollout functions to
        # reply.
        deadline = time.monotonic() + self._runner.reply_wait_s
        while self._queue.is_busy and (remaining_s := deadline - time.monotonic()) > 0:
            self._queue.poll(remaining_s)
        rewarded_prompts = {rewarded.rollout.rollout_id.prompt_ordinal for rewarded in self._rewarded}
        return set().union(*gather_objects(rewarded_prompts | self._queue.ready_prompts()))

    def _begin_prompts(self, num_prompts: int) -> None:
        """Start rollouts for `num_prompts` prompts; each rank starts its own shard of the rollouts."""
        requests = self._prompts.requests(
            self.in_flight.begin_prompts(num_prompts),
            group_size=self._group_size,
            num_greedy=self._num_greedy,
            temperature=self.temperature,
        )
        self._runner.begin_episodes(requests)
