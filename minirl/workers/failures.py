"""How many failures of a user's code a run forgives, where its flags allow any."""

# Of the completions or episodes of a phase; at least one.
MAX_FORGIVEN_FRAC = 0.05


class Failures:
    """The failures in one phase on one rank.

    num_total: how many could fail. max_forgiven: how many may. messages: one for each that did, in order.
    """

    def __init__(self, num_total: int, *, are_forgiven: bool):
        self.num_total = num_total
        self.max_forgiven = max(1, int(MAX_FORGIVEN_FRAC * num_total)) if are_forgiven else 0
        self.messages: list[str] = []

    def add(self, message: str) -> bool:
        """Add a failure; return whether it is forgiven."""
        self.messages.append(message)
        return len(self.messages) <= self.max_forgiven
