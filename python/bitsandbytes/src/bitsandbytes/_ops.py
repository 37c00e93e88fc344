"""The operator names `bitsandbytes::`: those of `bitshard.bnb_ops`, and those that bitshard does not have yet."""

import torch
from bitshard.bnb_ops import OPS

from ._absent import INT8, absent_function

register_fake = torch.library.register_fake
register_kernel = torch.library.register_kernel

_library = torch.library.Library("bitsandbytes", "DEF")

for _op in OPS:
    _library.define(_op.name + _op.schema)
    for _key in ("CPU", "CUDA"):
        _library.impl(_op.name, _op.kernel, _key)
    torch.library.register_fake(f"bitsandbytes::{_op.name}", _op.fake, lib=_library)


_ABSENT = {
    INT8: (
        "int8_double_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor, Tensor, Tensor?)",
        "int8_linear_matmul(Tensor A, Tensor B) -> Tensor",
        "int8_linear_matmul.out(Tensor A, Tensor B, Tensor! out) -> ()",
        "int8_mixed_scaled_mm(Tensor A, Tensor CA, Tensor CB, Tensor SCA, Tensor SCB, Tensor? outlier_cols=None,"
        " Tensor? bias=None) -> (Tensor, Tensor?)",
        "int8_mm_dequant(Tensor A, Tensor row_stats, Tensor col_stats, ScalarType? dtype=None, Tensor? bias=None)"
        " -> Tensor",
        "int8_scaled_mm(Tensor A, Tensor B, Tensor row_stats, Tensor col_stats, Tensor? bias=None,"
        " ScalarType? dtype=None) -> Tensor",
        "int8_vectorwise_dequant(Tensor A, Tensor stats) -> Tensor",
        "int8_vectorwise_quant(Tensor A, float threshold=0.0) -> (Tensor, Tensor, Tensor?)",
    ),
}

# One kernel for all devices, which is the fake too: a program with such an op is refused when it is traced.
for _advice, _schemas in _ABSENT.items():
    for _schema in _schemas:
        _name = _schema.split("(")[0]
        _library.define(_schema)
        _kernel = absent_function("torch.ops.bitsandbytes", _name, _advice)
        _library.impl(_name, _kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"bitsandbytes::{_name}", _kernel, lib=_library)
