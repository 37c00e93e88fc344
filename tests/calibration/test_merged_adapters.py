"""Adapters merged into 4-bit weights that are calibrated to them: `merge_calibrated`, and its command."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from bitshard.calibration import samples
from bitshard.calibration.merged import merge_calibrated
from bitshard.convert.look import look
from bitshard.convert.merge import merge_folder
from bitshard.convert.quantize import quantize_folder
from bitshard.transformers import FourBitConfig
from bitshard_cli import main
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

sys.path.append(str(Path(__file__).parents[2] / "examples"))
import tiny  # noqa: E402

SHORT = ("mxfp4", "nvfp4")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with `base` (nested NF4), `base_mxfp4`, `base_nvfp4`, text.txt, and `adapter`, whose changes are a small
    part of a step of the codes."""
    folder = tmp_path_factory.mktemp("made") / "tiny"
    dense, _ = tiny.make(folder)
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    quantize_folder(dense, folder / "base", settings)
    for quant_type in SHORT:
        quantize_folder(dense, folder / f"base_{quant_type}", FourBitConfig(bnb_4bit_quant_type=quant_type))
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_pretrained(folder / "base")
    tuned = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    tuned.save_pretrained(folder / "adapter")
    return folder


def divergence(of, wanted, ids):
    """Of next tokens, nats."""
    logits = [AutoModelForCausalLM.from_pretrained(folder)(ids).logits.log_softmax(-1) for folder in (of, wanted)]
    return torch.nn.functional.kl_div(*logits, log_target=True, reduction="batchmean").item() / ids.shape[1]


@torch.no_grad()
@pytest.mark.parametrize("base", ["base", *(f"base_{quant_type}" for quant_type in SHORT)])
def test_more_of_the_adapter_is_left(made, tmp_path, base):
    """Nearer to the merged model than what merging to the nearest codes gives; the config is that of the base."""
    base = made / base
    ids = samples(str(made / "text.txt"), AutoTokenizer.from_pretrained(base), 24, 64)
    merge_folder(base, made / "adapter", tmp_path / "dense", torch.float32)
    merge_folder(base, made / "adapter", tmp_path / "nearest", None)
    count, found = merge_calibrated(base, made / "adapter", tmp_path / "out", ids, seed=1)
    assert count == 14 and len(found.layers) == 2 and found.tuned is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dense", "nearest", "out"]
    left = [divergence(tmp_path / name, tmp_path / "dense", ids[:8]) for name in ("out", "nearest")]
    assert 0 < left[0] < 0.7 * left[1]
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "out", base))
    assert ours["quantization_config"] == theirs["quantization_config"] and ours["dtype"] == theirs["dtype"]
    found, expected = ({each.name: each.format for each in look(of).weights} for of in (tmp_path / "out", base))
    assert found == expected


def test_the_command(made, tmp_path, capsys):
    words = ["merge", *(str(made / name) for name in ("base", "adapter"))]
    given = ["--calibrate", str(made / "text.txt"), "--samples", "16", "--length", "64", "--tune", "2", "--json"]
    assert main.main([*words, str(tmp_path / "out"), "--to", "4bit", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["modules"] == 14 and found["calibration"]["samples"] == 16
    assert found["calibration"]["tuned"]["steps"] == 2
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for options, said in (
        (["--to", "bfloat16", *given], "--calibrate is for --to 4bit"),
        (["--to", "4bit", "--merge-aware", *given], "name one"),
        (["--to", "4bit", "--tune", "3"], "--tune follows calibration"),
        (["--to", "4bit", "--calibrate", "text", "--samples", "0"], "--samples 0: expected 1 or more"),
    ):
        assert main.main([*words, str(tmp_path / "new"), *options]) == 2
        assert said in capsys.readouterr().err
    assert main.main([*words, str(tmp_path / "new"), "--to", "fp4", *given]) == 1
    assert "its weights are nf4, and stay nf4" in capsys.readouterr().err
    (tmp_path / "new.dense").mkdir()
    assert main.main([*words, str(tmp_path / "new"), "--to", "4bit", *given]) == 1
    assert "new.dense" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_other_bases_are_refused(made, tmp_path):
    """In a line, before anything is written."""
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ValueError, match="its weights are not quantized, and merged ones are calibrated in NF4, FP4"):
        merge_calibrated(made / "model", made / "adapter", tmp_path / "out", ids)
    assert not list(tmp_path.iterdir())
    other = shutil.copytree(made / "model", tmp_path / "vendor")
    config = json.loads((other / "config.json").read_text()) | {"quantization_config": {"quant_method": "modelopt"}}
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="its weights are modelopt, and merged ones are calibrated in .* own files"):
        merge_calibrated(other, made / "adapter", tmp_path / "out", ids)
    assert [path.name for path in tmp_path.iterdir()] == ["vendor"]
