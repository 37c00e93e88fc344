"""A fault that one rank sees and the others do not: it ends with its own error, and none waits for it for ever.

    torchrun --nproc-per-node 2 tests/fsdp/cpu_fsdp.py tests/fsdp/parts/lone.py --dir DIR --out . --only native,FAULT

The last rank's files are faulty, or, of a fault in faults.UNEVEN, all ranks' files, of which one reads what it expects.
`cut,FAULT` is for accelerate launch. Nothing is caught here, so this must fail.
"""

import cut
import faults
from accelerate import Accelerator
from shared import load_from, logits, name_of, quantization, rank, start, world
from transformers.distributed import DistributedConfig

if __name__ == "__main__":
    args = start()
    way, fault = args.only.split(",")
    source = {**faults.FAULTS, **faults.UNEVEN}[fault][0]
    options = {"quantization_config": quantization()} if source == "dense" else {}
    faulty = rank() == world() - 1 or fault in faults.UNEVEN
    path = faults.folder_of(args.dir, fault) if faulty else f"{args.dir}/{source}"
    assert source in ("dense", name_of("uint8", True, "fp32"))
    if way == "native":
        model = load_from(path, distributed_config=DistributedConfig(fsdp_size=world()), **options)
    else:
        accelerator = Accelerator()
        model = load_from(path, device_map="cpu", **options)
        assert cut.is_cut(model)
        model = cut.prepare(accelerator, model)
    logits(model)
    print(f"rank {rank()} computed on what it loaded")
