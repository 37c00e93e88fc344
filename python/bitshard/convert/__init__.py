"""Folders of weights made into other folders of weights, a tensor at a time: `bitshard quantize`, `bitshard merge`."""
