"""How many failures of a user's code a run forgives, if its flags allow any."""

# The share of a step's completions or episodes that may fail; at least one may.
MAX_FORGIVEN_FRAC = 0.05


class Failures:
    """The failures in one step on one rank.

    num_total: the number of completions or episodes. messages: one per failure, in order.
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
