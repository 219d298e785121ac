"""Every model type that minirl has no modules for, by transformers' own modules."""
