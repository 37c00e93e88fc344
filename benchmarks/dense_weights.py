"""How fast `bitshard.fsdp.dense_weights` gives the weights of a 4-bit model with adapters: GB/s, beside a copy.

    python benchmarks/dense_weights.py [--layers 32] [--hidden 4096] [--rank 16] [--rounds 3]
    torchrun --nproc-per-node 2 benchmarks/dense_weights.py          # sharded by FSDP2

GB are those of the dense bfloat16 tensors that come. "copy" moves the same number of bytes of one tensor to another on
the same device: a server is sent weights no faster than that. A row without adapters shows what merging costs.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from bitshard.fsdp import dense_weights, describe
from peft import LoraConfig, get_peft_model
from qlora_step import quantize
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(layers: int, hidden: int, rank: int) -> torch.nn.Module:
    """The shape of Llama-3-8B, or one of fewer and narrower layers, in nested NF4; peft's adapters on all of them."""
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=hidden * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=hidden // 128, num_key_value_heads=max(1, hidden // 512), vocab_size=128256,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    quantize(model)
    model.requires_grad_(False)
    lora = LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    return get_peft_model(model, lora)


def seconds(work: object, rounds: int) -> float:
    """The least of some rounds, after one that is not counted."""
    found = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        work()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - begin)
    return min(found[1:])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if "RANK" in os.environ:
        if DEVICE == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl" if DEVICE == "cuda" else "gloo")
    model = build(options.layers, options.hidden, options.rank)
    if dist.is_initialized():
        for layer in model.base_model.model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    nbytes = sum(tensor.nbytes for _, tensor in dense_weights(model))
    source = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    target, times = torch.empty_like(source), -(-nbytes // source.nbytes)
    rows = {
        "adapters merged": seconds(lambda: [None for _ in dense_weights(model)], options.rounds),
        "base alone": seconds(lambda: [None for _ in dense_weights(model, merge=False)], options.rounds),
        "copy": seconds(lambda: [target.copy_(source) for _ in range(times)], options.rounds),
    }
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(f"{describe(model)}\n{nbytes / 1e9:.2f} GB, torch {torch.__version__}, {DEVICE}\n")
        print("| what | seconds | GB/s | share of copy |\n|---|---|---|---|")
        for name, found in rows.items():
            print(f"| {name} | {found:.3f} | {nbytes / found / 1e9:.1f} | {rows['copy'] / found:.2f} |")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
