"""What `python -m bitsandbytes` prints."""
