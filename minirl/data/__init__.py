"""Tasks, their rows and messages; the tokenizers; and the stream of prompts in their order."""
