"""Take accelerate's real FSDP path on a machine without a GPU.

    accelerate launch --config_file examples/fsdp2.yaml examples/cpu_fsdp.py examples/qlora.py --model ...

accelerate looks for a GPU before it believes the FSDP section of its config. Where it finds none it silently
starts DDP instead: the losses look right and every rank holds the whole model. The three settings in `install`
name the device, the backend and a launch type that may turn into FSDP. With GPUs none of this is needed: the same
config starts the script directly.
"""

import os
import runpy
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType


def install() -> None:
    """Let accelerate build FSDP on the CPU; call it before anything makes an `Accelerator` or `TrainingArguments`."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    backend_and_type = ("gloo", DistributedType.MULTI_GPU)
    PartialState._prepare_backend = lambda *args, **kwargs: backend_and_type


def send_states() -> None:
    """Let torch's FSDP1 send weights between CPU processes (`sync_module_states`), which it keeps for GPUs."""
    from torch.distributed.fsdp import _init_utils

    _init_utils._check_module_states_for_sync_module_states = lambda states: None


def leave() -> None:
    """End the process at once. In torch 2.13 gloo's thread may free the last collective's tensors while Python shuts
    down, which aborts a process whose work is done.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    leave()
