"""What transformers, its Trainer and their like get from here."""
