"""A reward and a cost on the embedded task, for safe_ppo.patch: every 9 that the model writes costs 1."""


def right(completions, answer):
    """The share of digits that are right, each at its place."""
    return [
        sum(a == b for a, b in zip(text, digits, strict=False)) / max(len(text), len(digits))
        for text, digits in zip(completions, answer, strict=True)
    ]


def cost(completions):
    """The number of nines."""
    return [float(text.count("9")) for text in completions]
