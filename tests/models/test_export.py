"""torch.export of 4-bit models, saved and loaded again, and AOTInductor packages of them."""

import copy
import io
import subprocess
import sys

import bitsandbytes as bnb
import pytest
import torch
from bitshard.nn.linear import LinearNF4
from bitshard.nn.parametrize import replace_parameter_4bit
from bitshard.nn.tied import TiedHead
from bitshard.process import foreign
from torch import nn
from torch.export import Dim, export

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
STRICT = [pytest.param(True, id="strict"), pytest.param(False, id="non-strict")]


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def ops_of(program: torch.export.ExportedProgram) -> list[str]:
    """Names of the ops in the program, subgraphs included."""
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    return [str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"]


# ---- layers ----


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(
        LinearNF4(70, 96, compute_dtype=torch.float32, compress_statistics=True),
        nn.GELU(),
        LinearNF4(96, 33, bias=False, compute_dtype=torch.float32, compress_statistics=False),
    )
    return model.to("cpu").eval()


@pytest.mark.parametrize("strict", STRICT)
@pytest.mark.parametrize("compute", [None, torch.bfloat16])
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16])
def test_layer(strict, compute, storage):
    torch.manual_seed(0)
    layer = LinearNF4(70, 33, compute_dtype=compute, quant_storage=storage).to("cpu")
    x = torch.randn(3, 70)
    program = export(layer, (x,), strict=strict)
    assert ops_of(program).count("bitshard.linear_4bit.default") == 1
    assert layer.packed_weight.checked is None, "no bytes were seen"
    for found in (program.module(), saved_and_loaded(program).module()):
        assert torch.equal(found(x), layer(x))


@pytest.mark.parametrize("strict", STRICT)
def test_bytes_of_others_are_checked_first(strict):
    """Bytes that other code assigned are not exported before a forward has compared them with their checksum."""
    torch.manual_seed(0)
    layer = LinearNF4(70, 33, compute_dtype=torch.float32).to("cpu")
    x = torch.randn(3, 70)
    layer.weight.data = layer.weight.data.clone()
    error, text = (torch._dynamo.exc.Unsupported, "Observed exception") if strict else (ValueError, "before it is exp")
    with pytest.raises(error, match=text):
        export(layer, (x,), strict=strict)
    expected = layer(x)
    assert torch.equal(export(layer, (x,), strict=strict).module()(x), expected)


@pytest.mark.parametrize("strict", STRICT)
def test_parameter_of_another_module(strict):
    """Weights that a parametrization dequantizes stay packed in the program."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(3, 32, 64), requires_grad=False)

        def forward(self, x):
            return torch.einsum("bk,enk->ben", x, self.w) + self.w.sum()

    model = Experts()
    replace_parameter_4bit(model, "w")
    x = torch.randn(2, 64)
    program = export(model, (x,), strict=strict)
    assert ops_of(program).count("bitshard.dequantize_4bit.default") == 1
    assert torch.equal(saved_and_loaded(program).module()(x), model(x))


def int8(kind):
    """A quantized module of one int8 weight that nobody has called yet, and an input."""
    torch.manual_seed(0)
    if kind == "linear":
        layer = bnb.nn.Linear8bitLt(96, 30, has_fp16_weights=False, threshold=6.0).to("cpu")
        return layer.requires_grad_(False), torch.randn(3, 96)
    embedding = bnb.nn.Embedding8bit(50, 96).to("cpu")
    tokens = torch.tensor([[1, 2], [3, 49]])
    return (embedding, tokens) if kind == "embedding" else (nn.Sequential(embedding, TiedHead(embedding)), tokens)


@pytest.mark.parametrize("kind, strict", [("linear", False), ("linear", True), ("embedding", False), ("tied", False)])
def test_int8_before_a_first_forward(kind, strict):
    """And inside another module, at whose path the weight is found; saved, loaded, and of a copy."""
    module, x = int8(kind)
    outer = nn.Sequential(nn.Sequential(copy.deepcopy(module)))
    program = export(module, (x,), strict=strict)
    expected = module(x)
    for found in (program.module(), saved_and_loaded(program).module()):
        assert torch.equal(found(x), expected)
    if not strict:
        assert torch.equal(export(outer, (x,), strict=False).module()(x), expected)


def another_weight(layer, put):
    """Other values for a quantized layer: by assignment, into `_parameters`, or with a state dict."""
    new = type(layer.weight)(torch.randn(layer.weight.shape if layer.quant_state is None else layer.quant_state.shape))
    new = type(new)(new.data * 3, requires_grad=False, compress_statistics=False, quant_type="nf4").to("cpu")
    if put == "state dict":
        other = copy.deepcopy(layer)
        other.weight = new
        return layer.load_state_dict(other.state_dict())
    return setattr(layer, "weight", new) if put == "weight" else layer._parameters.update(weight=new)


@pytest.mark.parametrize("cls", [bnb.nn.Linear8bitLt, bnb.nn.Embedding8bit, LinearNF4, bnb.nn.EmbeddingNF4])
def test_scales_are_those_of_the_weight_that_is_there(cls):
    """Of one that came after the last forward, too."""
    module, x = made(cls)
    module.to("cpu")
    before = module(x)
    for put in ("weight", "_parameters", "state dict"):
        another_weight(module, put)
        y = export(module, (x,), strict=False).module()(x)
        assert torch.equal(y, module(x)) and not torch.equal(y, before), put
        before = y


def made(cls):
    """A module of one weight [64, 64] that is not quantized yet, and an input."""
    options = {bnb.nn.Linear8bitLt: {"has_fp16_weights": False}, LinearNF4: {"compute_dtype": torch.float32}}.get(
        cls, {}
    )
    module = cls(64, 64, **options).requires_grad_(False)
    return module, torch.randn(3, 64) if isinstance(module, nn.Linear) else torch.tensor([1, 2])


@pytest.mark.parametrize("cls", [bnb.nn.Linear8bitLt, bnb.nn.Embedding8bit, LinearNF4, bnb.nn.EmbeddingNF4])
def test_what_is_not_quantized_yet_is_not_exported(cls):
    """A program that quantized in every call would break when the layer's own first call quantizes its weight."""
    module, x = made(cls)
    for strict, error, words in ((False, RuntimeError, "not quantized yet: move"), (True, Exception, "")):
        with pytest.raises(error, match=words):
            export(module, (x,), strict=strict)
    assert torch.equal(export(module.to("cpu"), (x,), strict=False).module()(x), module(x))


