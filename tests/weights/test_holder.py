"""A layer's packed weight wherever it is: in one word, in copies of the layer, while a state dict is being loaded."""

import copy

import pytest
import torch
from bitshard import fsdp
from bitshard.nn.holder import PackedWeight, Place
from bitshard.nn.linear import Linear4bit
from bitshard.nn.parametrize import replace_parameter_4bit
from bitshard.process import launch
from bitshard.shards.shard import PackedShard
from bitshard.tensor import Params4bit
from helpers.bytes import same
from helpers.copies import pickled
from torch import nn

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")


def layer(seed=0, n=24, k=64, storage=torch.bfloat16):
    torch.manual_seed(seed)
    return Linear4bit(k, n, bias=False, quant_type="nf4", compress_statistics=True, quant_storage=storage)


class Experts(nn.Module):
    """Two 3-D weights beside each other, as MoE models have them."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.up = nn.Parameter(torch.randn(3, 8, 16))
        self.down = nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, x):
        return torch.einsum("bi,eoi->beo", x, self.up).sum() + self.down.sum()


def quantized_experts(seed=0):
    module = Experts(seed)
    for name in ("up", "down"):
        replace_parameter_4bit(module, name, compress_statistics=True)
    return module


@pytest.fixture(autouse=True)
def shards(monkeypatch):
    """A process that FSDP shards: torch before 2.12 takes no uint8."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "false")


def shard(module):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, mesh=init_device_mesh("cpu", (1,)))


def shard_around(module):
    """`module` with its weight sharded by a wrapper's unit, so that the module itself can be copied."""
    outer = nn.Sequential(module)
    shard(outer)
    return outer


# ---- one word ----


def test_places_of_an_unsharded_weight():
    module = layer()
    assert module.packed_weight.place is Place.FLOAT
    module.to("cpu")
    assert module.packed_weight.place is Place.WHOLE
    data = module.weight.data.as_subclass(torch.Tensor).clone()
    del module.weight
    module.weight = data.view(-1, 1)
    assert module.packed_weight.place is Place.VIEW


def test_places_under_fsdp2(group):
    module, places = layer().to("cpu"), []
    outer = shard_around(module)
    module.register_forward_hook(lambda module, args, output: places.append(module.packed_weight.place))
    assert module.packed_weight.place is Place.SHARD
    outer(torch.randn(2, 64))
    assert places == [Place.GATHERED]
    outer.reshard()
    assert module.packed_weight.place is Place.SHARD


@pytest.mark.parametrize("orig", [False, True])
def test_places_under_fsdp1(group, orig):
    from torch.distributed.fsdp import FullyShardedDataParallel

    module, places = layer().to("cpu"), []
    module.register_forward_hook(lambda module, args, output: places.append(module.packed_weight.place))
    FullyShardedDataParallel(nn.Sequential(module), device_id=torch.device("cpu"), use_orig_params=orig)(
        torch.randn(2, 64)
    )
    assert places == [Place.VIEW]


def place(module):
    return module.packed_weight.place


def test_a_weight_is_float_until_it_is_quantized():
    """In place, loaded packed, or by a state that comes with the weight or that foreign code sets."""
    module = layer()
    assert place(module) is Place.FLOAT
    module.to("cpu")
    assert place(module) is Place.WHOLE
    module.weight = Params4bit(torch.randn(24, 64), quant_type="nf4", module=module)
    assert place(module) is Place.FLOAT
    module.to("cpu")
    assert place(module) is Place.WHOLE
    loaded, told, found = layer(), layer(), layer()
    loaded.load_state_dict(module.state_dict())
    assert place(loaded) is Place.WHOLE
    told.quant_state = module.quant_state
    assert place(told) is Place.WHOLE
    found._parameters["weight"] = copy.deepcopy(module.weight)  # as accelerate puts one there
    assert place(found) is Place.FLOAT
    found(torch.randn(2, 64))
    assert place(found) is Place.WHOLE


