"""The examples run as they are: a tiny random model, in one process and under FSDP2 with the example's own config."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from accelerate.commands.config.config_args import load_config_from_file  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
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
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(TEXT * 20)
    return folder


def start(command, folder=None):
    """Output of a command, without GPUs; AssertionError where it fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


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
    start(command)
    return [json.loads(file.read_text()) for file in sorted(reports.glob("rank*.json"))]


def test_one_process_and_fsdp2_train_alike(job):
    """Same losses, the base halved, and an adapter that has learned something in the output folder of both."""
    from safetensors.torch import load_file

    (alone,) = run(job, "alone", [sys.executable], "--batch", "2")
    sharded = run(job, "fsdp2", launch(2))
    assert [report["sharding"] for report in (alone, *sharded)] == ["none", "FSDP2", "FSDP2"]
    assert len(alone["losses"]) == 2
    for report in sharded:
        assert report["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert report["packed_bytes"] == alone["packed_bytes"] / 2
    for name in ("alone", "fsdp2"):
        adapter = load_file(job / name / "adapter_model.safetensors")
        trained = [tensor for key, tensor in adapter.items() if "lora_B" in key]
        assert len(trained) == 14 and all(tensor.abs().max() > 0 for tensor in trained)


def test_the_readme_as_written(job):
    """Its example and the line that proves sharding, with another model, data and fewer steps, on two processes."""
    blocks = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)
    data = "import datasets\nrows = [list(range(24))] * 32\n"
    data += "my_dataset = datasets.Dataset.from_dict({'input_ids': rows, 'labels': rows})\n"
    script = data + "\n".join(blocks)
    for written, here in (
        ('"meta-llama/Llama-3.1-8B"', repr(str(job / "model"))),
        ("max_steps=100", "max_steps=2, report_to=[]"),
    ):
        assert script.count(written) == 1
        script = script.replace(written, here)
    (job / "train.py").write_text(script)
    output = start([*launch(2), str(EXAMPLES / "cpu_fsdp.py"), "train.py"], job)
    assert output.count("4-bit base sharded by FSDP2 over 2 ranks: 14 weights, ") == 2 and "(1/2.00)" in output
    assert (job / "out" / "adapter_model.safetensors").exists()


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
