"""The examples run as they are: a tiny random model, in one process and under FSDP2 with the example's own config."""

import importlib
import json
import re
import sys
from pathlib import Path

import bitshard.experts
import pytest
import torch
from fsdp.launch import WORKERS
from fsdp.launch import run as run_worker
from helpers import tiny

pytest.importorskip("peft")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate.commands.config.config_args import load_config_from_file  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TEXT = "A rank keeps its share of the packed weights and of their scales. "


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Folder with a model of two small layers, its tokenizer (one token per byte) and a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("job")
    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    tiny.llama(folder / "model", vocab_size=256, intermediate_size=192, num_key_value_heads=2)
    (folder / "text.txt").write_text(TEXT * 20)
    return folder


def launch(version):
    """The command of `accelerate launch` with an example's config."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    return [*command, "--config_file", str(EXAMPLES / f"fsdp{version}.yaml")]


def run(job, name, launcher, *options):
    """Run examples/observe.py, which runs examples/qlora.py; return the reports of its processes."""
    reports = job / name
    command = [*launcher, str(EXAMPLES / "observe.py"), str(reports), "--model", str(job / "model")]
    command += ["--text", str(job / "text.txt"), "--output", str(reports), "--steps", "2", "--length", "32"]
    command += ["--lr", "1e-2", "--dtype", "float32", *options]
    run_worker(command, 240)
    return [json.loads(file.read_text()) for file in sorted(reports.glob("rank*.json"))]


def test_one_process_and_fsdp2_train_alike(job):
    """Same losses, the base halved, and an adapter that has learned something in the output folder of both.

    One with peft's layers, the other with fused ones.
    """
    from safetensors.torch import load_file

    (alone,) = run(job, "alone", [sys.executable], "--batch", "2")
    sharded = run(job, "fsdp2", launch(2), "--fuse")
    assert [report["sharding"] for report in (alone, *sharded)] == ["none", "FSDP2", "FSDP2"]
    assert len(alone["losses"]) == 2
    for report in sharded:
        assert report["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert report["packed_bytes"] == alone["packed_bytes"] / 2
    for name in ("alone", "fsdp2"):
        adapter = load_file(job / name / "adapter_model.safetensors")
        trained = [tensor for key, tensor in adapter.items() if "lora_B" in key]
        assert len(trained) == 14 and all(tensor.abs().max() > 0 for tensor in trained)


@pytest.mark.parametrize("version", [1, 2])
def test_launch_configs_are_read_by_accelerate(version):
    """accelerate knows every key, and the settings that sharding depends on are there."""
    config = load_config_from_file(str(EXAMPLES / f"fsdp{version}.yaml"))
    assert config.distributed_type == "FSDP"
    assert config.fsdp_config["fsdp_version"] == version
    assert config.fsdp_config["fsdp_auto_wrap_policy"] == "TRANSFORMER_BASED_WRAP"
    assert config.fsdp_config.get("fsdp_use_orig_params", False) is False


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_launch_that_did_not_shard_is_an_error(monkeypatch, version):
    """What accelerate makes of an FSDP config on a machine without a GPU, plain weights, must not pass as FSDP."""
    from bitsandbytes.nn import Linear4bit

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import observe

    model = torch.nn.Sequential(Linear4bit(64, 64, quant_storage=torch.float32)).to("cpu")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(RuntimeError, match="not sharded"):
        observe.sharding(model)
    here, total = observe.frozen_bytes(model)
    with pytest.raises(RuntimeError, match="more than 1/2"):
        observe.check_share(here, total, 2)


# ---- examples/fsdp_qlora.py ----

# of the first loss, which no step has gone before, and of the later ones
BOUNDS = {"fp32": (1e-6, 1e-5), "mp_fp16_autocast": (1e-6, 2e-4)}
BF16 = (1e-6, 1e-3)


@pytest.fixture(scope="module")
def programs(monkeymodule):
    """tests/fsdp/programs.py, whose tables name what it runs."""
    monkeymodule.syspath_prepend(str(EXAMPLES))
    monkeymodule.syspath_prepend(str(WORKERS))
    import programs

    return programs


@pytest.fixture(scope="module")
def monkeymodule():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def qlora(tmp_path_factory):
    """Folder and results of all runs of tests/fsdp/programs.py, in one process and on two."""
    folder = tmp_path_factory.mktemp("programs")
    worker = [str(WORKERS / "programs.py"), "--dir", str(folder), "--out"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_worker([sys.executable, *worker, str(folder / "alone")], 240)
    run_worker([*torchrun, *worker, str(folder / "sharded")], 240)
    found = {}
    for name in ("alone.0", "sharded.1", "sharded.0"):
        results = json.loads((folder / name).read_text())
        for job, result in results.items():
            assert "error" not in result, f"{name} {job}: {result['error']}"
        found |= results
    return folder, found


def reference(name):
    """The run in one process that has the losses of run `name`."""
    for part in ("-packed", "hf_"):
        name = name.replace(part, "")
    name = name.replace("offload", "qlora")
    return name.removesuffix("-low") if name.startswith(("qlora", "dora")) else name


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp_qlora_gives_the_losses_of_one_process(qlora, programs, version):
    """The first to rounding, by which each precision and train type has its own; and the base is sharded."""
    found = qlora[1]
    for name in programs.RUNS:
        if version == 1 and name.startswith("offload"):
            continue
        losses, expected = found[f"{name}-{version}"]["losses"], found[f"{reference(name)}-0"]["losses"]
        first, later = BOUNDS.get(reference(name).split("-")[1], BF16)
        assert losses[0] == pytest.approx(expected[0], rel=first), name
        assert losses == pytest.approx(expected, rel=later), name
        if not name.startswith(("full", "lora")):
            assert f"4-bit base sharded by FSDP{version} over 2 ranks: 14 weights" in found[f"{name}-{version}"]["said"]


def test_losses_tell_precisions_and_train_types_apart(qlora, programs):
    """What the test above compares with differs by more than its bounds, in the first loss or after training."""
    losses = {name: qlora[1][f"{name}-0"]["losses"] for name in programs.ALONE}
    for name, values in losses.items():
        assert values[-1] < values[0], f"{name} has not learned: {values}"
        for other in losses:
            if other != name:
                assert values[0] != pytest.approx(losses[other][0], rel=1e-6) or values[-1] != pytest.approx(
                    losses[other][-1], rel=1e-3
                ), (name, other)


def test_every_value_of_every_option_runs_under_each_fsdp(programs):
    lines = [line for name, line in programs.RUNS.items() if not name.startswith("offload")]
    for option, values in {
        "--train-type": programs.fsdp_qlora.TRAIN_TYPES,
        "--precision": programs.fsdp_qlora.PRECISIONS,
        "--wrap": ["size"],
    }.items():
        for value in values:
            assert any(f"{option} {value}" in line for line in lines), (option, value)
    for flag in ("--low-memory", "--checkpointing", "--accumulate 2", "--save"):
        assert any(flag in line for line in lines) and any(flag not in line for line in lines), flag
    for train_type in programs.fsdp_qlora.TRAIN_TYPES:
        assert any(f"--train-type {train_type} " in line and "--low-memory" in line for line in lines), train_type


def test_fsdp_qlora_says_in_a_line_what_cannot_work(qlora, programs):
    for name, (_, words) in programs.REFUSED.items():
        line = qlora[1][name]["line"]
        assert words in line and line.startswith("fsdp_qlora: ") and "\n" not in line, line


@pytest.mark.parametrize("name", ["qlora-fp32", "dora-fp32"])
def test_saved_adapters_are_those_of_one_process(qlora, name):
    """Every way of loading and sharding, and peft reads them."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors.torch import load_file

    folder, found = qlora
    expected = load_file(folder / f"{name}-0" / "adapter_model.safetensors")
    saved = [path for path in folder.glob("*qlora-*" if "qlora" in name else "dora-*") if path.is_dir()]
    assert len(saved) == (7 if "qlora" in name else 5)
    for path in saved:
        adapter = load_file(path / "adapter_model.safetensors")
        assert adapter.keys() == expected.keys()
        for key, values in expected.items():
            assert (adapter[key] - values).norm() <= 1e-3 * values.norm(), (path.name, key)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny" / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, folder / f"{name}-2")
    loaded, file = get_peft_model_state_dict(model), load_file(folder / f"{name}-2" / "adapter_model.safetensors")
    assert loaded.keys() == file.keys()
    assert all(torch.equal(loaded[key], values) for key, values in file.items())


