"""The collector, between the engine and the update: prompts in, whole groups of rewarded rollouts out.

The groups of a step depend on the prompts, the rollouts' lengths and their rewards, not on the clock: they are the same
on another number of ranks, or in a second run.

With `max_staleness` a rollout may go on in a later step, under new weights. All rollouts in flight then decode in
rounds of a few tokens each, and the step ends with the first round after which enough groups are complete: it takes
the first of them in order of their prompts. Rollouts that wait for a reply or a reward do not hold up a step, which
then depends on the clock, too. Unfinished rollouts, and complete ones that no step has taken, are in flight. A
checkpoint has the ordinals of their prompts, which begin again after a resume.
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
from minirl.episodes.step_groups import Groups, select_step
from minirl.generation.engine import Engine
from minirl.ranks.process_group import gather_objects
from minirl.rewards.functions import RewardLike

# The tokens of a rollout in a round: a share of the longest completion, within limits. With fewer, new prompts
# take the places of finished ones sooner; with more, the ranks exchange less often.
ROUND_FRAC = 1 / 8
ROUND_LIMITS = (4, 512)


class Collector:
    """Collects the rollouts of one stream of prompts.

    engine: samples them. in_flight: the prompts that have begun and that no step has taken.
    temperature: of the sampled rollouts that begin; a script may change it before a step. evaluator: makes a
    runner for requests of other prompts, with the same engine, rewards and rollout function.
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
        """functions: the K rewards by name. rollout: see `episode`. call_timeout: see `EpisodeRunner`.

        max_turns: of each episode; 0: MAX_TURNS.
        group_size: rollouts of each prompt, besides `num_greedy` greedy ones.
        reward_weights: fp64 [K]; None: 1 for each function.
        max_refills: how many times in a step to replace groups of equal first rewards by groups of new prompts; after
        that such groups fill up the step. None: do not replace them.
        max_staleness: the most steps from a rollout's first token to the step that trains on it. 0: all rollouts of a
        step begin and end in it.
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
        self._queue = self._runner.queue
        # This rank's rewarded rollouts that no step has taken. The others in flight are the runner's, or the queue's
        # until a step asks for their rewards.
        self._rewarded = self._queue.finish([])

    def collect(self, num_groups: int, *, weight_version: int = 0) -> Groups:
        """The groups of the next step (collective).

        weight_version: the version of the present weights. Raises RewardError or RolloutError naming function and row.
        """
        num_wanted = num_groups
        with self._runner.in_step():
            # Zero-variance groups are resampled from other prompts, `max_refills` times; after that they are kept.
            for num_refills in itertools.count():
                if self.in_flight.max_staleness:
                    ready = self._run_rounds(num_groups, num_wanted, weight_version)
                else:
                    self._begin_prompts(num_wanted - len(self.in_flight))
                    self._runner.run_round(weight_version=weight_version)
                    ready = set(self._queue.groups)
                self._rewarded += self._queue.finish(sorted(ready))
                selection = select_step(
                    self._rewarded,
                    num_groups,
                    self._group_size,
                    self._num_greedy,
                    reward_weights=self._reward_weights,
                    replaces_zero_variance=self._max_refills is not None,
                )
                if selection.num_missing <= 0 or num_refills == self._max_refills:
                    break
                num_wanted = num_groups + selection.num_zero_variance
        self._rewarded = selection.remaining
        self.in_flight.end_step(selection.ended_prompts)
        return selection.groups

    def take_count(self, counted: str) -> int:
        """Return this rank's count since the last call, including rollouts that no step takes.

        counted: "sampled_tokens", of all episodes; "tool_results", that were appended; "tool_errors", how many of these
        are errors.
        """
        return self._runner.counts.pop(counted, 0)

    def close(self) -> None:
        """End the rollouts in flight, and let their functions clean up. Not collective."""
        self._runner.close()

    @functools.cached_property
    def _round_tokens(self) -> int:
        """The most tokens that a rollout samples in a round."""
        least, most = ROUND_LIMITS
        return min(max(least, round(ROUND_FRAC * self._prompts.max_new_tokens)), most)

    def _run_rounds(self, num_groups: int, num_wanted: int, weight_version: int) -> set[int]:
        """Run rounds until `num_wanted` groups, and those of the prompts that are due, are ready.

        Returns the prompts of this rank's ready groups that are in the queue (collective).
        """
        expiring = self.in_flight.expiring(num_groups)
        while len(ready := self._ready_prompts()) < num_wanted or not expiring <= ready:
            self._begin_prompts(
                self.in_flight.num_to_begin(num_groups, num_wanted=num_wanted, num_ready=len(ready))
            )
            self._runner.run_round(self._round_tokens, weight_version=weight_version)
        return self._queue.groups.keys() & ready

    def _ready_prompts(self) -> set[int]:
        """The prompts in flight whose groups can be selected (collective)."""
        # The rewards of groups that have just ended may take no longer than a reply.
        deadline = time.monotonic() + self._runner.reply_wait_s
        while self._queue.is_busy and (left_s := deadline - time.monotonic()) > 0:
            self._queue.poll(left_s)
        own = {rollout.rollout_id.prompt_ordinal for rollout in self._rewarded.rollouts}
        return set().union(*gather_objects(own | self._queue.ready_prompts()))

    def _begin_prompts(self, num_prompts: int) -> None:
        """Begin this rank's share of this number of prompts."""
        requests = self._prompts.requests(
            self.in_flight.begin_prompts(num_prompts),
            group_size=self._group_size,
            num_greedy=self._num_greedy,
            temperature=self.temperature,
        )
        self._runner.begin_episodes(requests)
