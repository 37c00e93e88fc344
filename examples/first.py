"""4-bit weights sharded over two processes, with or without GPUs: torchrun --nproc-per-node 2 examples/first.py"""

import torch
from bitsandbytes.nn import Linear4bit  # bitshard's
from bitshard.fsdp import describe
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
layer = Linear4bit(4096, 4096, bias=False, compute_dtype=torch.bfloat16, quant_storage=torch.bfloat16)
layer.to("cpu")  # quantizes
x = torch.randn(8, 4096, dtype=torch.bfloat16)
whole = layer(x)
fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))
same = torch.equal(layer(x), whole)
if mesh.get_rank() == 0:
    print(describe(layer))
    print("the same bits as before sharding:", same)
