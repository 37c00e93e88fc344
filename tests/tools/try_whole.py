"""unsloth, axolotl, LLaMA-Factory and ms-swift as their users start them: what is 4-bit, and the original's losses."""

import pathlib
import sys

import beside
import pytest
import torch
from beside import BOTH, OURS, THEIRS

AXOLOTL = """
base_model: ./model
load_in_4bit: true
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
lora_mlp_kernel: false  # its kernels need a GPU: benchmarks/checks/tools/on_gpu.py
lora_qkv_kernel: false
lora_o_kernel: false
datasets: [{path: rows.json, ds_type: json, type: completion}]
sequence_len: 32
micro_batch_size: 4
gradient_accumulation_steps: 1
max_steps: 4
optimizer: adamw_torch
learning_rate: 0.01
lr_scheduler: constant
bf16: false
fp16: false
tf32: false
logging_steps: 1
val_set_size: 0
save_strategy: "no"
output_dir: ./out
dataset_prepared_path: ./prepared
seed: 5
"""
FACTORY = """
model_name_or_path: ./model
stage: pt
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
quantization_bit: 4
quantization_method: bnb
dataset_dir: .
dataset: rows
cutoff_len: 24
output_dir: ./out
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
max_steps: 4
learning_rate: 0.01
lr_scheduler_type: constant
optim: adamw_torch
logging_steps: 1
save_strategy: "no"
report_to: none
seed: 5
"""
SWIFT = """
model: ./model
model_type: llama
template: dummy
torch_dtype: float32
tuner_type: lora
quant_method: bnb
quant_bits: 4
lora_rank: 8
lora_alpha: 16
lora_dropout: 0
target_modules: all-linear
dataset: ./rows.json
columns: {text: response}
split_dataset_ratio: 0
max_length: 32
max_steps: 4
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
learning_rate: 0.01
lr_scheduler_type: constant
warmup_ratio: 0
optim: adamw_torch
logging_steps: 1
save_strategy: "no"
report_to: none
output_dir: ./out
seed: 5
"""
ROWS = '{"rows": {"file_name": "rows.json", "columns": {"prompt": "text"}}}'
# tool: the words of its command, the files that it reads
COMMANDS = {
    "axolotl-whole": (["axolotl.cli.main", "train", "c.yml", "--launcher", "python"], {"c.yml": AXOLOTL}),
    "llamafactory-whole": (["llamafactory.cli", "train", "c.yml"], {"c.yml": FACTORY, "dataset_info.json": ROWS}),
    "ms-swift-whole": (["swift.cli.main", "sft", "c.yml"], {"c.yml": SWIFT}),
}
LINEARS = 14  # of the two decoder layers


def all_are_4_bit(found):
    """A quarter of the bytes that 16 bits take."""
    assert found["linear"] == found["four_bit"] == LINEARS and found["classes"] == ["Linear4bit Params4bit"]
    assert 4 * found["bytes"] == found["bytes_in_16_bits"]


def fall(losses):
    assert len(losses) == 4 and min(losses[1:]) < losses[0] - 0.05


@pytest.mark.parametrize("tool", COMMANDS)
def test_by_its_command(tool, tmp_path):
    words, files = COMMANDS[tool]
    both = {which: beside.command(which, tool, words, files, tmp_path / which) for which in BOTH}
    ours, theirs = both[OURS], both[THEIRS]
    for moment in ("before", "after"):
        all_are_4_bit(ours[moment])
        assert ours[moment] == theirs[moment]
    assert ours["before"]["digest"] == ours["after"]["digest"]
    assert ours["trained"] == theirs["trained"] > 0 and ours["trainer"] == theirs["trainer"]
    assert ours["gradient_gap"] <= 1e-5, both
    assert abs(ours["losses"][0] - theirs["losses"][0]) <= 1e-5 * theirs["losses"][0], both
    assert beside.gap(theirs["losses"], ours["losses"]) <= 1e-3, both
    fall(ours["losses"])


