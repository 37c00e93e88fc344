"""The functions' own behaviour: arguments as bitsandbytes takes them, and clear errors with the numbers in them."""

import copy
import json
import pickle

import cases
import pytest
import torch
from bitshard import functional, matmul_4bit, ops
from bitshard.formats import maps
from bitshard.nn.linear import LinearNF4
from bitshard.state import QuantState, pack_dict_to_tensor, unpack_tensor_to_dict
from helpers.bytes import as_bytes
from helpers.copies import pickled


def weight(N=96, K=130, dtype=torch.float32, seed=0):
    return torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- quantize and dequantize ----


@pytest.mark.parametrize("quant_type", cases.FORMATS)
@pytest.mark.parametrize("storage", cases.STORAGES)
@pytest.mark.parametrize("nested", [False, True])
def test_round_trip(quant_type, storage, nested):
    """The mean error is that of the format, whatever holds the bytes; the bytes are the same in every storage dtype."""
    w = weight(dtype=torch.bfloat16)
    packed, state = functional.quantize_4bit(
        w, compress_statistics=nested, quant_type=quant_type, quant_storage=storage
    )
    assert packed.dtype is storage and state.shape == w.shape and state.dtype is w.dtype and state.nested is nested
    values = functional.dequantize_4bit(packed, state)
    assert values.dtype is w.dtype and values.shape == w.shape
    assert (values.float() - w.float()).abs().mean() < {"nf4": 0.08, "fp4": 0.11}[quant_type]
    plain, _ = functional.quantize_4bit(w, compress_statistics=nested, quant_type=quant_type)
    assert torch.equal(as_bytes(packed)[: plain.numel()], as_bytes(plain))


def test_outputs_given():
    w = weight()
    packed, state = functional.quantize_nf4(w)
    out, absmax = torch.empty_like(packed), torch.empty_like(state.absmax)
    again, again_state = functional.quantize_nf4(w, absmax=absmax, out=out)
    assert (
        again is out and again_state.absmax is absmax and torch.equal(out, packed) and torch.equal(absmax, state.absmax)
    )
    values = torch.empty_like(w)
    assert functional.dequantize_nf4(packed, state, out=values) is values
    assert torch.equal(functional.dequantize_nf4(packed, absmax=absmax, out=torch.empty_like(w)), values)
    code, state8 = functional.quantize_blockwise(w, out=torch.empty(w.shape, dtype=torch.uint8))
    assert torch.equal(
        functional.dequantize_blockwise(code, absmax=state8.absmax), functional.dequantize_blockwise(code, state8)
    )


@pytest.mark.parametrize(
    ("call", "good"),
    [
        (lambda w, out: functional.quantize_nf4(w, out=out, quant_storage=torch.bfloat16), (3072, torch.bfloat16)),
        (lambda w, out: functional.quantize_nf4(w, absmax=out), (195, torch.float32)),
        (lambda w, out: functional.dequantize_nf4(*functional.quantize_nf4(w), out=out), (12480, torch.float32)),
        (lambda w, out: functional.quantize_blockwise(w, out=out), (12480, torch.uint8)),
        (lambda w, out: functional.quantize_blockwise(w, absmax=out), (4, torch.float32)),
        (
            lambda w, out: functional.dequantize_blockwise(*functional.quantize_blockwise(w), out=out),
            (1, torch.float32),
        ),
        (lambda w, out: gemv(w, out), (96, torch.float32)),
        (lambda w, out: matmul(w, out), (96, torch.float32)),
    ],
)
def test_outputs_that_do_not_fit(call, good):
    """Packed bytes cast into another dtype, or scales broadcast over more places, would be damage without a word."""
    numel, dtype = good
    other = torch.float16 if dtype is not torch.float16 else torch.float32
    with pytest.raises(TypeError, match="is float16, expected"):
        call(weight(), torch.empty(numel, 1, dtype=other))
    with pytest.raises(ValueError, match="shape"):
        call(weight(), torch.empty(numel + 1, 7, dtype=dtype))


