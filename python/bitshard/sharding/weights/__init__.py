"""One packed weight under FSDP2: what FSDP2 registers, its state dict entries, loading into it, replacing it."""
