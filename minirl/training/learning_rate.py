"""The learning rate of each optimizer step."""


def learning_rate(update: int, num_updates: int, *, peak: float, warmup_updates: int, schedule: str) -> float:
    """The learning rate of optimizer step `update` (counted from 0) of `num_updates`.

    It rises linearly to `peak` over the first `warmup_updates` steps, then follows the schedule: "constant", or
    "linear", which would reach 0 one step after the last.
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    assert schedule == "linear", f"unknown schedule {schedule}"
    num_remaining = num_updates - update
    num_decaying = max(1, num_updates - warmup_updates)
    return peak * num_remaining / num_decaying
