"""Embeddings: rows decoded on demand have the bits of the dequantized weight; layers, files, heads that are tied."""

import copy
import json
import re
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from bitshard import ops
from bitshard.functions.rows import embedding_4bit, embedding_int8
from bitshard.nn import tied
from helpers import upstream
from helpers.bytes import same_bytes
from helpers.copies import saved
from torch import nn
from torch.nn import functional

CLASSES = (bnb.nn.EmbeddingNF4, bnb.nn.EmbeddingFP4, bnb.nn.Embedding8bit)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# [N, K]: whole blocks in a row, several; none; more blocks than a block of the second level has; one element
SHAPES = ((300, 64), (7, 128), (33, 65), (50, 96), (5, 1), (11, 100), (2, 16448), (2, 16384 + 33))


def matrix(shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def tokens(n, device="cpu"):
    """Rows in no order, the first and the last among them."""
    found = torch.randint(0, n, (3, 4), generator=torch.Generator().manual_seed(1))
    found[0, :2] = torch.tensor([n - 1, 0])
    return found.to(device)


def made(cls, n=50, k=96, dtype=torch.float32, device="cpu"):
    module = cls(n, k, dtype=dtype)
    module.load_state_dict({"weight": matrix((n, k), dtype)})
    return module.to(device)


# ---- rows ----


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_those_of_the_dequantized_weight(device, shape, nested):
    for index, storage in enumerate((torch.uint8, torch.bfloat16, torch.float32, torch.float64)):
        for blocksize in (32, 64, 4096):
            settings = {"blocksize": blocksize, "compress_statistics": nested, "quant_storage": storage}
            packed, state = quantize_4bit(
                matrix(shape, DTYPES[index % 3], device), quant_type=("nf4", "fp4")[index % 2], **settings
            )
            rows = tokens(shape[0], device)
            assert same_bytes(embedding_4bit(rows, packed, state), dequantize_4bit(packed, state)[rows]), settings


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_int8_rows_are_those_of_the_dequantized_weight(device, shape, dtype):
    codes, absmax, _ = ops.quantize_int8(matrix(shape, dtype, device), 0.0)
    rows = tokens(shape[0], device)
    expected = ops.dequantize_int8(codes, absmax, *shape, dtype)[rows]
    assert same_bytes(embedding_int8(rows, codes, absmax, *shape, dtype), expected)


@pytest.mark.parametrize("cls", CLASSES)
def test_indices(cls):
    """Any integers of any shape; others, and rows that do not exist, are errors with the numbers."""
    module = made(cls)
    rows = tokens(50)
    expected = module(rows)
    assert expected.shape == (3, 4, 96) and not expected.requires_grad
    for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64):
        assert torch.equal(module(rows.to(dtype)), expected)
    assert torch.equal(module(rows.t()), expected.transpose(0, 1)) and torch.equal(module(rows[0, 0]), expected[0, 0])
    assert module(rows[:0]).shape == (0, 4, 96) and module(rows[:0]).dtype is torch.float32
    for wrong in (torch.tensor([3, 50]), torch.tensor([-1])):
        with pytest.raises(IndexError, match=rf"1 of {len(wrong)} indices are .* 50 rows, the first is {wrong[-1]}"):
            module(wrong)
    for wrong in (rows.float(), rows.bool(), rows.to(torch.complex64)):
        with pytest.raises(TypeError, match="indices are (float32|bool|complex64), expected a tensor of integers"):
            module(wrong)
    if torch.cuda.is_available():
        with pytest.raises(ValueError, match="indices are on cuda:0, the matrix on cpu"):
            module(rows.cuda())


def test_what_is_no_matrix_is_refused():
    packed, state = quantize_4bit(matrix((8, 64)))
    with pytest.raises(ValueError, match="256 elements|needs 256"):
        embedding_4bit(tokens(8), packed[:-1], state)
    with pytest.raises(ValueError, match=r"\[2, 4, 64\].* is no matrix"):
        embedding_4bit(tokens(8), *quantize_4bit(matrix((2, 4, 64))))


