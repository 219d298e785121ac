"""The gated delta net, of Qwen3.5: its rule and its layer."""