def test_scales_on_the_meta_device_raise():
    """As FSDP2 leaves them between gathers: a result would be uninitialized memory."""
    for nested in (False, True):
        packed, state = functional.quantize_nf4(weight(), compress_statistics=nested)
        state.absmax = state.absmax.to("meta")
        for call in (
            lambda p=packed, s=state: functional.dequantize_4bit(p, s),
            lambda p=packed, s=state: functional.linear_4bit(torch.randn(2, 130), p, s),
            lambda p=packed, s=state: matmul_4bit(torch.randn(99, 130), p, s),
        ):
            with pytest.raises(ValueError, match="on cpu, its scales are on meta"):
                call()
    code, state = functional.quantize_blockwise(weight())
    with pytest.raises(RuntimeError, match="tensors on cpu and meta"):
        functional.dequantize_blockwise(code, absmax=state.absmax.to("meta"))


def gemv(w, out):
    packed, state = functional.quantize_nf4(w)
    return functional.gemv_4bit(torch.randn(1, 130), packed, out=out, state=state)


def matmul(w, out):
    packed, state = functional.quantize_nf4(w)
    return matmul_4bit(torch.randn(1, 130, requires_grad=True), packed, state, out=out)


def test_row_vector_gives_the_transpose():
    packed, state = functional.quantize_fp4(weight())
    assert torch.equal(functional.dequantize_fp4(packed.t(), state), functional.dequantize_fp4(packed, state).t())


@pytest.mark.parametrize("shape", [(7,), (), (2, 3, 33), (1, 1)])
def test_any_shape(shape):
    w = torch.randn(shape)
    packed, state = functional.quantize_nf4(w)
    assert functional.dequantize_4bit(packed, state).shape == w.shape


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("blocksize", [64, 256, 4096, 16384])
def test_blockwise_round_trip(nested, blocksize):
    x = weight(300, 200, torch.bfloat16)
    code, state = functional.quantize_blockwise(x, blocksize=blocksize, nested=nested)
    values = functional.dequantize_blockwise(code, state)
    assert code.shape == x.shape and values.dtype is x.dtype
    assert (values.float() - x.float()).abs().mean() < 0.02
    again = QuantState.from_dict(state.as_dict(), "cpu")
    assert again == state and torch.equal(functional.dequantize_blockwise(code, again), values)


@pytest.mark.parametrize("signed", [True, False])
def test_blockwise_other_maps(signed):
    x = weight(40, 40) if signed else weight(40, 40).abs()
    for map in (
        functional.create_linear_map(signed),
        functional.create_dynamic_map(signed),
        functional.create_fp8_map(signed, 5 if signed else 5, 2 if signed else 3),
    ):
        assert map.shape == (256,) and (map.diff() >= 0).all() and map.max() == 1
        code, state = functional.quantize_blockwise(x, code=map, blocksize=64)
        assert (functional.dequantize_blockwise(code, state) - x).abs().mean() < 0.05


def test_maps():
    nf4 = functional.get_4bit_type("nf4", device="cpu")
    made = functional.create_normal_map()
    assert torch.allclose(made.unique(), nf4.unique(), atol=1e-6)
    assert functional.create_normal_map(use_extra_value=False).unique().numel() == 15
    fp4 = functional.create_fp8_map(True, 2, 1, 4)
    normal = functional.get_4bit_type("fp4", device="cpu").unique()
    normal = normal[normal.abs() > 0.1]  # the format's smallest value is its own
    assert torch.allclose(fp4[fp4.abs() > 0.1], normal, atol=1e-6)
    functional.get_4bit_type("nf4", device="cpu").zero_()  # a copy: the shared table survives
    assert torch.equal(functional.get_4bit_type("nf4", device="cpu"), nf4)
    with pytest.raises(NotImplementedError, match="int3"):
        functional.get_4bit_type("int3", device="cpu")
    with pytest.raises(ValueError, match="9 bits|8"):
        functional.create_fp8_map(True, 5, 3, 8)


def test_gemv():
    w = weight(32, 64)
    packed, state = functional.quantize_nf4(w)
    x = torch.randn(1, 64)
    y = functional.gemv_4bit(x, packed, state=state)
    assert torch.allclose(y, x @ functional.dequantize_4bit(packed, state).T, atol=1e-5)
    out = torch.empty(1, 32)
    assert functional.gemv_4bit(x, packed, out=out, state=state) is out and torch.equal(out, y)


