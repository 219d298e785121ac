"""Run models that minirl does not implement, using transformers' modules."""
