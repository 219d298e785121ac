"""Models without modules of minirl's, run with transformers' own modules."""