# ---- the state ----


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", cases.FORMATS)
def test_state_round_trips(nested, quant_type):
    packed, state = functional.quantize_4bit(weight(), compress_statistics=nested, quant_type=quant_type)
    state.checksum = ops.checksum(packed)
    flat = state.as_dict(packed=True)
    assert all(isinstance(value, torch.Tensor) for value in flat.values())
    assert set(flat) == {"absmax", "quant_map", f"quant_state.bitsandbytes__{quant_type}"} | (
        {"nested_absmax", "nested_quant_map"} if nested else set()
    )
    assert "checksum" not in state.as_dict()
    prefixed = {f"model.layers.0.q_proj.weight.{key}": value for key, value in flat.items()}
    before = set(prefixed)
    for given in (flat, prefixed, state.as_dict()):
        again = QuantState.from_dict(given, device="cpu")
        assert again == state and again.dtype is state.dtype and again.shape == state.shape
    assert set(prefixed) == before, "from_dict changed its argument"
    assert torch.equal(getattr(state, f"bitsandbytes__{quant_type}"), flat[f"quant_state.bitsandbytes__{quant_type}"])
    for copied in (pickled(state), copy.deepcopy(state), copy.copy(state)):
        assert copied == state and copied is not state
    assert copy.copy(state).absmax is state.absmax
    with pytest.raises(AttributeError, match="nonsense"):
        state.nonsense  # noqa: B018
    assert state[0] is state.absmax and state[-1] == quant_type and (state[4] is None) is not nested


def test_state_moves():
    packed, state = functional.quantize_nf4(weight(), compress_statistics=True)
    absmax = state.absmax
    assert state.to("meta") is state and state.absmax is absmax, "the meta device must not destroy statistics"
    assert state.moved(torch.device("cpu")) is state and state.moved(torch.device("meta")) is state


@pytest.mark.parametrize("quant_type", cases.FORMATS)
def test_code_is_an_ordinary_attribute(quant_type, tmp_path):
    """`code` is copied from a shared table when first read; nobody who reads, writes or moves it can tell."""
    packed, state = functional.quantize_4bit(weight(), compress_statistics=True, quant_type=quant_type)
    _, other = functional.quantize_4bit(weight(), compress_statistics=True, quant_type=quant_type)
    values = functional.dequantize_4bit(packed, state)
    tables = (functional.get_4bit_type(quant_type, "cpu"), functional.create_dynamic_map())
    copies = [
        copy.deepcopy(state),
        copy.copy(state),
        state.clone().to("cpu"),
        pickled(state),
        QuantState.from_dict(state.clone().as_dict(packed=True), "cpu"),
    ]
    torch.save(state, tmp_path / "state.pt")
    copies.append(torch.load(tmp_path / "state.pt", weights_only=True))  # bitshard has registered the class
    for one in (state, *copies):
        for holder, table in zip((one, one.state2), tables, strict=True):
            assert holder.code is holder.code and torch.equal(holder.code, table) and not holder.code.is_inference()
    assert state.code.data_ptr() != other.code.data_ptr() and copies[1].code is state.code, "a shallow copy shares"
    # what is written to one state's code counts for it, and for it alone
    state.state2.code.mul_(2)
    copies[0].state2.code = copies[0].state2.code * 2
    assert not torch.equal(functional.dequantize_4bit(packed, state), values)
    assert torch.equal(functional.dequantize_4bit(packed, state), functional.dequantize_4bit(packed, copies[0]))
    for one in (other, *copies[3:]):
        assert torch.equal(functional.dequantize_4bit(packed, one), values)
    state.code = None
    assert state.code is None and torch.equal(maps.table(quant_type, torch.device("cpu")), tables[0])


def test_code_read_in_inference_mode():
    _, state = functional.quantize_4bit(weight(), compress_statistics=True)
    with torch.inference_mode():
        assert not state.code.is_inference() and not state.state2.code.is_inference()
    entries = state.as_dict(packed=True)
    assert len({tensor.untyped_storage().data_ptr() for tensor in entries.values()}) == len(entries)


