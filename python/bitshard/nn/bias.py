"""The bias of a quantized layer, which one process keeps in the dtype of the layer's products, as bitsandbytes does."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bitshard.formats.state import VALUE_DTYPES

_DTYPES = frozenset(VALUE_DTYPES.values())
_dispatch_modes, _transforms = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state


def keep_in(bias: Tensor, dtype: torch.dtype) -> None:
    """Convert the parameter `bias` [N] to `dtype` where it is, if nothing else knows its memory or its dtype.

    Nothing happens where torch compiles, exports or traces, during the capture of a CUDA graph (its replays would read
    memory that is freed), where there is a process group (DDP and FSDP have recorded the dtype), to a tensor that is no
    plain parameter, and for a dtype in which no layer multiplies. Callers convert what they multiply themselves then.
    """
    distributed = torch.distributed
    if torch.compiler.is_compiling() or (distributed.is_available() and distributed.is_initialized()):
        return
    if dtype not in _DTYPES:
        return
    if type(bias) is not nn.Parameter or _dispatch_modes() or _transforms() or _tracing() is not None:
        return
    if bias.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    with torch.inference_mode(False):  # a parameter can't hold a tensor of inference mode
        bias.data = bias.data.to(dtype)