def test_a_view_stays_one_until_a_parameter_takes_its_place():
    module = layer().to("cpu")
    bytes_, state = module.weight.data.as_subclass(torch.Tensor).clone().view(-1, 1), module.quant_state
    module.weight = nn.Parameter(bytes_, requires_grad=False)
    assert place(module) is Place.VIEW
    module.weight = nn.Parameter(torch.randn(24, 64), requires_grad=False)
    assert place(module) is Place.WHOLE
    del module.weight
    module.weight = bytes_
    assert place(module) is Place.VIEW and type(module.weight) is Params4bit
    module.weight = layer(5).to("cpu").weight  # written into the view
    assert place(module) is Place.VIEW
    other, flattened = layer().to("cpu"), Params4bit.of_state(bytes_, state, torch.bfloat16, module)
    flattened._fsdp_flattened = True
    other.weight = flattened
    assert place(other) is Place.VIEW


def test_a_part_becomes_a_shard_or_a_whole_weight(group, monkeypatch):
    monkeypatch.setattr(launch, "keeps_parts", lambda: True)
    one, other, given = layer().to("cpu"), layer().to("cpu"), layer(5)
    assert place(one) is place(other) is Place.PART
    with pytest.raises(TypeError, match="cannot assign"):
        one.weight = torch.ones(24, 64)
    assert place(one) is Place.PART
    monkeypatch.setattr(launch, "keeps_parts", lambda: False)
    one.weight = layer(5).to("cpu").weight
    assert place(one) is Place.WHOLE
    given.weight = other.weight
    assert place(given) is Place.FLOAT  # its state is still to be found
    given.quant_state = other.quant_state
    given.weight = other.weight
    assert place(given) is Place.PART
    shard_around(other)
    assert place(other) is Place.SHARD


def test_rows_that_are_awaited_become_a_shard(group, monkeypatch):
    """Sharded on the meta device; gathered, while it is float, it is a float weight."""
    from bitshard.sharding.weights import rows

    with torch.device("meta"):
        module = layer()
    outer, seen = shard_around(module), []
    assert place(module) is Place.AWAITED
    outer.to_empty(device="cpu")
    assert place(module) is Place.AWAITED
    outer.unshard()
    assert place(module) is Place.FLOAT
    outer.reshard()
    assert place(module) is Place.AWAITED
    monkeypatch.setattr(rows, "start_over", lambda *args, run=rows.start_over: (seen.append(place(module)), run(*args)))
    fsdp.quantize(outer)
    assert place(module) is Place.SHARD and seen == [Place.SHARD]
    outer(torch.randn(2, 64))
    assert place(module) is Place.GATHERED
    module.weight = layer(5).to("cpu").weight  # written into the shards
    assert place(module) is Place.GATHERED
    outer.reshard()
    assert place(module) is Place.SHARD
    module.weight = layer(5).to("cpu").weight
    assert place(module) is Place.SHARD


def test_a_replica_leaves_the_place_alone():
    """DataParallel's copies name the holder of the layer that they are made from."""
    module = layer().to("cpu")
    replica = module._replicate_for_data_parallel()
    replica._parameters.pop("weight", None)
    replica.weight = module.weight.data.as_subclass(torch.Tensor).view(-1, 1)
    assert place(module) is Place.WHOLE


@pytest.mark.parametrize("quantized", [False, True])
def test_pickles_from_before_places_were_kept(quantized):
    module = layer().to("cpu") if quantized else layer()
    del module.packed_weight.place
    assert place(pickled(module)) is (Place.WHOLE if quantized else Place.FLOAT)


# ---- what FSDP2 puts here in turns ----


@pytest.mark.parametrize(
    "spoil", [dict.clear, lambda own: own.update(bnb_quantized=False), lambda own: own.update(module=None)]
)
def test_a_shard_answers_as_a_weight_in_every_turn(group, spoil):
    """Its attributes are others where a move has swapped tensors; peft clears `bnb_quantized`."""
    module, x = layer().to("cpu"), torch.randn(2, 64)
    outer = shard_around(module)
    for _ in range(2):
        outer(x)
        weight = module.packed_weight.shard
        spoil(vars(weight))
        outer.reshard()
        assert module.weight is weight and place(module) is Place.SHARD
        assert weight.module is module and weight.bnb_quantized and weight.quant_type == "nf4"


