"""minirl: RL post-training of language models, in a single script built on a small library."""
