"""Advantages, KL terms, loss weights and losses, as pure functions of tensors."""