def test_pickled_by_bitsandbytes():
    """Its QuantState has no methods for pickling: the attributes are the state."""
    packed, state = functional.quantize_4bit(weight(), compress_statistics=True)
    again = QuantState.__new__(QuantState)
    again.__setstate__({"code": state.code, "absmax": state.absmax, "shape": state.shape, "quant_type": "fp4"})
    assert torch.equal(again.code, state.code) and again.shape == state.shape


def test_sharded_state_is_not_copied_as_if_whole():
    _, state = functional.quantize_nf4(weight())
    state.sharded = object()
    for use in (lambda: state.as_dict(), lambda: pickle.dumps(state), lambda: copy.deepcopy(state)):
        with pytest.raises(ValueError, match="full_state_dict"):
            use()
    assert unpack_tensor_to_dict(state.bitsandbytes__nf4)["quant_type"] == "nf4"
    assert copy.copy(state).sharded is state.sharded


def test_blob():
    values = {"a": [1, 2.5], "b": None}
    assert unpack_tensor_to_dict(pack_dict_to_tensor(values)) == values
    assert pack_dict_to_tensor(values).dtype is torch.uint8


def test_contexts_leave_nothing_behind():
    """Tables made under a fake mode, inference mode or a default device stay usable outside."""
    w = weight()
    maps._tables.clear()
    ops._empty.clear()
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        functional.quantize_nf4(w, compress_statistics=True)
        ops.empty(torch.device("cpu"))
    with torch.inference_mode():
        functional.quantize_nf4(w, compress_statistics=True)
        ops.empty(torch.device("cpu"))
    assert all(type(t) is torch.Tensor and not t.is_inference() for t in (*maps._tables.values(), *ops._empty.values()))
    with torch.device("meta"):
        packed, state = functional.quantize_nf4(w, compress_statistics=True)
        assert QuantState.from_dict(state.as_dict(packed=True), "cpu") == state
    assert not functional.dequantize_4bit(packed, state).is_meta


# ---- errors ----


def entries(**changes):
    """Packed entries of a small nested state, with some of the JSON values changed (None: removed)."""
    _, state = functional.quantize_nf4(weight(), compress_statistics=True)
    flat = state.as_dict(packed=True)
    values = unpack_tensor_to_dict(flat["quant_state.bitsandbytes__nf4"])
    values.update(changes)
    values = {key: value for key, value in values.items() if value != "REMOVE"}
    flat["quant_state.bitsandbytes__nf4"] = pack_dict_to_tensor(values)
    return flat