# ---- layers ----


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cls", CLASSES)
def test_forward(cls, dtype, device):
    """Rows of the quantized weight in the dtype of construction, also after a dtype move; close to the float ones."""
    module, rows = made(cls, dtype=dtype, device=device), tokens(50, device)
    y = module(rows)
    assert y.dtype is dtype is module.dtype and same_bytes(y, module.dequantize()[rows])
    dense = matrix((50, 96), dtype, device)[rows].float()
    step = 1 / 127 if cls is bnb.nn.Embedding8bit else 1 / 3  # half the widest gap of the format is less
    assert ((y.float() - dense).abs() <= dense.abs().amax() * step * 1.01).all()
    assert module.half()(rows).dtype is dtype and same_bytes(module(rows), y)
    assert same_bytes(module.to(torch.bfloat16).to(device)(rows), y)


@pytest.mark.parametrize(
    ("cls", "dynamic"), [(CLASSES[0], False), (CLASSES[0], True), (CLASSES[2], True)], ids=["4bit", "dynamic", "8bit"]
)
def test_compiled(cls, dynamic):
    module, rows = made(cls), tokens(50)
    module(rows)
    compiled = torch.compile(module, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert torch.equal(compiled(rows), module(rows)) and torch.equal(compiled(rows[:2]), module(rows[:2]))
    with pytest.raises((RuntimeError, IndexError), match="out of range"):
        compiled(rows + 50)


@pytest.mark.parametrize("cls", (CLASSES[0], CLASSES[2]))
def test_exported(cls):
    """Embedding and tied head, after a forward."""
    embedding, rows = made(cls), tokens(50)
    module = nn.Sequential(embedding, tied.TiedHead(embedding))
    y = module(rows)
    exported = torch.export.export(module, (rows,)).module()
    assert torch.equal(exported(rows), y) and torch.equal(exported(rows.flip(0)), module(rows.flip(0)))


@pytest.mark.parametrize("cls", CLASSES)
def test_copies(cls):
    module, rows = made(cls), tokens(50)
    y = module(rows)
    for other in (copy.deepcopy(module), saved(module)):
        assert torch.equal(other(rows), y) and other.weight is not module.weight
        assert getattr(other.weight, "module", other) is other
    assert torch.equal(made(cls).requires_grad_(False)(rows), y)


@pytest.mark.parametrize("cls", CLASSES)
def test_state_dicts(cls):
    """The keys of a linear layer, which load into an embedding in floats, a quantized one, and one on meta."""
    module, rows = made(cls), tokens(50)
    y, saved = module(rows), module.state_dict()
    format = {bnb.nn.EmbeddingNF4: "nf4", bnb.nn.EmbeddingFP4: "fp4"}.get(cls)
    packed = {"weight.absmax", "weight.quant_map", f"weight.quant_state.bitsandbytes__{format}"}
    assert set(saved) == {"weight", *(packed if format else {"SCB", "weight_format"})}
    with torch.device("meta"):
        on_meta = cls(50, 96)
    assert set(on_meta.state_dict()) == {"weight"}
    other = made(cls).to("cpu")
    other.weight.data.zero_() if format is None else None
    for target, assign in ((cls(50, 96), False), (cls(50, 96), True), (other, False), (on_meta, True)):
        assert not any(target.load_state_dict(saved, assign=assign))
        assert torch.equal(target(rows), y)
    with pytest.raises(RuntimeError, match="dense weight|needs int8"):
        module.load_state_dict({"weight": matrix((50, 96))})
    with pytest.raises(RuntimeError, match="Missing key|without their codes"):
        cls(50, 96).load_state_dict({key: value for key, value in saved.items() if key == "SCB" or "." in key})
    with pytest.raises(RuntimeError, match=r"\[50, 96\]"):
        cls(49, 96).load_state_dict(saved)
    assert torch.equal(module(rows), y)


@pytest.mark.parametrize("cls", CLASSES)
def test_not_quantized(cls):
    """As upstream, which saves no quantized embedding; here floats are not saved as one."""
    module = cls(50, 96)
    with pytest.raises(NotImplementedError, match=r"weight: this \w+ of \[50, 96\] is not quantized yet"):
        module.state_dict()
    with pytest.raises(RuntimeError, match="not quantized"):
        module(tokens(50))
    module.reset_parameters()
    before = module.to("cpu")(tokens(50))
    module.reset_parameters()
    assert torch.equal(module(tokens(50)), before)


def test_a_row_that_is_no_whole_number_of_blocks_is_told(caplog):
    bnb.nn.EmbeddingNF4(4, 64)
    assert not caplog.messages
    bnb.nn.EmbeddingNF4(4, 65)
    assert "65 elements are no whole number of blocks of 64: slow inference" in caplog.text


# ---- dense ones ----


@pytest.mark.parametrize("cls", [bnb.nn.Embedding, bnb.nn.StableEmbedding])
def test_dense_embeddings_keep_32_bits(cls):
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    module, plain = cls(100, 64, padding_idx=3), nn.Embedding(100, 64)
    optimizer = bnb.optim.Adam8bit([module.weight, plain.weight])
    rows = tokens(100)
    (module(rows).square().sum() + plain(rows).sum()).backward()
    assert module.weight.grad is not None and not module.weight[3].any() and not module.weight.grad[3].any()
    optimizer.step()
    assert optimizer.state[module.weight]["state1"].dtype is torch.float32
    assert optimizer.state[plain.weight]["state1"].dtype is torch.uint8
    manager.initialize()


def test_values_of_dense_embeddings():
    weight, rows = matrix((20, 8)), tokens(20)
    assert torch.equal(bnb.nn.Embedding(20, 8, _weight=weight)(rows), functional.embedding(rows, weight))
    bound = (6 / (100 + 64)) ** 0.5
    assert bound * 0.9 < bnb.nn.Embedding(100, 64).weight.abs().max() <= bound
    module = bnb.nn.StableEmbedding(20, 8, _weight=weight.half())
    expected = functional.layer_norm(functional.embedding(rows, weight.half()).float(), (8,))
    assert torch.equal(module(rows), expected.half())
    assert bnb.nn.StableEmbedding(20, 8, dtype=torch.bfloat16)(rows).dtype is torch.bfloat16


def test_the_originals_embeddings(tmp_path):
    """Its values for the same weights, and its pickles, read here."""
    upstream.folder_or_skip()
    upstream.run(upstream.SCRIPTS / "upstream_embeddings.py", str(tmp_path))
    found = json.loads((tmp_path / "cases.json").read_text())
    assert len(found) == 8
    for name, (cls, n, k) in found.items():
        rows, weight, y = torch.load(tmp_path / f"{name}.pt")
        module = getattr(bnb.nn, cls)(n, k)
        module.load_state_dict({"weight": weight}, strict=False)
        module.to("cpu")
        mine = module(rows)
        if cls == "Embedding8bit":  # its CPU rounds scales to float16 first
            assert (mine - y).abs().max() <= 1.01 / 127 * weight.abs().max()
        else:
            assert torch.equal(mine, y), name
        pickled = torch.load(tmp_path / f"{name}.module.pt", weights_only=False)
        assert type(pickled) is getattr(bnb.nn, cls) and (pickled(rows) - y).abs().max() <= 1e-6


# ---- heads that are tied ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model that ties its head to its embedding."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from helpers import tiny

    path = tmp_path_factory.mktemp("tied")
    sizes = {"vocab_size": 90, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    tiny.llama(path, torch.bfloat16, **sizes, num_attention_heads=2, tie_word_embeddings=True)
    return path


def load(folder, **settings):
    from bitshard.transformers import FourBitConfig
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.bfloat16, "device_map": {"": "cpu"}}
    if settings:
        options["quantization_config"] = FourBitConfig(bnb_4bit_quant_type="nf4", **settings)
    return AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize(("bits", "nested"), [(4, False), (4, True), (8, False)])
def test_a_tied_head(folder, tmp_path, bits, nested, monkeypatch):
    """One weight, held and saved once, that embedding and head use; gradients go through; saved, loaded, copied.

    As in a process that FSDP shards: there packed bytes are in bfloat16, NaNs among them.
    """
    from transformers import modeling_utils

    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")
    warnings = []
    monkeypatch.setattr(modeling_utils.logger, "warning", lambda text, *others: warnings.append(text))
    model = load(folder, bnb_4bit_embedding_bits=bits, bnb_4bit_use_double_quant=nested)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert type(head) is tied.TiedHead and head.weight is embedding.weight and not list(head.parameters())
    assert sum(p is embedding.weight for p in model.parameters()) == 1
    rows = tokens(90)
    y = model(input_ids=rows, labels=rows)
    exact = functional.linear(hidden(model, rows), embedding.dequantize()).float()
    assert (y.logits.float() - exact).abs().max() <= 0.02 * exact.abs().max()
    model.model.norm.weight.requires_grad_(True)
    model(input_ids=rows, labels=rows).loss.backward()
    assert model.model.norm.weight.grad.abs().sum() > 0

    model.save_pretrained(tmp_path)
    from safetensors import safe_open

    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        names = [name for name in opened.keys() if "embed" in name or "head" in name]
    assert len(names) == {(4, False): 4, (4, True): 6, (8, False): 3}[bits, nested]
    assert all(name.startswith("model.embed_tokens.") for name in names)
    again = load(tmp_path)
    again.tie_weights()
    assert not warnings
    other = copy.deepcopy(again)
    assert other.lm_head.embedding is other.model.embed_tokens is not again.model.embed_tokens
    for each in (again, other):
        assert each.lm_head.weight is each.model.embed_tokens.weight
        assert torch.equal(each(input_ids=rows).logits, y.logits)
    dense = again.dequantize()
    assert type(dense.lm_head) is nn.Linear and dense.lm_head.weight is dense.model.embed_tokens.weight
    assert (dense(input_ids=rows).logits - y.logits).abs().max() <= 0.02 * exact.abs().max()


def hidden(model, rows):
    return model.model(input_ids=rows).last_hidden_state


def test_the_block_of_the_page(folder, tmp_path):
    """docs/embeddings.md"""
    from transformers import AutoModelForCausalLM

    page = (Path(__file__).parents[2] / "docs" / "embeddings.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    names = {"torch": torch, "AutoModelForCausalLM": AutoModelForCausalLM, "name": folder, "folder": tmp_path}
    exec(compile(block, "embeddings.md", "exec"), names)
    assert type(load(tmp_path).lm_head) is type(names["model"].lm_head) is tied.TiedHead


@pytest.mark.parametrize("cls", (CLASSES[0], CLASSES[2]))
@pytest.mark.parametrize("n", [3, 40])
def test_a_tied_head_with_a_bias(cls, n):
    embedding, x = made(cls), matrix((n, 96), seed=2).requires_grad_(True)
    head = tied.TiedHead(embedding, nn.Parameter(matrix((50,), torch.float16)))
    y = head(x)
    expected = functional.linear(x, embedding.dequantize(), head.bias.float())
    assert (y - expected).abs().max() <= 0.03 * expected.abs().max() and y.dtype is torch.float32
    y.square().sum().backward()
    assert head.bias.grad.dtype is torch.float16 and x.grad.abs().sum() > 0
    assert set(head.state_dict()) == {"bias"} and "out_features=50" in repr(head)


def test_an_embedding_without_a_tied_head(folder, tmp_path):
    """A head of its own, by the config or by the files, stays as it is."""
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].flip(0).contiguous()
    save_file({**tensors, "lm_head.weight": head}, tmp_path / "model.safetensors", {"format": "pt"})
    for ties in (False, True):
        (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": ties}))
        model = load(tmp_path, bnb_4bit_embedding_bits=4)
        assert type(model.model.embed_tokens) is bnb.nn.Embedding4bit
        assert type(model.lm_head) is nn.Linear and torch.equal(model.lm_head.weight, head)


def test_what_cannot_be_tied(folder, tmp_path, monkeypatch):
    from bitshard.transformers import FourBitConfig
    from transformers import LlamaForCausalLM

    with pytest.raises(ValueError, match="bnb_4bit_embedding_bits is 3, expected 4, 8 or None"):
        FourBitConfig(bnb_4bit_embedding_bits=3)
    model = load(folder, bnb_4bit_embedding_bits=8)
    with pytest.raises(ValueError, match="Resize the model in 16 bits"):
        model.resize_token_embeddings(100)
    with pytest.raises(ValueError, match=r"weight of its embedding \[90, 128\]"):
        model.lm_head.weight = nn.Parameter(torch.zeros(90, 128))

    class Scaled(nn.Embedding):
        """As Gemma's, whose forward does more."""

    build = LlamaForCausalLM.__init__

    def scaled(self, config):
        build(self, config)
        self.model.embed_tokens = Scaled(90, 128)

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "__init__", scaled)
        with pytest.raises(ValueError, match="model.embed_tokens: embeddings of Scaled cannot be quantized"):
            load(folder, bnb_4bit_embedding_bits=4)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors["model.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="model.embed_tokens.weight: the files have brought no"):
        load(tmp_path, bnb_4bit_embedding_bits=8)
