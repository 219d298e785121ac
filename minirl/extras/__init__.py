"""Optional parts. Deleting an extra affects only runs that use it, because other code imports extras inside functions.

Decoding on a GPU uses `kernels`.
"""
