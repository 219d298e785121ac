"""Flags, inputs, memory budget, run folders, checkpoints and the training loop's fixed parts."""
