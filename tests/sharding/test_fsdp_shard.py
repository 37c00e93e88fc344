"""PackedShard in one process: what its hooks hand over and take back, for many sizes, and what it refuses."""

import copy
import gc
import inspect
import weakref

import bitshard.tensor
import pytest
import torch
from bitshard import _C
from bitshard.nn.linear import Linear4bit
from bitshard.sharding.weights.record import record_of, start_over
from bitshard.shards import agreement
from bitshard.shards.shard import PackedShard
from bitshard.tensor import Params4bit
from helpers.bytes import as_bytes, same_bytes
from helpers.copies import pickled

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
        assert inner == ()
        assert shard.fsdp_post_all_gather(outputs, metadata, torch.float16, out=whole) is None


# ---- what is kept from one gather to the next ----


def one_of_two(storage=torch.bfloat16, shape=(96, 64)):
    """The shard of rank 0 of two, and its mesh."""
    return shards([quantized(*shape, storage) for _ in range(2)], 2)[0], Mesh(2, 0)


def made_anew(shard, mesh):
    """What is handed over where nothing is kept."""
    other = PackedShard.wrap(shard.plain(), shard.origin)
    return other.fsdp_pre_all_gather(mesh)[0]


@pytest.mark.parametrize("storage", (torch.uint8, torch.bfloat16, torch.float32), ids=str)
@pytest.mark.parametrize("world", (1, 2))
def test_every_gather_hands_over_the_same_tensors(storage, world):
    """And what is written into the shard and its scales is in them, as loading does it."""
    shard, mesh = shards([quantized(96, 64, storage) for _ in range(world)], world)[0], Mesh(world, 0)
    first = shard.fsdp_pre_all_gather(mesh)
    assert shard.fsdp_pre_all_gather(mesh) is first and len(first[0]) == world
    shard.copy_(shard.plain().flip(0).clone())
    if world > 1:
        shard.origin.state.sharded.own.add_(1)
    inputs, metadata = shard.fsdp_pre_all_gather(mesh)
    assert inputs is first[0] and metadata == first[1]
    for kept, anew in zip(inputs, made_anew(shard, mesh), strict=True):
        assert same_bytes(kept, anew)


def other_bytes(shard):
    shard.data = PackedShard.wrap(shard.plain().flip(0).clone(), shard.origin)


def other_storage(shard):
    shard.set_(shard.plain().flip(0).clone())


def other_part_of_its_storage(shard):
    longer = torch.cat([shard.plain(), shard.plain().flip(0)])
    shard.set_(longer[:768])
    shard.fsdp_pre_all_gather(Mesh(2, 0))
    shard.set_(longer[768:])


def other_scales(shard):
    sharded = shard.origin.state.sharded
    sharded.scales = sharded.scales + 1


def other_chunk(shard):
    state = shard.origin.state
    state.sharded = copy.copy(state.sharded)
    state.sharded.scales = state.sharded.scales + 1


@pytest.mark.parametrize("change", (other_bytes, other_storage, other_part_of_its_storage, other_scales, other_chunk))
def test_what_was_handed_over_ends_with_its_memory(change):
    shard, mesh = one_of_two()
    before = [data.clone() for data in shard.fsdp_pre_all_gather(mesh)[0]]
    change(shard)
    inputs = shard.fsdp_pre_all_gather(mesh)[0]
    assert [same_bytes(new, old) for new, old in zip(inputs, before, strict=True)].count(False) == 1
    for data, anew in zip(inputs, made_anew(shard, mesh), strict=True):
        assert data.data_ptr() == anew.data_ptr() and same_bytes(data, anew)


def test_freed_and_allocated_again():
    """As what offloads weights by their storages does."""
    shard, mesh = one_of_two()
    shard.fsdp_pre_all_gather(mesh)
    storage, values = shard.untyped_storage(), shard.plain().clone()
    size = storage.nbytes()
    storage.resize_(0)
    taken = torch.zeros(size, dtype=torch.uint8)  # perhaps where it was
    storage.resize_(size)
    shard.copy_(values.flip(0))
    assert same_bytes(shard.fsdp_pre_all_gather(mesh)[0][0], as_bytes(values.flip(0))) and not taken.any()


def test_another_mesh_is_asked_for_its_own():
    shard, mesh = one_of_two()
    first = shard.fsdp_pre_all_gather(mesh)
    assert shard.fsdp_pre_all_gather(Mesh(2, 0)) is not first
    with pytest.raises(ValueError, match="768 rows where this mesh expects 512"):
        shard.fsdp_pre_all_gather(Mesh(3, 0))