def test_int8_that_is_trained_is_exported():
    """With has_fp16_weights each call quantizes, in the program too."""
    layer, x = bnb.nn.Linear8bitLt(96, 30), torch.randn(3, 96)
    with torch.no_grad():
        assert torch.equal(export(layer, (x,), strict=False).module()(x), layer(x))


@pytest.mark.parametrize("cls, word", [(bnb.nn.Linear8bitLt, "int8"), (LinearNF4, "4-bit")])
def test_a_torch_that_exports_otherwise(monkeypatch, cls, word):
    """Where the weight cannot be found the error says so and names the way that works."""
    module, x = made(cls)
    module.to("cpu")
    monkeypatch.setattr(foreign, "TORCH_EXPORTS", foreign.TORCH_EXPORTS._replace(function="another_name"))
    with pytest.raises(
        RuntimeError, match=rf"another tensor in the place of the {word} weight \[64, 64\].*strict=True"
    ):
        export(module, (x,), strict=False)
    assert torch.equal(export(module, (x,), strict=True).module()(x), module(x))


DENSE_PACKAGE = """
import torch
program = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program))(torch.ones(2, 4))
"""


def require_packages():
    """Skip where torch cannot load a package of a dense layer: 2.11's build for CUDA 13.0 crashes in it."""
    if (
        torch.__version__ < "2.13"
        and subprocess.run([sys.executable, "-c", DENSE_PACKAGE], capture_output=True).returncode
    ):
        pytest.skip("this torch cannot load an AOTInductor package of a dense layer either")


def test_aotinductor_package(tmp_path):
    """Compiled ahead for any batch; the product runs as the same op, the biggest batch by panels."""
    require_packages()
    model = stack()
    with torch.no_grad():
        program = export(model, (torch.randn(5, 70),), dynamic_shapes={"input": {0: Dim("rows", min=2, max=256)}})
        if torch.__version__ < "2.13":  # 2.10 takes no subclass among the constants
            for name, value in program.state_dict.items():
                with torch._C.DisableTorchFunctionSubclass():
                    program.state_dict[name] = nn.Parameter(value.detach().as_subclass(torch.Tensor), False)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        compiled = torch._inductor.aoti_load_package(package)
        for rows in (2, 5, 100):
            x = torch.randn(rows, 70)
            assert torch.allclose(compiled(x), model(x), atol=1e-5, rtol=1e-5), rows


# ---- models ----


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders of a tiny Llama: in fp32, and quantized by save_pretrained of the loaded 4-bit model."""
    pytest.importorskip("transformers")
    from helpers.llama import load_4bit, save_llama

    dense, packed = tmp_path_factory.mktemp("dense"), tmp_path_factory.mktemp("packed")
    save_llama(dense)
    load_4bit(dense).save_pretrained(packed)
    return {"on the fly": dense, "pre-quantized": packed}


class Logits(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids=input_ids, use_cache=False).logits


@pytest.mark.parametrize(
    ("strict", "source"),
    [(True, "on the fly"), (False, "pre-quantized"), (False, "on the fly"), (True, "pre-quantized")],
)
def test_model(folders, strict, source):
    """A loaded model, for any batch and length: eager's logits, before and after the program was saved."""
    import transformers
    from helpers.llama import load_4bit

    folder = folders[source]
    if source == "on the fly":
        model = Logits(load_4bit(folder)).eval()
    else:
        model = Logits(transformers.AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"})).eval()
    ids = torch.randint(3, 96, (2, 12))
    length = (
        Dim("length", min=3, max=60) if torch.__version__ >= "2.13" else Dim.AUTO
    )  # 2.10 cannot prove its own guard
    dims = {"input_ids": {0: Dim("batch", min=2, max=16), 1: length}}
    with torch.no_grad():
        program = export(model, (ids,), strict=strict, dynamic_shapes=dims)
        assert ops_of(program).count("bitshard.linear_4bit.default") == 7
        packed = {name: value for name, value in program.state_dict.items() if name.endswith("_proj.weight")}
        assert len(packed) == 7 and {value.dtype for value in packed.values()} == {torch.uint8}
        for found in (program.module(), saved_and_loaded(program).module()):
            for shape in ((2, 12), (3, 7), (5, 20)):
                ids = torch.randint(3, 96, shape)
                assert torch.equal(found(ids), model(ids))
