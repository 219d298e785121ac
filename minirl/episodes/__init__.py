"""An episode: the function that writes a rollout, its requests, and how they run on the engine."""