@pytest.mark.parametrize("tool", ["axolotl-whole"])
def test_by_its_command_as_graphs(tool, tmp_path):
    """With BITSHARD_FAST=1, graphs played on the CPU: the losses of the same command without it."""
    words, files = COMMANDS[tool]
    files = {
        name: text.replace("sequence_len: 32", "sequence_len: 32\npad_to_sequence_len: true")
        for name, text in files.items()
    }
    plain = beside.command(OURS, tool, words, files, tmp_path / "plain")
    played = beside.command(OURS, tool, words, files, tmp_path / "played", BITSHARD_FAST="1", PLAYED="1")
    assert beside.gap(plain["losses"], played["losses"]) <= 1e-5, (plain, played)
    assert played["replays"] >= 2 and set(played["eager"]) == {"the first of its form"}, played
    assert played["trained"] == plain["trained"] and played["before"]["digest"] == played["after"]["digest"]
    assert f"{LINEARS} fused" in played["fused"], played


def test_gradient_gap_sees_a_wrong_layer(monkeypatch):
    """It is 0 where a layer computes as torch does, and the error where it does not."""
    monkeypatch.syspath_prepend(str(beside.WORKERS))
    from bitsandbytes.nn import Linear4bit
    from dense import gradient_gap

    class Wrong(Linear4bit):
        def forward(self, x):
            return 1.01 * super().forward(x)

    torch.manual_seed(0)
    gaps = []
    for layer in (Linear4bit, Wrong):
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), layer(64, 8, compute_dtype=torch.float32).to("cpu"))
        x = torch.randn(4, 64)
        model(x).sum().backward()
        kept = model[0].weight.grad
        gaps.append(gradient_gap(model, lambda model=model, x=x: model(x).sum().backward()))
        assert model[0].weight.grad is kept
    assert gaps[0] <= 1e-6 and abs(gaps[1] - 0.01) <= 1e-5


LEFT = """
import pathlib, subprocess, sys, time
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(left.pid))
time.sleep(600)
"""


def test_a_command_that_does_not_end(tmp_path):
    """Its results are kept; it and what it started are gone."""
    results, line = tmp_path / "results", [sys.executable, "-c", LEFT]
    with pytest.warns(UserWarning, match="after it had written its results"):
        assert beside.ended([*line, str(results)], results, 60, after=0.5) == (None, "")
    state = pathlib.Path(f"/proc/{results.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
    with pytest.raises(AssertionError, match="wrote no results in 1 s"):
        beside.ended([*line, str(results)], tmp_path / "others", 1)


def unsloth(folder, **variables):
    return {
        which: beside.run(
            which,
            ["unsloth-whole"],
            "unsloth_whole.py",
            "--model",
            str(folder / which / "model"),
            out=folder / which,
            **variables,
        )[0]
        for which in BOTH
    }


def test_unsloth_on_a_cpu(tmp_path):
    """FastLanguageModel, get_peft_model and SFTTrainer, in bf16."""
    both = unsloth(tmp_path)
    ours, theirs = both[OURS], both[THEIRS]
    for moment in ("loaded", "adapted", "after"):
        all_are_4_bit(ours[moment])
        assert ours[moment] == theirs[moment]
    assert ours["trained"] == theirs["trained"] and ours["loader"] == "unsloth._cpu_init"
    assert beside.gap(theirs["losses"], ours["losses"]) <= 5e-3
    fall(ours["losses"])
    assert ours["fuse"]["line"] == "14 LoRA layers: 14 fused"


def test_unsloth_as_on_a_gpu(tmp_path):
    """What unsloth does to a model on a GPU: with bitshard it left 16 bits of each layer, silently."""
    both = unsloth(tmp_path, UNSLOTH_ALLOW_CPU="1")
    ours, theirs = both[OURS], both[THEIRS]
    for moment in ("loaded", "adapted"):
        all_are_4_bit(ours[moment])
        assert ours[moment] == theirs[moment]
    assert ours["loader"] == theirs["loader"] == "unsloth.models.loader" and ours["trained"] == theirs["trained"]
    said = "14 LoRA layers: 0 fused, 14 computed by unsloth's own kernels, which never call them"
    assert ours["fuse"]["line"] == said and ours["fuse"]["left"] == {}
