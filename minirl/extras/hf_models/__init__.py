"""Models that minirl does not implement, run with transformers' modules."""
