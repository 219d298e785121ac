"""How many failures of a user's code a run forgives, where its flags allow any."""

# Of the completions or episodes of a step; at least one.
MAX_FORGIVEN_FRAC = 0.05


class Failures:
    """The failures in one step on one rank.

    num_total: how many could fail. messages: one for each that did, in order.
    """

    def __init__(self, num_total: int, *, are_forgiven: bool):
        self.num_total = num_total
        self.are_forgiven = are_forgiven
        self.messages: list[str] = []

    @property
    def max_forgiven(self) -> int:
        """How many may fail."""
        return max(1, int(MAX_FORGIVEN_FRAC * self.num_total)) if self.are_forgiven else 0

    def add(self, message: str) -> bool:
        """Add a failure; return whether it is forgiven."""
        self.messages.append(message)
        return len(self.messages) <= self.max_forgiven
