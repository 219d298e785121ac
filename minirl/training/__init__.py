"""From rollouts to an update: who trains on what, packed batches, logprobs, FSDP."""
