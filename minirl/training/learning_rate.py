"""The learning rate of each optimizer step."""


def learning_rate(update: int, num_updates: int, *, peak: float, warmup_updates: int, schedule: str) -> float:
    """Learning rate of the `update`-th (from 0) of `num_updates` optimizer steps: linear warm-up, then the schedule.

    schedule: "constant", or "linear" decay that reaches 0 after the last one.
    """
    if update < warmup_updates:
        return peak * (update + 1) / warmup_updates
    if schedule == "constant":
        return peak
    assert schedule == "linear", f"unknown schedule {schedule}"
    return peak * (num_updates - update) / max(1, num_updates - warmup_updates)
