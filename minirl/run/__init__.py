"""Everything around the training loop: flags, run folder, checkpoints, evaluation, resume."""
