"""LLM.int8 in the real stack under FSDP, through the same runs as in one process.

    accelerate launch --config_file tests/fsdp/fsdp2.yaml tests/fsdp/cpu_fsdp.py tests/fsdp/int8.py \\
        --only trainer,resume --model MODEL --dir DIR --out r.json

Without a launcher it is the one process that the others are compared with. Scenarios raise where something is wrong.
"""

import argparse
import json
import os
import traceback

import torch
import torch.distributed as dist
import train
from bitshard import fsdp
from bitshard.nn.linear8bit import Linear8bitLt
from bitshard.shards.shard import PackedShard
from common import no_launch, same_bytes
from peft import LoraConfig, PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer

WORLD, RANK = train.WORLD, train.RANK


def load(args, path=None, **options):
    """The int8 model as a user loads it."""
    if path is None:
        options["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True)
    place = {"": train.device_name()}
    return AutoModelForCausalLM.from_pretrained(path or args.model, dtype=torch.float32, device_map=place, **options)


def layers(model):
    return [module for module in model.modules() if isinstance(module, Linear8bitLt)]


class Spy:
    """Compares what a layer sees in forward with the codes and scales of a model in one process."""

    def __init__(self, layer, alone):
        self.codes, self.scales = alone.weight.CB, alone.weight.SCB
        self.seen = 0
        layer.register_forward_hook(self.look)

    def look(self, layer, args, output):
        state, weight = layer.quant_state, layer.weight
        codes = weight.data if state is None else layer.packed_weight.codes(weight, state)
        assert same_bytes(codes.as_subclass(torch.Tensor), self.codes), "other codes"
        assert same_bytes(layer.state.SCB if state is None else state.absmax, self.scales), "other scales"
        self.seen += 1


def watched(args, model):
    with no_launch():
        alone = load(args)
    found = [Spy(*pair) for pair in zip(layers(model), layers(alone), strict=True)]
    assert len(found) == 14
    return found


def check_sharded(model, args):
    """Every weight is this rank's part of bytes and scales: codes alone, or all of it on every rank, fails here."""
    if WORLD == 1:
        return
    share = fsdp.measure(model)
    assert share.fsdp == f"FSDP{args.fsdp}" and share.ranks == WORLD and share.weights == 14, share
    if args.fsdp == 2:
        assert share.own_packed <= -(-share.packed // WORLD) + 4 * share.weights, share
        assert share.own_scales <= share.scales / WORLD + 4 * share.weights, share
        for layer in layers(model):
            shard = layer.packed_weight.shard
            assert isinstance(shard, DTensor) and isinstance(shard._local_tensor, PackedShard)
    return fsdp.describe(model)


def fit(args, model, name, **options):
    spies = watched(args, model)
    trainer = Trainer(model=model, args=train.arguments(args, name, **options), train_dataset=train.dataset())
    trainer.train()
    assert all(spy.seen for spy in spies)
    return trainer, {"losses": train.losses(trainer), "report": check_sharded(trainer.model, args)}


def run_trainer(args):
    """Adapters on an int8 base; saved by Trainer in the middle."""
    return fit(args, train.lora(load(args)), "trainer", save_strategy="steps", save_steps=2)[1]


def run_resume(args):
    """From the middle of `trainer`: the last losses are those of the run that went through."""
    model = train.lora(load(args))
    trainer = Trainer(model=model, args=train.arguments(args, "resumed"), train_dataset=train.dataset())
    trainer.train(resume_from_checkpoint=os.path.join(args.dir, "trainer", "checkpoint-2"))
    check_sharded(trainer.model, args)
    return {"losses": train.losses(trainer)}


def run_dora(args):
    """DoRA dequantizes the base weight inside forward."""
    return fit(args, train.lora(load(args), use_dora=True), "dora", max_steps=2)[1]


def run_early(args):
    """Loaded before the process is known to shard."""
    with no_launch():
        model = train.lora(load(args))
    assert {layer.weight.dtype for layer in layers(model)} == {torch.int8}
    try:
        return fit(args, model, "early", max_steps=2)[1]
    except ValueError as error:
        return {"error_seen": str(error)}


def run_saved(args):
    """Saved out of shards, merged too: the files of one process. Merging into shards is refused, in words."""
    model = load(args)
    trainer, _ = fit(args, train.lora(model), "saved", max_steps=2)
    place = os.path.join(args.dir, "files")
    fsdp.save_pretrained(trainer.model, f"{place}/base", progress=False)
    fsdp.save_pretrained(trainer.model, f"{place}/merged", merge=True, progress=False)
    fsdp.save_pretrained(trainer.model, f"{place}/dense", merge=True, dtype=torch.float32, progress=False)
    if args.fsdp == 2:  # FSDP1 gives no part of a state dict
        fsdp.save_adapter(trainer.model, f"{place}/adapter")
    full = fsdp.full_state_dict(trainer.model)
    if RANK == 0:
        entries = {key: value.dtype for key, value in full.items() if "layers.0.mlp.up_proj.base_layer" in key}
        assert sorted(map(str, entries.values())) == ["torch.float32", "torch.int8", "torch.uint8"], entries
    if WORLD > 1:
        fsdp.load_full_state_dict(trainer.model, full, broadcast_from_rank0=True)
    rows = torch.tensor(train.dataset()["input_ids"][:2], device=train.device_name())
    with torch.no_grad():
        logits = trainer.model(input_ids=rows).logits
    error = ""
    if WORLD > 1:
        try:
            trainer.model.merge_adapter()
        except ValueError as found:
            error = str(found)
        dist.barrier()
    with no_launch():
        base = load(args, f"{place}/base")
        assert all(layer.weight.dtype is torch.int8 for layer in layers(base))
        with torch.no_grad():
            if args.fsdp == 2:
                base = PeftModel.from_pretrained(base, f"{place}/adapter").eval()
            loaded = base(input_ids=rows).logits
            merged = load(args, f"{place}/merged")(input_ids=rows).logits
            dense = AutoModelForCausalLM.from_pretrained(f"{place}/dense", device_map={"": train.device_name()})
            dense = dense(input_ids=rows).logits
    gaps = [float((found - logits).norm() / logits.norm()) for found in (loaded, merged, dense)]
    assert (gaps[0] < 1e-5 or args.fsdp == 1) and gaps[1] < 0.05 and gaps[2] < 0.04, gaps
    return {"error_seen": error, "gaps": gaps}


def run_units(args):
    """`fsdp.load`, from dense files and from the int8 files of `saved`, with adapters: the logits of a whole model."""
    rows = torch.tensor(train.dataset()["input_ids"][:2], device=train.device_name())
    with no_launch(), torch.no_grad():
        expected = load(args)(input_ids=rows).logits
    sources = {
        args.model: BitsAndBytesConfig(load_in_8bit=True),
        os.path.join(args.dir, "files", "base"): None,
    }
    for source, config in sources.items():
        adapters = LoraConfig(**train.LORA) if config is not None else None
        options = {"quantization_config": config, "dtype": torch.float32, "adapters": adapters, "progress": False}
        model = fsdp.load(source, **options)
        assert same_bytes(model(input_ids=rows).logits.detach(), expected)
        check_sharded(model, args)
    return {"report": fsdp.describe(model)}


SCENARIOS = {name.removeprefix("run_"): call for name, call in list(globals().items()) if name.startswith("run_")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--fsdp", type=int, default=2)
    args = parser.parse_args()
    args.plant = False
    torch.set_num_threads(1)
    results = {}
    for name in args.only.split(","):
        try:
            results[name] = SCENARIOS[name](args)
        except Exception as error:
            results[name] = {"error": repr(error), "trace": traceback.format_exc()}
            break
    with open(f"{args.out}.{RANK}", "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
