"""A cost on the embedded task, for safe_ppo.patch: large digits are dear."""


def cost(completions):
    """The sum of a completion's digits, as a share of 40."""
    return [sum(map(int, filter(str.isdigit, text))) / 40 for text in completions]
