"""A folder of calibrated 4-bit weights, trained with adapters under FSDP2.

torchrun --nproc-per-node 2 tests/fsdp/calibrated.py FOLDER OUT
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from bitshard.fsdp import describe
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

os.environ["ACCELERATE_USE_FSDP"] = "true"  # as its launcher does: bytes in a float dtype, which every torch shards
folder, out = sys.argv[1:]
torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map="cpu")
model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model.base_model.model.model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
ids = torch.randint(0, 96, (2, 32), generator=torch.Generator().manual_seed(5))
losses = []
for _ in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
if dist.get_rank() == 0:
    line = describe(model)
    with open(out, "w") as file:
        json.dump({"losses": losses, "sharded": line.partition("bytes (")[2].partition(")")[0]}, file)
dist.barrier()
dist.destroy_process_group()
