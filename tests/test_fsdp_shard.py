"""PackedShard in one process: what its hooks hand over and take back, for many sizes, and what it refuses."""

import copy
import inspect
import pickle

import bitshard.tensor
import pytest
import torch
from bitshard import _C, agreement
from bitshard.nn.linear import Linear4bit
from bitshard.shard import PackedShard
from bitshard.sharding.weights.record import record_of, start_over
from bitshard.tensor import Params4bit
from helpers.bytes import same_bytes

STORAGES = (torch.uint8, torch.int8, torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture(autouse=True)
def integers(monkeypatch):
    """These tests do by themselves what FSDP2 does, with integers too, which FSDP2 of older torch refuses.

    In one process there is nobody to compare weights with (tests/fsdp/checks/agreement.py does it).
    """
    monkeypatch.setattr(bitshard.tensor, "_FSDP2_TAKES_INTEGERS", True)
    monkeypatch.setattr(agreement, "agree", lambda origin, mesh: None)


class Mesh:
    """As much of a DeviceMesh as the hooks ask."""

    def __init__(self, world, rank):
        self.world, self.rank = world, rank

    def size(self):
        return self.world

    def get_local_rank(self):
        return self.rank


def quantized(n, k, storage, nested=True):
    torch.manual_seed(0)
    layer = Linear4bit(k, n, bias=False, quant_type="nf4", quant_storage=storage, compress_statistics=nested)
    return layer.to("cpu")


def shards(layers, world):
    """The shard of each rank (one layer each), made as FSDP2 makes it: new_zeros of the padded size, copy, narrow."""
    made = []
    for rank, layer in enumerate(layers):
        weight = layer.weight
        begin, length = _C.rank_slice(weight.size(0), world, rank)
        padded = weight.new_zeros(-(-weight.size(0) // world), 1)
        assert type(padded) is PackedShard
        padded.narrow(0, 0, length).copy_(weight.data.as_subclass(torch.Tensor)[begin : begin + length])
        made.append(padded.narrow(0, 0, length))
    return made


def gather(made, world):
    """What every rank gets: the inputs of all ranks, side by side, and the metadata of rank 0."""
    inputs = [shard.fsdp_pre_all_gather(Mesh(world, rank)) for rank, shard in enumerate(made)]
    parts = [part for part, _ in inputs]
    assert all(data.dtype == torch.uint8 for part in parts for data in part)
    assert len({tuple(data.shape for data in part) for part in parts}) == 1, "unequal inputs hang a collective"
    return tuple(torch.cat(data) for data in zip(*parts, strict=True)), inputs[0][1]


@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("nested", (True, False))
@pytest.mark.parametrize("shape", ((96, 64), (35, 33), (1, 1), (1, 129), (7, 3)), ids=str)
@pytest.mark.parametrize("world", (1, 2, 3, 5))
def test_gathered_is_what_was_quantized(storage, nested, shape, world):
    reference = quantized(*shape, storage, nested)
    packed, absmax = reference.weight.data.clone().as_subclass(torch.Tensor), reference.quant_state.absmax.clone()
    made = shards([quantized(*shape, storage, nested) for _ in range(world)], world)
    outputs, metadata = gather(made, world)
    for shard in made:
        origin = shard.origin
        assert (origin.state.sharded is None) == (world == 1)
        if world > 1:
            assert origin.state.absmax.is_meta and origin.state.sharded.scales.numel() == -(-absmax.numel() // world)
        whole, inner = shard.fsdp_post_all_gather(outputs, metadata, torch.float16)
        assert type(whole) is Params4bit and whole.quant_state is origin.state
        assert same_bytes(whole, packed)
        assert same_bytes(origin.state.absmax, absmax)
        assert all(a is b for a, b in zip(inner, outputs, strict=True))
        assert shard.fsdp_post_all_gather(outputs, metadata, torch.float16, out=whole) is None


def test_torch_accepts_the_hook_with_one_argument():
    """torch tells the forms apart by the number of arguments; this one has no size check on padded ranks."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    shard = shards([quantized(8, 8, torch.bfloat16)], 1)[0]
    assert list(inspect.signature(shard.fsdp_pre_all_gather).parameters) == ["mesh"]
    source = inspect.getsource(FSDPParam.all_gather_inputs.fget)
    assert "num_fn_params not in (1, 5)" in source


def test_casts_and_arithmetic_raise():
    shard = shards([quantized(8, 64, torch.bfloat16)], 1)[0]
    for cast in (shard.float, shard.half, lambda: shard.to(torch.int16), lambda: shard.copy_(torch.zeros(128, 1))):
        with pytest.raises(TypeError, match="would cast packed 4-bit"):
            cast()
    for compute in (lambda: shard + 1, lambda: shard.mul_(2), lambda: shard.sum(), lambda: torch.relu(shard)):
        with pytest.raises(ValueError, match="can be moved, not computed with"):
            compute()


def test_casts_raise_where_torchs_names_were_made_anew():
    """The operator that comes is the one torch has kept, not what its name gives now."""
    shard = shards([quantized(8, 64, torch.bfloat16)], 1)[0]
    packet = torch.ops.aten.copy_
    before = packet.default
    del packet.default
    try:
        assert packet.default is not before
        with pytest.raises(TypeError, match="would cast packed 4-bit"):
            shard.copy_(torch.zeros(128, 1))
    finally:
        packet.default = before


def test_moves_keep_the_class_and_pickles_are_plain():
    shard = shards([quantized(8, 64, torch.bfloat16)], 1)[0]
    for moved in (
        shard.detach(),
        shard.clone(),
        shard[3:],
        shard.view(-1),
        shard.to("cpu", copy=True),
        shard.split(7)[1],
    ):
        assert type(moved) is PackedShard and moved.origin is shard.origin
    assert type(copy.deepcopy(shard)) is PackedShard
    loaded = pickle.loads(pickle.dumps(shard))
    assert type(loaded) is torch.Tensor and same_bytes(loaded, shard.plain())
    assert "of (128, 1)" in repr(shard[:3])


def test_scales_on_meta_cannot_be_cut():
    layer = quantized(8, 64, torch.bfloat16)
    layer.quant_state.absmax = layer.quant_state.absmax.to("meta")
    shard = layer.weight.new_zeros(64, 1)
    with pytest.raises(ValueError, match="meta device"):
        shard.fsdp_pre_all_gather(Mesh(2, 0))


def test_a_replicated_weight_is_refused():
    shard = shards([quantized(8, 64, torch.bfloat16)], 1)[0]
    with pytest.raises(ValueError, match="128 rows where this mesh expects 64"):
        shard.fsdp_pre_all_gather(Mesh(2, 0))


def test_ordinary_use_warns_of_nothing(caplog):
    """Only a process that accelerate told to shard, and that has others beside it, learns that uint8 stays whole."""
    layer = quantized(8, 64, torch.uint8)
    layer.to(torch.bfloat16)
    assert not layer.weight.is_floating_point() and not caplog.records


def test_views_of_a_flat_parameter_are_packed_weights():
    """FSDP1 sets plain views; peft's DoRA dequantizes nothing but a Params4bit. What does not fit stays as it is."""
    layer = quantized(8, 64, torch.bfloat16)
    x = torch.randn(2, 64)
    expected = layer(x)
    flat = layer.weight.data.as_subclass(torch.Tensor).clone()
    del layer.weight
    layer.weight = flat.view(-1, 1)
    assert type(layer.weight) is Params4bit and layer.weight.data_ptr() == flat.data_ptr()
    assert layer.weight.quant_state is layer.quant_state and "weight" not in dict(layer.named_parameters())
    assert torch.equal(layer(x), expected)
    flat.view(torch.uint8)[0] ^= 1
    layer.weight = flat.view(-1, 1)
    layer.packed_weight.checked = None
    with pytest.raises(ValueError, match="checksum"):
        layer(x)
    layer.weight = flat.float().view(-1, 1)
    with pytest.raises(ValueError, match="128, 1. of float32"):
        layer(x)


def test_a_new_weight_is_written_into_a_view_of_a_flat_parameter():
    """As peft's merging assigns it. FSDP1 sets its views again and again, so nothing else would last."""
    layer, other = quantized(8, 64, torch.bfloat16), quantized(8, 64, torch.uint8)
    values = torch.randn(8, 64)
    other.weight = Params4bit(values, quant_type="nf4", module=other).to("cpu")
    flat = layer.weight.data.as_subclass(torch.Tensor).clone()
    del layer.weight
    layer.weight = flat.view(-1, 1)
    view = layer.weight
    layer.weight = view.to("cpu")
    assert layer.weight is view and "weight" not in dict(layer.named_parameters())
    layer.weight = Params4bit(values, **{**view.__dict__, "bnb_quantized": False}).to("cpu")
    assert layer.weight is view and view.quant_state is layer.quant_state and view.bnb_quantized
    layer.weight = flat.view(-1, 1)
    x = torch.randn(2, 64)
    assert torch.equal(layer(x), other(x))
    with pytest.raises(ValueError, match="4, 64. for a layer of .8, 64"):
        layer.weight = Params4bit(values[:4], quant_type="nf4", module=layer).to("cpu")
    assert torch.equal(layer(x), other(x))


class OtherRecord:
    """FSDP2's record of a parameter in a torch that keeps other attributes, or has another constructor."""

    offload_to_cpu = pin_memory = False
    _module_info = mesh_info = post_forward_mesh_info = device = None

    class _post_load_hook_handle:
        remove = staticmethod(lambda: None)


@pytest.mark.parametrize("missing", ["attribute", "argument"])
def test_a_torch_that_keeps_parameters_otherwise_is_named(missing):
    record = OtherRecord()
    if missing == "argument":
        record.mp_policy = None
    with pytest.raises(RuntimeError, match="FSDP2 of torch .* keeps its parameters otherwise"):
        start_over(record, torch.nn.Parameter(torch.empty(2, 1)))


def test_a_parameter_that_fsdp2_does_not_have():
    assert record_of(quantized(8, 64, torch.uint8), "weight") is None