def test_a_state_elsewhere_is_brought_back(monkeypatch):
    """A state is moved as a whole; whoever moves it puts other tensors into it, and the next gather moves it back."""
    shard, mesh = one_of_two()
    shard.fsdp_pre_all_gather(mesh)
    state = shard.origin.state
    state.code = state.code.to("meta")
    moves = []
    monkeypatch.setattr(type(state), "to", lambda self, device: moves.append((self, device)))
    shard.fsdp_pre_all_gather(mesh)
    assert moves == [(state, shard.device)]


def test_copies_are_handed_over_once():
    """A short shard without its padding is copied for each gather: nothing would follow what is written into it."""
    shard = shards([quantized(35, 33, torch.uint8) for _ in range(3)], 3)[2]
    shard = PackedShard.wrap(shard.plain().clone(), shard.origin)
    mesh = Mesh(3, 2)
    before = shard.fsdp_pre_all_gather(mesh)[0][0]
    shard.copy_(shard.plain() ^ 0xFF)
    after = shard.fsdp_pre_all_gather(mesh)[0][0]
    rows = shard.size(0)
    assert shard.handed is None and before.numel() > rows
    assert same_bytes(after[:rows], before[:rows] ^ 0xFF)


def test_copies_of_a_shard_hand_over_their_own():
    shard, mesh = one_of_two()
    first = shard.fsdp_pre_all_gather(mesh)[0][0]
    for made in (copy.deepcopy(shard), shard.clone(), shard.to("cpu", copy=True)):
        made.copy_(made.plain().flip(0).clone())
        given = made.fsdp_pre_all_gather(mesh)[0][0]
        assert given.data_ptr() == made.data_ptr() and not same_bytes(given, first)
    assert shard.fsdp_pre_all_gather(mesh)[0][0] is first


@pytest.mark.parametrize("storage", (torch.uint8, torch.bfloat16), ids=str)
@pytest.mark.parametrize("grad", (True, False))
def test_what_is_kept_does_not_keep_the_shard(storage, grad):
    with torch.set_grad_enabled(grad):
        shard, mesh = one_of_two(storage)
        outputs = tuple(torch.cat((data, data)) for data in shard.fsdp_pre_all_gather(mesh)[0])
        shard.fsdp_post_all_gather(outputs, shard.fsdp_pre_all_gather(mesh)[1], None)
    gone = weakref.ref(shard)
    gc.disable()
    try:
        del shard
        assert gone() is None
    finally:
        gc.enable()


def test_gathered_scales_are_those_of_this_gather():
    """FSDP2 frees what it gathers into and fills it again, and where it begins anew it has other memory."""
    made = shards([quantized(96, 64, torch.bfloat16) for _ in range(2)], 2)
    shard = made[0]
    outputs, metadata = gather(made, 2)
    whole, _ = shard.fsdp_post_all_gather(outputs, metadata, None)
    first, values = shard.origin.state.absmax, outputs[1].clone()
    storage = outputs[1].untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    storage.resize_(size)
    outputs[1].copy_(values.flip(0))
    again = tuple(output.view(-1) for output in outputs)  # FSDP2 makes views anew
    shard.origin.state.absmax = None
    shard.fsdp_post_all_gather(again, metadata, None, out=whole)
    assert shard.origin.state.absmax is first and same_bytes(first, values.flip(0)[: first.numel()])
    others = tuple(output.clone() for output in outputs)
    others[1].copy_(values)
    storage.resize_(0)
    shard.fsdp_post_all_gather(others, metadata, None, out=whole)
    now = shard.origin.state.absmax
    assert now.data_ptr() == others[1].data_ptr() and same_bytes(now, values[: now.numel()])


def test_loaded_bytes_get_their_checksum_in_the_next_gather():
    made = shards([quantized(96, 64, torch.bfloat16) for _ in range(2)], 2)
    outputs, metadata = gather(made, 2)
    whole, _ = made[0].fsdp_post_all_gather(outputs, metadata, None)
    state = made[0].origin.state
    expected, state.checksum = int(state.checksum), None
    made[0].fsdp_post_all_gather(outputs, metadata, None, out=whole)
    assert int(state.checksum) == expected


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
    loaded = pickled(shard)
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