def blob(text: str) -> dict:
    flat = entries()
    flat["quant_state.bitsandbytes__nf4"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    return flat


def changed(key, value):
    flat = entries()
    if value is None:
        del flat[key]
    else:
        flat[key] = value
    return flat


def plain_scales(place, value):
    """Entries of plain scales, one of them changed."""
    flat = functional.quantize_nf4(weight())[1].as_dict(packed=True)
    flat["absmax"][place] = value
    return flat


nf4_map = ops.table("nf4")
BAD_ENTRIES = {
    "no blob": (changed("quant_state.bitsandbytes__nf4", None), ValueError, "neither quant_type"),
    "two blobs": (
        entries() | {"quant_state.bitsandbytes__fp4": entries()["quant_state.bitsandbytes__nf4"]},
        ValueError,
        "expected one",
    ),
    "wrong blob name": (
        {"quant_state.bitsandbytes__int3": entries()["quant_state.bitsandbytes__nf4"]},
        ValueError,
        "int3",
    ),
    "blob contradicts its name": (entries(quant_type="fp4"), ValueError, "contradicts"),
    "blob is text": (blob("hello"), ValueError, "no JSON"),
    "blob is a list": (blob("[1, 2]"), ValueError, "list"),
    "blob is deep": (blob("[" * 60000), ValueError, "no JSON"),
    "blob is huge": (blob('"' + "a" * 70000 + '"'), ValueError, "70002 bytes"),
    "blob is empty": (blob(""), ValueError, "0 bytes"),
    "blob is no utf-8": (
        changed("quant_state.bitsandbytes__nf4", torch.full((9,), 255, dtype=torch.uint8)),
        ValueError,
        "9 bytes",
    ),
    "blob is float": (changed("quant_state.bitsandbytes__nf4", torch.zeros(9)), TypeError, "float32"),
    "blob is on meta": (
        changed("quant_state.bitsandbytes__nf4", torch.zeros(9, dtype=torch.uint8, device="meta")),
        TypeError,
        "meta",
    ),
    "blob has a long integer": (blob('{"blocksize": ' + "9" * 5000 + "}"), ValueError, "no JSON"),
    "blob repeats a key": (blob('{"blocksize": 64, "blocksize": 32}'), ValueError, "twice"),
    "unknown key": (entries(surprise=1), ValueError, "surprise"),
    "unknown entry": (changed("surprise", torch.zeros(1)), ValueError, "surprise"),
    "entry in both": (changed("blocksize", 64), ValueError, "both"),
    "tensor in the blob": (entries(absmax=[1.0]), ValueError, "absmax"),
    "no absmax": (changed("absmax", None), ValueError, "absmax is missing"),
    "no quant_map": (changed("quant_map", None), ValueError, "quant_map is missing"),
    "no nested_absmax": (changed("nested_absmax", None), ValueError, "nested_absmax"),
    "no nested_blocksize": (entries(nested_blocksize="REMOVE"), ValueError, "nested_blocksize"),
    "no shape": (entries(shape="REMOVE"), ValueError, "shape is missing"),
    "no dtype": (entries(dtype="REMOVE"), ValueError, "dtype is missing"),
    "absmax is float": (changed("absmax", torch.zeros(195)), TypeError, "float32"),
    "absmax is short": (
        changed("absmax", torch.zeros(194, dtype=torch.uint8)),
        ValueError,
        "194 entries, expected 195",
    ),
    "absmax is no tensor": (changed("absmax", [1, 2]), TypeError, "list"),
    "absmax is on meta": (changed("absmax", torch.zeros(195, dtype=torch.uint8, device="meta")), ValueError, "meta"),
    "absmax is sparse": (changed("absmax", torch.zeros(195, dtype=torch.uint8).to_sparse()), TypeError, "sparse"),
    "nested_absmax is long": (changed("nested_absmax", torch.zeros(2)), ValueError, "2 entries, expected 1"),
    "nested_absmax is negative": (
        changed("nested_absmax", torch.full((1,), -0.5)),
        ValueError,
        "1 of the 1 scales in nested_absmax .*below zero, the first at 0: -0.5",
    ),
    "nested_absmax has a NaN": (changed("nested_absmax", torch.full((1,), float("nan"))), ValueError, "at 0: nan"),
    "nested_absmax is infinite": (changed("nested_absmax", torch.full((1,), float("inf"))), ValueError, "at 0: inf"),
    "plain absmax has a NaN": (plain_scales(194, float("nan")), ValueError, "1 of the 195 .*absmax .*at 194: nan"),
    "plain absmax is infinite": (plain_scales(3, -float("inf")), ValueError, "1 of the 195 .* at 3: -inf"),
    "8-bit absmax has a NaN": (
        {
            **functional.quantize_blockwise(torch.ones(9))[1].as_dict(),
            "absmax": torch.tensor([float("nan")]),
        },
        ValueError,
        "1 of the 1 scales in absmax",
    ),
    "nested map is short": (changed("nested_quant_map", torch.zeros(255)), ValueError, "255"),
    "nested map has a NaN": (changed("nested_quant_map", torch.full((256,), float("nan"))), ValueError, "finite"),
    "quant_map of another format": (changed("quant_map", ops.table("fp4")), ValueError, "16 of 16|values differ"),
    "quant_map has a NaN": (changed("quant_map", nf4_map.clone().fill_(float("nan"))), ValueError, "values differ"),
    "quant_map is off": (changed("quant_map", nf4_map + 1e-3), ValueError, "values differ"),
    "quant_map is integer": (changed("quant_map", torch.zeros(16, dtype=torch.long)), TypeError, "int64"),
    "quant_map is long": (changed("quant_map", torch.zeros(256)), ValueError, "256"),
    "nested blocksize 128": (entries(nested_blocksize=128), ValueError, "128"),
    "nested offset NaN": (entries(nested_offset=float("nan")), ValueError, "nan"),
    "nested offset huge": (entries(nested_offset=10**400), ValueError, "finite"),
    "nested offset text": (entries(nested_offset="0.1"), TypeError, "number"),
    "nested dtype": (entries(nested_dtype="load"), ValueError, "load"),
    "blocksize 65": (entries(blocksize=65), ValueError, "65"),
    "blocksize 0": (entries(blocksize=0), ValueError, "0"),
    "blocksize -64": (entries(blocksize=-64), ValueError, "-64"),
    "blocksize huge": (entries(blocksize=2**63), ValueError, "9223372036854775808"),
    "blocksize true": (entries(blocksize=True), TypeError, "bool"),
    "blocksize 64.0": (entries(blocksize=64.0), TypeError, "float"),
    "dtype unknown": (entries(dtype="float64"), ValueError, "float64"),
    "dtype attribute": (entries(dtype="load"), ValueError, "load"),
    "dtype list": (entries(dtype=["float32"]), TypeError, "list"),
    "shape text": (entries(shape="96"), TypeError, "str"),
    "shape number": (entries(shape=96), TypeError, "int"),
    "shape null": (entries(shape=None), TypeError, "None"),
    "shape negative": (entries(shape=[-96, -130]), ValueError, "-96"),
    "shape huge": (entries(shape=[2**63, 1]), ValueError, "9223372036854775808"),
    "shape product": (entries(shape=[2**40, 2**40]), ValueError, "elements"),
    "shape does not fit": (entries(shape=[96, 1300]), ValueError, "195 entries, expected 1950"),
    "shape of floats": (entries(shape=[96.0, 130]), TypeError, "float"),
    "shape of many": (entries(shape=[1] * 50), ValueError, "50 dimensions"),
    "quant_type number": (entries(quant_type=4), ValueError, "contradicts"),
    "no dict": ([1, 2], TypeError, "list"),
    "key is no string": ({1: torch.zeros(1)}, TypeError, "1"),
}


@pytest.mark.parametrize("name", BAD_ENTRIES)
def test_bad_state(name):
    given, error, words = BAD_ENTRIES[name]
    with pytest.raises(error, match=words) as raised:
        QuantState.from_dict(given, device="cpu")
    assert len(str(raised.value)) < 600


def test_good_state_with_unusual_but_right_values():
    """Plain scales may have either sign: a block of NaN gets a negative one, and values are products with it."""
    assert QuantState.from_dict(plain_scales(3, -1.5), "cpu").absmax[3] == -1.5
    nan, state = functional.quantize_nf4(torch.full((128,), torch.nan))
    assert torch.equal(QuantState.from_dict(state.as_dict(packed=True), "cpu").absmax, state.absmax)
    assert QuantState.from_dict(changed("quant_map", nf4_map.bfloat16()), "cpu").code.dtype is torch.float32
    assert QuantState.from_dict(changed("absmax", entries()["absmax"].view(-1, 1)), "cpu").absmax.shape == (195,)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"blocksize": 48}, ValueError, "48"),
        ({"quant_type": "int4"}, ValueError, "int4"),
        ({"quant_storage": torch.int32}, TypeError, "int32"),
        ({"A": torch.zeros(4, dtype=torch.float64)}, ValueError, "float64"),
        ({"A": [1.0]}, TypeError, "list"),
    ],
)
def test_bad_quantize(arguments, error, words):
    with pytest.raises(error, match=words):
        functional.quantize_4bit(**({"A": torch.zeros(4)} | arguments))


