"""The generation engine: decodes requests into rollouts with a key/value cache."""
