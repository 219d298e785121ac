"""Training on rollouts: assign them to ranks, pack and score batches, compute losses, update a sharded model."""
