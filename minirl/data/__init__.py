"""Tasks from files or the embedded task, the stream of prompts in their order, and the tokenizer."""
