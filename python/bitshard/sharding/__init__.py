"""What FSDP does to packed weights and what is done for it: the weight that FSDP2 registers, state dicts, the report.

`bitshard.fsdp` has what a user calls. Below this package are `bitshard.shards.shard` (the tensor that a rank keeps,
with the hooks of FSDP2) and `bitshard.shards.gather`; above it `bitshard.nn.holder`, through which a layer uses it.
"""