def test_a_fully_trained_model_is_saved(qlora):
    folder, _ = qlora
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(folder / f"full-fp32-low-{version}", dtype=torch.float32)
        for version in (0, 1, 2)
    ]
    before = transformers.AutoModelForCausalLM.from_pretrained(folder / "tiny" / "model", dtype=torch.float32)
    for (name, expected), start in zip(models[0].named_parameters(), before.parameters(), strict=True):
        assert not torch.equal(expected, start), name
        for model in models[1:]:
            assert (model.get_parameter(name) - expected).norm() <= 1e-3 * expected.norm(), name


def test_fsdp_qlora_from_the_command_line(qlora, tmp_path):
    """With a progress bar, and the losses of the same options above."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "fsdp_qlora.py"), "--tiny", "--low-memory", "--steps", "3", "--length", "32"]
    output = run_worker([*command, "--lr", "1e-2", "--rank", "4"], 240, TMPDIR=str(tmp_path))
    losses = qlora[1]["qlora-bf16-low-2"]["losses"]
    assert f"loss {losses[0]:.4f} -> {losses[-1]:.4f}" in output


# ---- examples/sft.py and examples/fsdp2_two_gpus.py ----


def test_sft_trains_alike_under_both_versions(tmp_path):
    """The same losses, an adapter from FSDP2's config, and a base that is sharded: DDP would train as well."""
    losses = {}
    proof = "import runpy, sys, bitshard.fsdp; sys.argv = sys.argv[1:]; found = runpy.run_path(sys.argv[0])"
    (tmp_path / "proof.py").write_text(f"{proof}\nprint(bitshard.fsdp.describe(found['main']().model), flush=True)\n")
    for version, state_dicts in ((1, "SHARDED_STATE_DICT"), (2, "FULL_STATE_DICT")):
        out = tmp_path / f"fsdp{version}"
        command = [*launch(version), "--fsdp_state_dict_type", state_dicts, str(EXAMPLES / "cpu_fsdp.py")]
        command += [str(tmp_path / "proof.py"), str(EXAMPLES / "sft.py"), "--tiny", "--output", str(out)]
        command += ["--steps", "3", "--length", "32", "--lr", "1e-2", "--rank", "4", "--accumulate", "2"]
        command += ["--fuse"] if version == 2 else []
        output = run_worker(command, 240)
        assert f"4-bit base sharded by FSDP{version} over 2 ranks: 14 weights" in output
        assert ("14 LoRA layers: 14 fused" in output) is (version == 2)
        history = json.loads((out / "trainer_state.json").read_text())["log_history"]
        losses[version] = [entry["loss"] for entry in history if "loss" in entry]
    assert len(losses[1]) == 3 and losses[2][-1] < losses[2][0]
    assert losses[1] == pytest.approx(losses[2], rel=2e-3)
    assert (tmp_path / "fsdp2" / "adapter_model.safetensors").exists()


