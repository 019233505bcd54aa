"""LoRA adapters: the low-rank update of a linear layer."""