def test_bad_dequantize():
    packed, state = functional.quantize_nf4(weight())
    with pytest.raises(ValueError, match="6239 elements.*needs 6240"):
        functional.dequantize_4bit(packed[:-1], state)
    with pytest.raises(ValueError, match="6240 elements of bfloat16.*needs 3120"):
        functional.dequantize_4bit(packed.bfloat16(), state)
    with pytest.raises(TypeError, match="int64"):
        functional.dequantize_4bit(packed.long(), state)
    with pytest.raises(ValueError, match="absmax and out"):
        functional.dequantize_4bit(packed, absmax=state.absmax)
    short = copy.copy(state)
    short.absmax = state.absmax[:-1]
    with pytest.raises(ValueError, match="194 scales.*needs 195"):
        functional.dequantize_4bit(packed, short)
    half = copy.copy(state)
    half.absmax = state.absmax.half()
    with pytest.raises(TypeError, match="float16"):
        functional.dequantize_4bit(packed, half)
    other = copy.copy(state)
    other.dtype = torch.float64
    with pytest.raises(ValueError, match="float64"):
        functional.dequantize_4bit(packed, other)
    other = copy.copy(state)
    other.quant_type = None
    with pytest.raises(ValueError, match="None"):
        functional.dequantize_4bit(packed, other)
    nested = functional.quantize_nf4(weight(), compress_statistics=True)[1]
    nested.state2.absmax = nested.state2.absmax.repeat(2)
    nested.state2.blocksize = 128
    with pytest.raises(ValueError, match="128"):
        functional.dequantize_4bit(packed, nested)


