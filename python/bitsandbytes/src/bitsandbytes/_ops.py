"""The operator names `bitsandbytes::`: those of `bitshard.bnb_ops`."""

import torch
from bitshard.bnb_ops import OPS

register_fake = torch.library.register_fake
register_kernel = torch.library.register_kernel

_library = torch.library.Library("bitsandbytes", "DEF")

for _op in OPS:
    _library.define(_op.name + _op.schema)
    for _key in ("CPU", "CUDA"):
        _library.impl(_op.name, _op.kernel, _key)
    torch.library.register_fake(f"bitsandbytes::{_op.name}", _op.fake, lib=_library)
