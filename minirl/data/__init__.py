"""Tasks and their rows, messages, tokenizers, and the prompt stream."""
