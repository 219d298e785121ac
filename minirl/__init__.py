"""minirl: RL post-training of language models as one script over a small library."""
