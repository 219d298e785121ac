"""The bytes that a run needs in each phase, and the sizes that fit into memory (docs/memory.md)."""
