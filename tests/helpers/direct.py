"""Whether this process can call around torch's dispatcher, and which calls did."""

import pytest
import torch

HAS_TABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
# csrc/direct.c takes an address below 2^40 for that of a freed storage. There lies malloc's memory in an interpreter
# that is not position-independent; mapped memory never does.
HIGH = torch.empty(16384, dtype=torch.uint8).data_ptr() >> 40 != 0
calls_directly = pytest.mark.skipif(
    not HAS_TABLE or not HIGH,
    reason="direct calls leave low addresses to the ops" if HAS_TABLE else "this torch has no exchange table",
)


def noting(taken, name, function):
    """A function of the C core that notes its name where it does not decline, which leaves the work to the op."""

    def call(*arguments):
        result = function(*arguments)
        taken.extend([name] if result is not None else [])
        return result

    return call
