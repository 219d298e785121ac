"""Reward and cost for safe_ppo.patch on the bundled task: every 9 in a completion costs 1."""


def right(completions, answer):
    """Return the fraction of digits in the right place."""
    return [
        sum(a == b for a, b in zip(text, digits, strict=False)) / max(len(text), len(digits))
        for text, digits in zip(completions, answer, strict=True)
    ]


def cost(completions):
    """Return the number of nines."""
    return [float(text.count("9")) for text in completions]
