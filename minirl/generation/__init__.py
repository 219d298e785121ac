"""The generation engine: requests in, rollouts out, decoded from a key/value cache."""
