"""Parameters that hold packed bytes, and what is done to them in torch."""
