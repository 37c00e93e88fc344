"""Tiny QLoRA runs of the real stack: transformers, accelerate, peft and trl, unpatched but for the shim.

    accelerate launch --config_file tests/fsdp/fsdp2.yaml tests/fsdp/cpu_fsdp.py tests/fsdp/train.py \\
        --only trainer,sft --model MODEL --dir DIR --out r.json

Without a launcher it is the one process that the others are compared with. Scenarios raise where something is wrong.
"""

import argparse
import gc
import json
import os
import sys
import traceback

import datasets
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, GradientState
from bitshard import fsdp
from bitshard.functional import dequantize_4bit
from bitshard.nn.linear import Linear4bit
from bitshard.shards.shard import PackedShard
from bitshard.tensor import Params4bit
from common import SIGNAL, Spy, hostile_values, no_launch, plant, wrong_bytes
from helpers import tiny
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.utils.other import fsdp_auto_wrap_policy
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    set_seed,
)

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))
TOKENS, LENGTH, STEPS = 96, 24, 4
LORA = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}


def make_model(folder):
    """A Llama of two layers with odd sizes, in fp32, and a tokenizer for it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    sizes = {"vocab_size": TOKENS, "hidden_size": 48, "intermediate_size": 104, "num_key_value_heads": 2}
    sizes |= {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    tiny.llama(folder, initializer_range=0.1, **sizes)
    words = {f"w{i}": i for i in range(3, TOKENS)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def load(args, dtype=torch.float32, storage=None):
    """The 4-bit model as a user loads it; `storage` None leaves bitsandbytes' default, uint8."""
    options = {} if storage is None else {"bnb_4bit_quant_storage": storage}
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        **options,
    )
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=dtype, quantization_config=config, device_map={"": device_name()}
    )
    if args.plant:
        plant_everywhere(model)
    return model


def plant_everywhere(model):
    """One packed word in 1,000 of each 4-bit layer changed."""
    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            plant(layer.weight.data)


def device_name():
    return torch.cuda.current_device() if torch.cuda.is_available() else "cpu"


def dataset():
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(3, TOKENS, (32, LENGTH), generator=generator).tolist()
    return datasets.Dataset.from_dict({"input_ids": rows, "labels": rows, "attention_mask": [[1] * LENGTH] * 32})


def arguments(args, name, **options):
    options = {"max_steps": STEPS, "save_strategy": "no", "learning_rate": 1e-2, **options}
    return TrainingArguments(
        output_dir=os.path.join(args.dir, name),
        per_device_train_batch_size=4 // WORLD,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        seed=5,
        **options,
    )


def losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def grad_norms(trainer):
    return [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]


def spies(model):
    return {name: Spy(module) for name, module in model.named_modules() if isinstance(module, Linear4bit)}


