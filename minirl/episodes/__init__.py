"""An episode: the function that writes a rollout, what it may ask for, and how it is run on the engine."""