def cells_of_the_notebook() -> list[str]:
    """Code of examples/two_t4.ipynb, a cell each."""
    notebook = json.loads((EXAMPLES / "two_t4.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_says_what_was_not_run():
    """Without outputs it says on top that it was not run. Its cells are Python, and its links lead somewhere."""
    notebook = json.loads((EXAMPLES / "two_t4.ipynb").read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    ran = any(cell["outputs"] or cell["execution_count"] for cell in code)
    assert ("Not run on T4" in "".join(notebook["cells"][0]["source"])) is not ran
    for source in cells_of_the_notebook():
        compile(source, "two_t4.ipynb", "exec")
    text = "".join("".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "markdown")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) == 3 and all((EXAMPLES / link).exists() for link in links)


def test_two_gpus_train_as_one_does(tmp_path):
    """One process, two, and two that resume, by the notebook's cells; the program itself compares, and draws."""
    cells = ["import os", f"os.chdir({str(tmp_path)!r})", *cells_of_the_notebook()]
    (tmp_path / "cells.py").write_text("\n".join(cells))
    output = run_worker([sys.executable, str(tmp_path / "cells.py")], 240, BITSHARD_CLONE=str(EXAMPLES.parent))
    tmp_path = tmp_path / "two-gpus-out"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["gap"] <= result["bound"] == 1e-5
    assert "sharded by FSDP2 over 2 ranks" in result["resumed"]["sharding"] and "(bound 1e-05)" in output
    losses = result["one"]["losses"]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert abs(losses[2] - losses[0]) > 1e-3  # a run that begins anew instead of resuming would be seen
    assert (tmp_path / "curves.png").stat().st_size > 10_000
    assert sorted(path.name for path in (tmp_path / "two" / "checkpoint-2").glob("*_0")) == [
        "optimizer_0",
        "pytorch_model_fsdp_0",
    ]
    assert (tmp_path / "resumed" / "adapter_model.safetensors").exists()


def test_float16_resumes(monkeypatch):
    """accelerate's optimizer steps before anything was scaled: refused without `scale_losses`; no value changes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import accelerate
    import fsdp2_two_gpus
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Linear(8, 8)
    accelerator = accelerate.Accelerator(cpu=True)
    before = model.weight.detach().clone()
    for started in (False, True):
        accelerator.scaler = torch.amp.GradScaler("cpu")
        inner = torch.optim.AdamW(model.parameters(), lr=1.0)
        optimizer = accelerate.optimizer.AcceleratedOptimizer(inner, scaler=accelerator.scaler)
        if started:
            fsdp2_two_gpus.scale_losses(accelerator)
            assert len(get_optimizer_state_dict(model, optimizer)["state"]) == 2
        else:
            with pytest.raises(AssertionError, match="_scale is None"):
                get_optimizer_state_dict(model, optimizer)
            model.zero_grad()
    assert torch.equal(model.weight, before) and accelerator.scaler.get_scale() == 2.0**12


# ---- examples/moe.py ----


def test_moe(tmp_path, monkeypatch, capsys):
    """Trains, fused; the merged folder is read by plain transformers and gives what the adapted model gives, nearly."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    moe = importlib.import_module("moe")
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    steps = ["--steps", "10", "--length", "64", "--batch", "4", "--lr", "1e-2"]
    try:
        trainer = moe.main(["--tiny", "--output", str(adapter), "--merge", str(merged), *steps])
    finally:
        bitshard.experts.disable()
    printed = capsys.readouterr().out
    assert " LoRA layers: 12 fused" in printed and "12 weights, 4 of them stacks of experts" in printed
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and losses[1] < losses[0]
    from safetensors.torch import load_file

    names = load_file(adapter / "adapter_model.safetensors").keys()
    assert sum("experts" in name for name in names) == 8
    again = transformers.AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        found, expected = again(ids).logits, trainer.model(ids).logits
    assert (found - expected).norm() < 0.25 * expected.norm()
