"""What is asked: examples from files or the embedded task, prompts in order, the tokenizer."""
