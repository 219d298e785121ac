"""Optional parts: each file or folder can be deleted, because other code imports extras only inside functions."""