def test_a_weight_of_another_state_is_none_that_fsdp2_gathered(group):
    """It is written into the shards."""
    module, other, x = layer().to("cpu"), layer(5).to("cpu"), torch.randn(2, 64)
    outer = shard_around(module)
    outer(x)
    module.weight = copy.deepcopy(other.weight)
    assert place(module) is Place.GATHERED and module.weight is not other.weight
    for _ in range(2):
        assert torch.equal(outer(x), other(x))
        outer.reshard()


def test_a_shard_that_fsdp2_keeps_on_the_cpu_does_not_stay_elsewhere(group):
    module = layer().to("cpu")
    shard_around(module)
    weight, held = module.weight, module.packed_weight
    local = weight._local_tensor
    weight._local_tensor = PackedShard.wrap(local.plain().to("meta"), local.origin)
    assert held.swapped(weight)
    local.origin.on_cpu = True
    assert not held.swapped(weight)


def test_later_turns_make_nothing_anew(group, monkeypatch):
    def fails(*args):
        raise AssertionError("made anew")

    module, x = layer().to("cpu"), torch.randn(2, 64)
    outer = shard_around(module)
    expected = outer(x)
    outer.reshard()
    monkeypatch.setattr(PackedWeight, "put", fails)
    monkeypatch.setattr(PackedShard, "plain", fails)
    for _ in range(2):
        assert torch.equal(outer(x), expected) and place(module) is Place.GATHERED
        outer.reshard()
        assert place(module) is Place.SHARD


# ---- copies ----


def test_a_copied_layer_has_a_holder_of_its_own():
    module, x = layer().to("cpu"), torch.randn(2, 64)
    expected = module(x)
    for made in (copy.deepcopy(module), copy.copy(module)):
        assert made.packed_weight is not module.packed_weight and made.packed_weight.owner is made
        made.quant_state = made.quant_state.clone()
        assert made.quant_state is not module.quant_state and torch.equal(made(x), expected)


def test_a_copied_shard_is_a_shard(group):
    """Its bytes are copies, its state and class those of a sharded weight; no Params4bit is made of local rows."""
    module = layer().to("cpu")
    outer = shard_around(module)
    made = copy.deepcopy(module)
    assert made.packed_weight.place is Place.SHARD and made.packed_weight.shard is made.weight
    assert type(made.weight) is type(module.weight) and made.weight.quant_state is module.quant_state
    assert made.weight._local_tensor.data_ptr() != module.weight._local_tensor.data_ptr()
    assert made.weight.bnb_quantized and made.weight.module is made
    assert same(full(made), full(module))
    assert outer(torch.randn(2, 64)).shape == (2, 24)


# ---- state dicts ----


def full(module):
    """Whole entries as bytes: as numbers packed words may be NaNs."""
    return {key: as_bytes(value.full_tensor()) for key, value in module.state_dict().items()}


def as_bytes(data):
    return data.plain() if hasattr(data, "plain") else data


