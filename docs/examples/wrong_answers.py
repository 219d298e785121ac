"""A cost on the embedded task, for safe_ppo.patch: a wrong answer is unsafe, no answer is not."""


def cost(completions, answer):
    """1 for a wrong answer, 0 for a right one and for an empty completion."""
    return [float(text not in ("", right)) for text, right in zip(completions, answer, strict=True)]
