r"""Tree search: completions continue good prefixes of earlier completions and compete within a prefix.

patch -o turn_rewards.py train_grpo.py docs/objectives/turn_rewards.diff
torchrun --standalone --nproc-per-node 2 turn_rewards.py --rollout docs/examples/tree_search.py:search \
    --reward episode episode:right --reward-weights 1 0

Rows need an `answer`. The reward `right` is only logged; turn rewards alone train the policy.
"""

import math

NUM_COMPLETIONS = 8
NODE_TOKENS = 2
MAX_CHILDREN = 3


class Node:
    """A completion prefix, with the results of all completions that start with it."""

    def __init__(self, ids=(), text="", has_ended=False):
        self.ids, self.text, self.has_ended = [*ids], text, has_ended
        self.children, self.results = [], []

    @property
    def value(self):
        """The mean result of these completions."""
        return sum(self.results) / len(self.results)

    def best_child(self):
        """Return the child with the highest upper confidence bound (UCT, Kocsis and Szepesvari 2006)."""
        log_visits = math.log(len(self.results))
        return max(self.children, key=lambda child: child.value + math.sqrt(log_visits / len(child.results)))


async def search(episode):
    """Sample completions one by one, each in a branch. Turns get their completion's result minus its prefix's mean."""
    root, completions = Node(), []
    for _ in range(NUM_COMPLETIONS if episode.temperature else 1):
        path = [root]
        while len(path[-1].children) == MAX_CHILDREN:
            path.append(path[-1].best_child())
        start = path[-1]
        if start.has_ended:
            result = start.value
        else:
            branch = episode.branch([*episode.prompt_ids, *start.ids])
            turn = await branch.generate(max_tokens=NODE_TOKENS)
            text = start.text + turn.text
            path.append(Node(start.ids + turn.ids, text, turn.finish_reason == "stop"))
            start.children.append(path[-1])
            if turn.finish_reason != "stop" and branch.remaining_tokens:
                turn = await branch.generate()
                text += turn.text
            result = float(text == episode.row.columns["answer"])
            completions.append((branch, start, result))
        for node in path:
            node.results.append(result)
    for branch, start, result in completions:
        for turn in branch.turns:
            turn.extra["reward"] = result - start.value
    return {"reward": 0.0, "right": root.value}
