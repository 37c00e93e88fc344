"""Parts of packed weights: of FSDP2, of loading, made whole, compared among ranks."""
