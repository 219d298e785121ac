"""CUDA-only kernels, each with a CPU counterpart. The modules are imported only when a tensor is on a GPU."""