def test_bad_linear():
    packed, state = functional.quantize_nf4(weight())
    x = torch.zeros(2, 130)
    with pytest.raises(ValueError, match=r"\[2, 131\] does not fit.*\[96, 130\]"):
        functional.linear_4bit(torch.zeros(2, 131), packed, state)
    with pytest.raises(TypeError, match="float64"):
        functional.linear_4bit(x.double(), packed, state)
    with pytest.raises(ValueError, match="95 elements"):
        functional.linear_4bit(x, packed, state, torch.zeros(95))
    with pytest.raises(TypeError, match="bfloat16"):
        functional.linear_4bit(x, packed, state, torch.zeros(96, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="state cannot be None"):
        functional.gemv_4bit(x, packed)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged, torch.sparse_coo, torch.sparse_csr])
def test_what_is_not_dense_raises(layout):
    """Nested and sparse x: a TypeError that says what to give, and not torch's internal one."""
    packed, state = functional.quantize_nf4(weight())
    if layout in (torch.strided, torch.jagged):
        x, words = torch.nested.nested_tensor([torch.ones(2, 130), torch.ones(3, 130)], layout=layout), "nested tensor"
    else:
        x, words = torch.ones(2, 130).to_sparse(layout=layout), r"layout torch.sparse.*to_dense\(\)"
    calls = (
        lambda: functional.linear_4bit(x, packed, state),
        lambda: functional.gemv_4bit(x, packed, state=state),
        lambda: matmul_4bit(x, packed, state),
        lambda: matmul_4bit(x, packed, state, bias=torch.zeros(96, requires_grad=True)),
        lambda: LinearNF4(130, 96).to("cpu")(x),
        lambda: functional.quantize_4bit(x),
        lambda: functional.quantize_blockwise(x),
    )
    for call in calls:
        with pytest.raises(TypeError, match=words):
            call()


def test_bad_blockwise():
    x = torch.zeros(8)
    for blocksize, words in ((0, "positive"), (-1, "positive"), (100, "100")):
        with pytest.raises(ValueError, match=words):
            functional.quantize_blockwise(x, blocksize=blocksize)
    with pytest.raises(ValueError, match="256 values, got 16"):
        functional.quantize_blockwise(x, code=torch.zeros(16))
    with pytest.raises(ValueError, match="float64"):
        functional.quantize_blockwise(x.double())
    code, state = functional.quantize_blockwise(x)
    with pytest.raises(ValueError, match="int8"):
        functional.dequantize_blockwise(code.to(torch.int8), state)
    with pytest.raises(ValueError, match="quant_state or absmax"):
        functional.dequantize_blockwise(code)
    with pytest.raises(ValueError, match="1 scales, 8000 codes"):
        functional.dequantize_blockwise(code.repeat(1000), state)


def test_json_is_upstreams():
    """The JSON text of a nested NF4 state has bitsandbytes' keys and kinds of values."""
    _, state = functional.quantize_nf4(weight(dtype=torch.bfloat16), compress_statistics=True)
    values = json.loads(bytes(state.bitsandbytes__nf4.tolist()))
    offset = values.pop("nested_offset")
    assert isinstance(offset, float)
    assert values == {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "bfloat16",
        "shape": [96, 130],
        "nested_blocksize": 256,
        "nested_dtype": "float32",
    }