def test_saving_leaves_no_load_behind(group):
    """torch asks for what it could fill before it saves, too. A plain load of other scales only is right."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    module, twice = layer(), layer()
    with torch.no_grad():
        twice.weight.data.mul_(2)  # the same codes, other scales
    outer, other = shard_around(module.to("cpu")), shard_around(twice.to("cpu"))
    get_model_state_dict(outer)
    assert same({"": full(outer)["0.weight"]}, {"": full(other)["0.weight"]}) and not same(full(outer), full(other))
    outer.load_state_dict(other.state_dict())
    assert same(full(outer), full(other))


def test_loading_lets_go_of_what_it_held(group):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    module = layer().to("cpu")
    outer, other = shard_around(module), shard_around(layer(5).to("cpu"))
    set_model_state_dict(outer, full(other), options=StateDictOptions(full_state_dict=True))
    assert module.weight._local_tensor.origin.pending is None and same(full(outer), full(other))


def test_loading_reaches_the_shards_of_a_gathered_weight(group):
    """The root unit stays gathered after forward."""
    outer, other, x = shard_around(layer().to("cpu")), shard_around(layer(5).to("cpu")), torch.randn(2, 64)
    outer(x)
    assert outer[0].packed_weight.place is Place.GATHERED
    outer.load_state_dict(other.state_dict())
    assert same(full(outer), full(other)) and torch.equal(outer(x), other(x))


# ---- parametrized weights ----


@pytest.mark.parametrize("assign", [False, True])
def test_parametrized_weights_load(assign):
    module, other, x = quantized_experts(), quantized_experts(7), torch.randn(2, 16)
    saved = module.state_dict()
    other.load_state_dict(saved, assign=assign)
    assert torch.equal(other(x), module(x)) and torch.equal(other.up, module.up)
    assert other.parametrizations["up"].packed_weight.place is Place.WHOLE
    for key, value in other.state_dict().items():
        assert torch.equal(value, saved[key]), key


def test_parametrized_weights_name_what_does_not_load():
    module = quantized_experts()
    saved = module.state_dict()
    missing = {key: value for key, value in saved.items() if not key.startswith("down")}
    with pytest.raises(RuntimeError, match='Missing key.*"down"'):
        module.load_state_dict(missing)
    other = {**saved, **{key.replace("up", "down"): value for key, value in saved.items() if key.startswith("up")}}
    with pytest.raises(RuntimeError, match=r"shape \[3, 8, 16\] does not fit a layer of \[3, 16, 8\]"):
        module.load_state_dict(other)
    bare = {**saved, **{key: value for key, value in quantized_experts(7).state_dict().items() if key == "up"}}
    bare = {key: value for key, value in bare.items() if not key.startswith("up.")}
    with pytest.raises(RuntimeError, match="checksum"):
        module.load_state_dict(bare)


@pytest.mark.parametrize("move", ["half", "float", "bfloat16", "to"])
def test_parametrized_weights_survive_dtype_moves_where_fsdp_shards(monkeypatch, move):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    module = quantized_experts()
    assert module.parametrizations["up"].original.dtype is torch.float32
    before = module.up.clone()
    module.to(torch.bfloat16) if move == "to" else getattr(module, move)()
    assert torch.equal(module.up, before) and module.parametrizations["up"].original.dtype is torch.float32


def test_parametrized_weights_under_fsdp2(group):
    """Exact in forward, counted in the report, loaded from sharded and from whole state dicts."""
    module, x = quantized_experts(), torch.randn(2, 16)
    expected, saved = module(x), module.state_dict()
    other = quantized_experts(7)
    shard(module)
    shard(other)
    assert module.parametrizations["up"].packed_weight.place is Place.SHARD
    assert fsdp.measure(module).weights == 2
    for load in (
        lambda: other.load_state_dict(module.state_dict()),
        lambda: other.load_state_dict(saved),
        lambda: fsdp.load_full_state_dict(other, saved),
    ):
        load()
        assert torch.equal(other(x), expected)
        other.load_state_dict(quantized_experts(9).state_dict())
        assert not torch.equal(other(x), expected)
    whole = fsdp.full_state_dict(module)
    assert whole.keys() == saved.keys()
    assert all(torch.equal(whole[key], value) for key, value in saved.items() if "bitsandbytes__" not in key)
    module.to(torch.bfloat16)
    assert torch.equal(module(x), expected)


# ---- what a user sees ----


def test_public_functions():
    """`bitshard.fsdp` shows a user its few functions and nothing else."""
    assert {name for name in vars(fsdp) if not name.startswith("_")} == set(fsdp.__all__)


@pytest.mark.parametrize("style", ["ColwiseParallel", "RowwiseParallel"])
def test_tensor_parallelism_of_a_packed_layer_is_named(group, style):
    """And not FSDP2, which has no part in it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import parallel

    model = nn.Sequential(layer().to("cpu"))
    parallel.parallelize_module(model, init_device_mesh("cpu", (1,)), {"0": getattr(parallel, style)()})
    with pytest.raises(ValueError, match=r"tensor parallelism .* packed weight of \[24, 64\]"):
        model(torch.randn(2, 64))
