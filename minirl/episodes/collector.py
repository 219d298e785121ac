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
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from minirl.data.prompts import PromptStream
from minirl.episodes.driver import NO_BUDGET
from minirl.episodes.episode import RolloutFunction, one_turn
from minirl.episodes.runner import EpisodeRunner
from minirl.episodes.step_groups import Groups, select_step
from minirl.errors import refuse
from minirl.generation.engine import Engine
from minirl.ranks.process_group import gather_objects
from minirl.report.progress_bar import show_progress
from minirl.rewards.functions import RewardLike
from minirl.rewards.reward_queue import RewardedRollouts, RewardQueue
from minirl.rollouts import Request

# The tokens of a rollout in a round: a share of the longest completion, within limits. With fewer, new prompts
# take the places of finished ones sooner; with more, the ranks exchange less often.
ROUND_FRAC = 1 / 8
ROUND_LIMITS = (4, 512)


class Collector:
    """Collects the rollouts of one stream of prompts.

    engine: samples them. num_served: prompts taken from the stream so far; a script may raise it to skip some.
    temperature: of the sampled rollouts that begin; a script may change it before a step. evaluator: makes a collector
    for requests of other prompts, with the same engine, rewards and rollout function.
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
        self.num_served = 0
        self.engine = engine
        self._prompts = prompts
        weights = torch.ones(len(functions), dtype=torch.float64)
        self._reward_weights = weights if reward_weights is None else reward_weights
        self._group_size = group_size
        self._num_greedy = num_greedy
        self.temperature = temperature
        self._max_refills = max_refills
        self._max_staleness = max_staleness
        # The most tokens that a rollout samples in a round.
        self._round_tokens = NO_BUDGET
        if max_staleness:
            least, most = ROUND_LIMITS
            share = round(ROUND_FRAC * prompts.max_new_tokens)
            self._round_tokens = min(max(least, share), most)
        self.evaluator = functools.partial(
            Collector,
            engine,
            functions=functions,
            rollout=rollout,
            max_turns=max_turns,
            call_timeout=call_timeout,
        )
        self._queue = RewardQueue(functions, prompts, call_timeout=call_timeout)
        self._runner = EpisodeRunner(
            engine,
            rollout,
            prompts,
            max_turns=max_turns,
            reward_names=self._queue.episode_rewards,
            call_timeout=call_timeout,
        )
        # In flight on this rank, besides the runner's episodes: the queue has whole groups until a step asks for their
        # rewards.
        self._rewarded = self._queue.finish([])
        # The same on every rank: the number of collected steps, and the step in which each prompt in flight began.
        self._num_steps = 0
        self._begun_in: dict[int, int] = {}
        # The prompts that were in flight at the checkpoint, and have not begun again.
        self._interrupted: list[int] = []

    def collect(self, num_groups: int, *, weight_version: int = 0) -> Groups:
        """The groups of the next step (collective).

        weight_version: the version of the present weights. Raises RewardError or RolloutError naming function and row.
        """
        self._num_steps += 1
        num_equal = 0
        with self._runner.in_step():
            due = self._prompts_due(num_groups)
            # Zero-variance groups are resampled from other prompts, `max_refills` times; after that they are kept.
            for num_refills in itertools.count():
                ready = self._complete(num_groups, num_equal, due, weight_version)
                self._rewarded += self._queue.finish(sorted(self._queue.groups.keys() & ready))
                selection = select_step(
                    self._rewarded,
                    num_groups,
                    self._group_size,
                    self._num_greedy,
                    reward_weights=self._reward_weights,
                    replaces_equal=self._max_refills is not None,
                )
                if selection.num_missing == 0 or num_refills == self._max_refills:
                    break
                num_equal = selection.num_equal
        self._rewarded = selection.left
        for ordinal in selection.ended:
            del self._begun_in[ordinal]
        return selection.groups

    def run(self, requests: Sequence[Request], *, weight_version: int = 0) -> RewardedRollouts:
        """The rollouts of these requests, of whole prompts, with their rewards.

        Collective if ranks share the model's layers.
        """
        with self._runner.in_step():
            self._runner.begin(requests)
            self._run_round(weight_version)
        return self._queue.finish(sorted(self._queue.groups))

    def take_count(self, counted: str) -> int:
        """Return this rank's count since the last call, including rollouts that no step takes.

        counted: "sampled_tokens", of all episodes; "tool_results", that were appended; "tool_errors", how many of these
        are errors.
        """
        return self._runner.counts.pop(counted, 0)

    @property
    def in_flight(self) -> list[int]:
        """The ordinals of the prompts that have begun and that no step has taken; the same on every rank."""
        return sorted([*self._begun_in, *self._interrupted])

    def restore(self, in_flight: Sequence[int]) -> None:
        """Let the prompts begin again that were in flight at a checkpoint, before new ones."""
        self._interrupted = sorted(in_flight)

    def close(self) -> None:
        """End the rollouts in flight, and let their functions clean up. Not collective."""
        self._runner.close()

    def _prompts_due(self, num_groups: int) -> set[int]:
        """The prompts in flight to finish in this step, so that no rollout gets older than `max_staleness`.

        Steps take them in order, `num_groups` each. So of those that must be taken within n later steps, these can take
        n * num_groups, and the others are due now. With steps of 4 and `max_staleness` 2, in step 5:

            begun in step 3: prompts 10 and 11    0 later steps take 0 of these 2: 2 are due
            begun in step 4: prompts 12 to 16     1 later step takes 4 of these 7: 3 are due
            begun in step 5: none yet             so 10, 11 and 12 are due

        Raises InputError if these are too many: this step takes fewer than those before.
        """
        ordinals = sorted(self._begun_in)
        num_due = 0
        for num_first, ordinal in enumerate(ordinals, 1):
            num_later_steps = self._begun_in[ordinal] + self._max_staleness - self._num_steps
            num_due = max(num_due, num_first - num_groups * num_later_steps)
        refuse(
            num_due > num_groups,
            f"--max-staleness {self._max_staleness}: a step of {num_groups} prompts takes some of those in flight too "
            "late; collect as many in each step",
        )
        return set(ordinals[:num_due])

    def _complete(self, num_groups: int, num_equal: int, due: set[int], weight_version: int) -> set[int]:
        """Decode round by round until a step's groups, `num_equal` further ones, and those that are due are ready.

        Returns the prompts of all ready groups (collective).
        """
        num_wanted = num_groups + num_equal
        while len(ready := self._ready()) < num_wanted or not due <= ready:
            # Two steps' prompts are open, so that a long rollout decodes beside many others; but no more are in flight
            # than this step and those within `max_staleness` can take.
            num_open = len(self._begun_in) - len(ready)
            num_allowed = num_wanted + num_groups * self._max_staleness - len(self._begun_in)
            self._serve(max(0, min(2 * num_groups - num_open, num_allowed)))
            self._run_round(weight_version)
        return ready

    def _ready(self) -> set[int]:
        """The prompts in flight whose groups can be selected; without `max_staleness` all of them (collective)."""
        if self._max_staleness == 0:
            return set(self._begun_in)
        # The rewards of groups that have just ended may take no longer than a reply.
        deadline = time.monotonic() + self._runner.patience_s
        while self._queue.is_busy and (left_s := deadline - time.monotonic()) > 0:
            self._queue.poll(left_s)
        own = {rollout.rollout_id.prompt_ordinal for rollout in self._rewarded.rollouts}
        return set().union(*gather_objects(own | self._queue.ready()))

    def _serve(self, num_prompts: int) -> None:
        """Begin this rank's share of this number of prompts: interrupted ones, then new ones."""
        again, self._interrupted = self._interrupted[:num_prompts], self._interrupted[num_prompts:]
        first_new, self.num_served = self.num_served, self.num_served + num_prompts - len(again)
        ordinals = [*again, *range(first_new, self.num_served)]
        self._begun_in |= dict.fromkeys(ordinals, self._num_steps)
        requests = self._prompts.requests(
            ordinals,
            group_size=self._group_size,
            num_greedy=self._num_greedy,
            temperature=self.temperature,
        )
        self._runner.begin(requests)

    def _run_round(self, weight_version: int) -> None:
        """Run a round of all episodes. A prompt's rollouts are rewarded when the last one ends."""
        self._runner.begin_round(self._round_tokens, weight_version=weight_version)
        num_open = self._runner.num_open
        with show_progress("generate", total=num_open, unit="completions") as bar:
            while not self._runner.is_round_over:
                for group in self._runner.step():
                    self._queue.add(group)
                bar.update(num_open - self._runner.num_open)
                num_open = self._runner.num_open
                self._queue.poll()
        self.engine.sync()  # ranks that share the model's layers pass through them until all are here
