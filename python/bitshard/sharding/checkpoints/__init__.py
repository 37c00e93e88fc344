"""Files out of sharded models and into them."""
