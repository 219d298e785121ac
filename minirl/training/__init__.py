"""Train on rollouts: assign them to ranks, pack them into batches, score them, update a sharded model."""