def check_sharded(model, args):
    """The base is DTensors (FSDP2) or flat parameters (FSDP1) of 1/N: DDP, otherwise alike, fails here."""
    if WORLD == 1:
        return fsdp.describe(model)
    share = fsdp.measure(model)
    assert share.fsdp == f"FSDP{args.fsdp}", f"not sharded: {fsdp.describe(model)}"
    assert share.ranks == WORLD, share
    layers = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(layers) == share.weights == 14, share
    if args.fsdp == 2:
        assert share.own_packed <= -(-share.packed // WORLD) + 4 * share.weights, share
        assert share.own_scales <= share.scales / WORLD + share.weights, share
        for layer in layers:
            weight = layer.packed_weight.shard  # `weight` itself, unless it stays gathered after forward
            assert isinstance(weight, DTensor) and isinstance(weight._local_tensor, PackedShard)
            assert weight._local_tensor.size(0) <= -(-weight.size(0) // WORLD)
    else:
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            flat = unit._flat_param
            assert flat is None or flat.numel() == -(-flat._unpadded_unsharded_size.numel() // WORLD), flat
    return fsdp.describe(model)


def check_exact(watched):
    for name, spy in watched.items():
        assert spy.seen and spy.wrong() == [0, 0], (name, spy.seen)


def fit(args, model, name, trainer_class=Trainer, **options):
    """Train; (trainer, result). Every forward must see the bytes that were quantized, and the base be sharded."""
    watched = spies(model)
    trainer = trainer_class(model=model, args=arguments(args, name, **options), train_dataset=dataset())
    trainer.train()
    line = check_sharded(trainer.model, args)
    check_exact(watched)
    return trainer, {"losses": losses(trainer), "grad_norms": grad_norms(trainer), "report": line}


def lora(model, **options):
    set_seed(3)
    return get_peft_model(model, LoraConfig(**{**LORA, **options}))


def run_trainer(args):
    """Default uint8 storage, fp32."""
    model = lora(load(args))
    assert all(m.quant_storage is torch.uint8 for m in model.modules() if isinstance(m, Linear4bit))
    return fit(args, model, "trainer")[1]


def run_trainer_bf16(args):
    """Default uint8 storage, everything in bf16."""
    return fit(args, lora(load(args, torch.bfloat16)), "bf16")[1]


def run_planted(args):
    """One packed word in 1,000 changed before training: FSDP1's weights are checked, so it raises."""
    model = lora(load(args))
    plant_everywhere(model)
    try:
        fit(args, model, "planted")
    except ValueError as error:
        return {"error_seen": str(error)}
    raise AssertionError("trained on changed bytes")


def run_save_state(args):
    """accelerate's own save_state and load_state with FULL_STATE_DICT, base and all, into a base with other bytes.

    rank 0 broadcasts a file in the declared uint8 to shards in a container of the model's dtype.
    """
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    accelerator = Accelerator()
    os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"
    rows = torch.tensor(dataset()["input_ids"][:2], device=accelerator.device)
    folder = os.path.join(args.dir, "state")
    found = []
    for fault in (False, True):
        model = lora(load(args))
        if fault:
            plant_everywhere(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        model, optimizer = accelerator.prepare(model, optimizer)
        if fault:
            accelerator.load_state(folder)
        else:
            model(input_ids=rows, labels=rows).loss.backward()
            optimizer.step()
            accelerator.save_state(folder)
        with torch.no_grad():
            found.append(float(model(input_ids=rows, labels=rows).loss))
        report = check_sharded(model, args)
        accelerator._models.clear()
        accelerator._optimizers.clear()
    if RANK == 0:
        saved = torch.load(os.path.join(folder, "pytorch_model_fsdp.bin"), weights_only=True)
        assert {value.dtype for key, value in saved.items() if key.endswith("base_layer.weight")} == {torch.uint8}
    assert found[0] == found[1], found
    return {"losses": found, "report": report}


def run_loaded_early(args):
    """Loaded before the process is known to shard, default storage is uint8 until accelerate asks what it can shard."""
    with no_launch():
        model = lora(load(args))
    assert {m.weight.dtype for m in model.modules() if isinstance(m, Linear4bit)} == {torch.uint8}
    trainer = Trainer(model=model, args=arguments(args, "early", max_steps=2), train_dataset=dataset())
    trainer.train()
    return {"losses": losses(trainer), "report": check_sharded(trainer.model, args)}


def run_fp32_base(args):
    """Loaded in fp32 and wrapped by accelerate's FSDP1 in bf16 mixed precision: an error that names the way out.

    (Trainer refuses bf16=True on a CPU; what it would do is done here: peft's wrap policy, then prepare.)
    """
    plugin = FullyShardedDataParallelPlugin()
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = lora(load(args))
    plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    model = accelerator.prepare(model)
    rows = torch.tensor(dataset()["input_ids"][:2], device=accelerator.device)
    try:
        model(input_ids=rows, labels=rows)
    except (TypeError, ValueError) as error:
        return {"error_seen": f"{type(error).__name__}: {error}"}
    raise AssertionError("a forward on cast weights")


def run_torchrun(args, late=False):
    """Bare torchrun: FSDP comes from TrainingArguments, made before the model is loaded, or (`late`) after."""
    for name in (SIGNAL, "ACCELERATE_USE_FSDP"):  # of a scenario before this
        os.environ.pop(name, None)
    config = {"version": args.fsdp, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
    if args.fsdp == 2:
        config["reshard_after_forward"] = True
    else:  # the default of FSDP1, true, wants a GPU
        config.update(reshard_after_forward="full_shard", cpu_ram_efficient_loading=False, sync_module_states=False)
    options = {"fsdp": "full_shard auto_wrap", "fsdp_config": config}
    if not late:
        arguments(args, "torchrun", **options)
    model = lora(load(args))
    dtypes = {module.weight.dtype for module in model.modules() if isinstance(module, Linear4bit)}
    assert dtypes == {torch.uint8 if late else torch.float32}, dtypes
    trainer = Trainer(model=model, args=arguments(args, "torchrun", **options), train_dataset=dataset())
    trainer.train()
    return {"losses": losses(trainer), "report": check_sharded(trainer.model, args)}


def run_torchrun_late(args):
    """FSDP2 shards what was loaded before; FSDP1 says what to set."""
    try:
        return run_torchrun(args, late=True)
    except ValueError as error:
        return {"error_seen": str(error)}


def run_resume(args, name="resume"):
    """Save after two of four steps, resume in a new trainer: the last losses are those of the run that went through."""
    through = fit(args, lora(load(args)), name, save_strategy="steps", save_steps=2)[1]
    checkpoint = os.path.join(args.dir, name, "checkpoint-2")
    model = lora(load(args))
    trainer = Trainer(model=model, args=arguments(args, f"{name}d"), train_dataset=dataset())
    trainer.train(resume_from_checkpoint=checkpoint)
    check_sharded(trainer.model, args)
    resumed = losses(trainer)
    assert resumed == through["losses"][-len(resumed) :] and len(resumed) >= 2, (resumed, through)
    return through


def run_resume_full(args):
    """The same with FULL_STATE_DICT, Trainer's default: rank 0 broadcasts what it read."""
    os.environ["FSDP_STATE_DICT_TYPE"] = "FULL_STATE_DICT"
    try:
        return run_resume(args, "resume_full")
    finally:
        os.environ["FSDP_STATE_DICT_TYPE"] = "SHARDED_STATE_DICT"


def run_sft(args, name="sft", **lora_options):
    """TRL's SFTTrainer with a peft_config, in bf16, which trl casts LoRA to."""
    from trl import SFTConfig, SFTTrainer

    model = load(args, torch.bfloat16)
    watched = spies(model)
    plain = arguments(args, name)
    config = SFTConfig(
        output_dir=plain.output_dir,
        per_device_train_batch_size=plain.per_device_train_batch_size,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        bf16=False,
        learning_rate=1e-2,
        seed=5,
        gradient_checkpointing=True,
        max_length=LENGTH,
    )
    set_seed(3)
    text = datasets.Dataset.from_dict(
        {"text": [" ".join(f"w{token}" for token in row) for row in dataset()["input_ids"]]}
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(args.model)
    trainer = SFTTrainer(
        model=model,
        args=config,
        train_dataset=text,
        processing_class=tokenizer,
        peft_config=LoraConfig(**LORA, **lora_options),
    )
    trainer.train()
    line = check_sharded(trainer.model, args)
    check_exact(watched)
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in trainer.model.parameters() if p.requires_grad})
    return {"losses": losses(trainer), "dtypes": dtypes, "report": line}


def run_sft_dora(args):
    """The same with DoRA, whose magnitudes trl keeps in fp32."""
    return run_sft(args, "sft_dora", use_dora=True)


def run_dora(args):
    """DoRA dequantizes the base weight inside forward."""
    return fit(args, lora(load(args), use_dora=True), "dora", max_steps=2)[1]


def run_kbit(args):
    """prepare_model_for_kbit_training: casts what is not packed to fp32 and turns on checkpointing."""
    model = prepare_model_for_kbit_training(load(args, torch.bfloat16))
    return fit(args, lora(model), "kbit", max_steps=2)[1]


def merge_gap(model):
    """How far the merged weights are from base + LoRA, relative; the largest of all layers."""
    expected = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight"):
            weight = dequantize_4bit(module.base_layer.weight.data, module.base_layer.quant_state)
            expected[name.removeprefix("base_model.model.")] = weight + module.get_delta_weight("default")
    merged = model.merge_and_unload()
    gaps = []
    for name, weight in expected.items():
        layer = merged.get_submodule(name)
        found = dequantize_4bit(layer.weight.data, layer.quant_state)
        gaps.append(float((found - weight).norm() / weight.norm()))
    return max(gaps)


def run_adapter(args):
    """The adapter saved under sharding gives, on a new base in one process, the logits of the sharded model."""
    model = load(args)
    trainer, result = fit(args, lora(model), "adapter", max_steps=2)
    folder = os.path.join(args.dir, "adapter", "saved")
    if WORLD > 1:
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(folder)
    barrier()
    rows = torch.tensor(dataset()["input_ids"][:2])
    rows = rows.to(next(iter(trainer.model.parameters())).device)
    trainer.model.eval()
    with torch.no_grad():
        expected = trainer.model(input_ids=rows).logits.float()
    base = load(args)
    with torch.no_grad():
        before = base(input_ids=rows).logits.float()
        loaded = PeftModel.from_pretrained(base, folder).eval()
        found = loaded(input_ids=rows).logits.float()
        gap = merge_gap(loaded)
    assert float((found - before).abs().max()) > 1e-2, "the adapter changed nothing"
    assert torch.allclose(found, expected, atol=1e-4, rtol=1e-4), float((found - expected).abs().max())
    assert gap < 0.15, gap  # merging quantizes the sum again; NF4 rounds by about 9 %
    return {**result, "merge_gap": gap}


def merge_all_ways(model, safe):
    """peft's merging, unpatched: merged and taken out again, then merged for good; the model without its adapter."""
    model.merge_adapter(safe_merge=safe)
    model.unmerge_adapter()
    return model.merge_and_unload(safe_merge=safe)


def check_rounds(model, full, rows, safe):
    """Merging and unmerging a sharded model gives the bytes and scales of `full` back; a rank keeps its part."""
    share = fsdp.measure(model)
    with torch.no_grad():
        expected = model(input_ids=rows).logits
    for _ in range(2):
        model.merge_adapter(safe_merge=safe)
        assert fsdp.measure(model).before_merge == share.own_packed + share.own_scales
        model.unmerge_adapter()
        assert fsdp.measure(model).before_merge == 0
        with torch.no_grad():
            assert torch.equal(model(input_ids=rows).logits, expected)
    again = fsdp.full_state_dict(model)
    assert again.keys() == full.keys()
    wrong = [key for key, value in full.items() if again[key].dtype != value.dtype or wrong_bytes(again[key], value)]
    assert not wrong, wrong


def run_merge(args, name="merge", safe=False, **options):
    """Merging into the sharded base gives every byte that merging in one process gives, and stays sharded."""
    trainer, result = fit(args, lora(load(args), **options), name, max_steps=2)
    full = fsdp.full_state_dict(trainer.model)
    rows = torch.tensor(dataset()["input_ids"][:2], device=trainer.accelerator.device)
    trainer.model.eval()
    with torch.no_grad():
        trainer.model(input_ids=rows)  # leaves what is no part of a decoder layer gathered
    check_rounds(trainer.model, full, rows, safe)
    merged = merge_all_ways(trainer.model, safe)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    with torch.no_grad():
        found = trainer.model(input_ids=rows).logits
    saved = fsdp.full_state_dict(merged)
    check_sharded(trainer.model, args)
    if RANK == 0:
        whole = lora(load(args), **options)
        missing, unexpected = whole.load_state_dict(full, strict=False)
        assert not missing and not unexpected, (missing, unexpected)
        before = {key: value for key, value in whole.state_dict().items() if key.endswith("base_layer.weight")}
        whole = merge_all_ways(whole, safe).eval()
        for key, value in whole.state_dict().items():
            assert saved[key].dtype == value.dtype, key
            if "quant_state" not in key:  # JSON with padding
                assert wrong_bytes(saved[key], value) == 0, key
        changed = [key for key, value in before.items() if not value.equal(saved[unwrapped(key)])]
        assert len(changed) == 14, changed
        with torch.no_grad():
            assert torch.equal(found, whole(input_ids=rows).logits)
    barrier()
    return result


def run_merge_dora(args):
    """The same with DoRA, whose merging dequantizes the base once more, and with `safe_merge`."""
    return run_merge(args, "merge_dora", safe=True, use_dora=True)


def run_merge_fsdp1(args):
    """FSDP1 has freed what peft would read: an error that names the ways that work (a dense model fails there too)."""
    trainer, result = fit(args, lora(load(args)), "merge", max_steps=1)
    try:
        trainer.model.merge_and_unload()
    except ValueError as error:
        return {**result, "error_seen": str(error)}
    raise AssertionError("merged")


def unwrapped(key):
    """A key of the base model's state dict out of peft's."""
    return key.removeprefix("base_model.model.").replace(".base_layer.", ".")


def run_save_pretrained(args):
    """A checkpoint written from the sharded model is a plain one in the declared uint8, and trains again."""
    trainer, result = fit(args, lora(load(args)), "save", max_steps=1)
    folder = os.path.join(args.dir, "saved_base")
    full = fsdp.full_state_dict(trainer.model)
    if RANK == 0:
        base = {unwrapped(key): value for key, value in full.items() if "lora_" not in key}
        assert {value.dtype for key, value in base.items() if key.endswith("_proj.weight")} == {torch.uint8}
        unsharded = load(args)
        plant_everywhere(unsharded)  # other bytes, so that only what was loaded can be right
        unsharded.load_state_dict(base)
        unsharded.save_pretrained(folder)
    barrier()
    again = AutoModelForCausalLM.from_pretrained(folder, device_map={"": device_name()})
    for (name, a), (_, b) in zip(again.named_modules(), load(args).named_modules(), strict=True):
        if isinstance(a, Linear4bit):
            assert Spy(a).weight.equal(Spy(b).weight) and Spy(a).scales.equal(Spy(b).scales), name
            assert a.quant_storage is torch.uint8
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return {**result, "losses": fit(args, lora(again), "prequantized", max_steps=2)[1]["losses"]}


def run_fp16(args):
    """fp16 mixed precision, gradients and their sum included, with a scaled loss, over a base in fp32 words."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = lora(load(args))
    watched = spies(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    if WORLD > 1:
        if not dist.is_initialized():
            Accelerator()
        for layer in model.base_model.model.model.layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    rows = torch.tensor(dataset()["input_ids"][:4]).chunk(WORLD)[RANK].to(device_name())
    found, scale = [], 64.0
    for _ in range(4):
        loss = model(input_ids=rows, labels=rows).loss
        (loss.float() * scale).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(scale)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().float()
        if WORLD > 1:
            dist.all_reduce(mean)
        found.append(float(mean) / WORLD)
    check_exact(watched)
    return {"losses": found, "report": check_sharded(model, args)}


def run_orig_params(args):
    """accelerate's FSDP1 with use_orig_params, bf16 base and LoRA in one flat parameter: damage must be seen.

    accelerate casts that flat parameter to fp32 and FSDP1 casts it back, which rewrites NaN patterns. (Trainer would
    give LoRA units of its own; plain accelerate does not.)
    """
    accelerator = Accelerator()
    assert accelerator.mixed_precision == "bf16" and accelerator.state.fsdp_plugin.use_orig_params
    model = lora(load(args, torch.bfloat16, torch.bfloat16)).to(torch.bfloat16)
    for module in model.modules():
        if isinstance(module, Linear4bit):
            install_nan_words(module)
    watched = spies(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    rows = torch.tensor(dataset()["input_ids"][:2], device=accelerator.device)
    try:
        model(input_ids=rows, labels=rows).loss.backward()
    except ValueError as error:
        return {"error_seen": str(error), "report": fsdp.describe(model)}
    raise AssertionError(f"trained on: {[spy.wrong() for spy in watched.values()]} wrong bytes")


def install_nan_words(layer):
    """Replace the weight by one whose packed bfloat16 words hold NaN patterns of all kinds."""
    n, k = layer.quant_state.shape
    layer.weight = Params4bit(
        hostile_values(n, k, torch.bfloat16),
        quant_type="nf4",
        quant_storage=torch.bfloat16,
        compress_statistics=True,
        module=layer,
    ).to(layer.weight.device)


def barrier():
    if dist.is_initialized():
        dist.barrier()


SCENARIOS = {name.removeprefix("run_"): function for name, function in globals().items() if name.startswith("run_")}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", required=True)
    parser.add_argument("--model", required=True, help="folder of make_model")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--fsdp", type=int, default=2, help="the FSDP version this launch must use")
    parser.add_argument("--plant", action="store_true", help="change packed words of every model that is loaded")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if WORLD > 1 and os.environ.get("BITSHARD_CUT") == "1":  # weights are cut where the process group is there
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    results = {}
    for name in args.only.split(","):
        try:
            results[name] = SCENARIOS[name](args)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-4000:]}
            print(f"rank {RANK} {name}: {results[name]['trace']}", flush=True)
            break  # collectives of the ranks may be out of step
        if RANK == 0:
            print(f"{name:16s} {results[name]}", flush=True)
        AcceleratorState._reset_state()
        GradientState._reset_state()
        gc.collect()
    with open(f"{args.out}.{RANK}", "w") as file:
        json.dump(results, file)
    sys.stdout.flush()
    if dist.is_initialized() and not any("error" in result for result in results.values()):
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
