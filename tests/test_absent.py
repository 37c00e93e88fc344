"""The half that bitshard does not have yet: where it refuses, before what, and with which advice."""

import re

import bitsandbytes as bnb
import pytest
import torch
from torch._subclasses import FakeTensorMode

ADVICE = {"int8": "load_in_4bit=True", "embedding": "torch.nn.Embedding"}


def advice(error) -> set[str]:
    """The families whose advice a text holds."""
    assert "bitsandbytes==0.50.2" in str(error.value), "the way back to the original"
    return {family for family, text in ADVICE.items() if text in str(error.value)}


@pytest.mark.parametrize(
    ("family", "call"),
    [
        ("int8", lambda: bnb.nn.Linear8bitLt(8, 8)),
        ("int8", lambda: bnb.nn.Int8Params(torch.zeros(8, 8))),
        ("int8", lambda: bnb.matmul(torch.zeros(1, 8), torch.zeros(8, 8))),
        ("int8", lambda: bnb.MatmulLtState()),
        ("int8", lambda: bnb.autograd._functions.MatMul8bitLt.apply(torch.zeros(1, 8), torch.zeros(8, 8))),
        ("int8", lambda: bnb.autograd._functions.GlobalOutlierPooler.get_instance()),
        ("int8", lambda: bnb.functional.int8_vectorwise_quant(torch.zeros(8, 8))),
        ("int8", lambda: bnb.utils.OutlierTracer.get_instance()),
        ("int8", lambda: bnb.nn.modules.maybe_rearrange_weight({}, "", {}, True, [], [], [])),
        ("embedding", lambda: bnb.nn.StableEmbedding(8, 8)),
        ("embedding", lambda: bnb.nn.EmbeddingNF4(8, 8)),
    ],
)
def test_advice_fits(family, call):
    with pytest.raises(NotImplementedError) as error:
        call()
    assert advice(error) == {family}


def test_subclasses_of_others_name_the_absent_class():
    """Lightning and others derive from these classes; the error names the one that is absent."""
    own = type("OwnLinear", (bnb.nn.Linear8bitLt,), {})
    with pytest.raises(NotImplementedError, match=r"bitsandbytes\.nn\.modules\.Linear8bitLt is not"):
        own(8, 8)


def absent_op_calls():
    ops, a = torch.ops.bitsandbytes, torch.zeros(4, 4)
    return {
        "int8_double_quant": lambda: ops.int8_double_quant(a),
        "int8_linear_matmul": lambda: ops.int8_linear_matmul(a, a),
        "int8_linear_matmul.out": lambda: ops.int8_linear_matmul.out(a, a, out=a),
        "int8_mixed_scaled_mm": lambda: ops.int8_mixed_scaled_mm(a, a, a, a, a),
        "int8_mm_dequant": lambda: ops.int8_mm_dequant(a, a, a),
        "int8_scaled_mm": lambda: ops.int8_scaled_mm(a, a, a, a),
        "int8_vectorwise_dequant": lambda: ops.int8_vectorwise_dequant(a, a),
        "int8_vectorwise_quant": lambda: ops.int8_vectorwise_quant(a),
    }


@pytest.mark.parametrize("name", absent_op_calls())
@pytest.mark.parametrize("mode", ["eager", "fake"])
def test_absent_ops_refuse(name, mode):
    """Called, and traced: a compiled program is refused when it is compiled."""
    expected = pytest.raises(NotImplementedError, match=rf"torch\.ops\.bitsandbytes\.{re.escape(name)} is not in bitsh")
    if mode == "eager":
        with expected as error:
            absent_op_calls()[name]()
    else:
        with FakeTensorMode(), expected as error:
            absent_op_calls()[name]()
    assert advice(error) == {"int8"}


# ---- transformers: what has happened when it refuses ----


def tiny(transformers):
    return transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )


@pytest.mark.parametrize("saved_in_8_bits", [False, True])
def test_load_in_8bit_refuses_before_weights_are_read(tmp_path, saved_in_8_bits):
    """transformers replaces the linear layers of a model on meta, before it opens the weights: the file is empty here.

    Nothing of bitsandbytes runs earlier that can tell 8 bits from 4: weights that are not on disk are downloaded first.
    """
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    quantization, config = transformers.BitsAndBytesConfig(load_in_8bit=True), tiny(transformers)
    options = {"quantization_config": quantization}
    if saved_in_8_bits:
        config.quantization_config, options = quantization.to_dict(), {}
    config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(NotImplementedError, match=r"bitsandbytes\.nn\.modules\.Linear8bitLt") as error:
        transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu", **options)
    assert advice(error) == {"int8"}
