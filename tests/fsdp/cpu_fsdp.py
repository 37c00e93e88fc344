"""Run a script with accelerate's real FSDP path on a machine without a GPU.

    accelerate launch --config_file CONFIG cpu_fsdp.py SCRIPT ARGS

accelerate follows an FSDP config only where it finds an accelerator; on a CPU it silently drops the config and
runs DDP, which looks right and shards nothing. Three things change that: the gloo backend, a distributed type that FSDP
may follow, and the CPU as the device. A fourth lets FSDP1 write whole state dicts: "offloading" to the CPU, where they
are already, torch 2.13 frees the storage that it then reads, and hands out one buffer for all states of a parameter.
With a GPU this file does nothing but run the script.
"""

import runpy
import sys

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig


def use_cpu(state):
    if state.device is None:
        state.device = torch.device("cpu")


if not torch.cuda.is_available():
    PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = use_cpu
    for config in (FullStateDictConfig, FullOptimStateDictConfig):
        config.offload_to_cpu = property(lambda self: False, lambda self, value: None)

sys.argv = sys.argv[1:]
sys.path.insert(0, sys.argv[0].rpartition("/")[0] or ".")
runpy.run_path(sys.argv[0], run_name="__main__")
