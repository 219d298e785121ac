"""The gated delta net, of Qwen3.5: its rule, its layer, and fla's kernels."""
