"""Tasks with their rows and messages, tokenizers, and the prompt stream."""
