"""Packed bytes against everything in torch that writes: by its own list of functions, in threads, through views."""

import threading

import pytest
import torch
from bitshard.nn.linear import Linear4bit
from bitshard.nn.linear8bit import Linear8bitLt
from bitshard.tensor import Params4bit
from bitshard.weights import guards
from torch import Tensor, nn

SPACES = (torch, Tensor, nn.functional, torch._C._nn)
# Schemas with an argument that is "written" though no byte of it changes.
NOTHING_WRITTEN = {
    "manual_seed": "of a generator",
    "seed": "of a generator",
    "sort": "of a list",
    "record_stream": "notes the stream",
    "retain_grad": "keeps the gradient",
}


def written_arguments():
    """{name of an operator of torch: names of the arguments that one of its forms writes, `out` apart}."""
    found = {}
    for schema in torch._C._jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        aliases = [(argument, argument.alias_info) for argument in schema.arguments]
        names = {argument.name for argument, alias in aliases if alias and alias.is_write and not argument.is_out}
        if space == "aten" and names and name not in NOTHING_WRITTEN:
            found.setdefault(name, set()).update(names)
    return found


def layer(storage=torch.bfloat16):
    torch.manual_seed(0)
    return Linear4bit(64, 32, bias=False, compute_dtype=torch.bfloat16, quant_storage=storage).to("cpu")


def bytes_of(weight):
    with torch._C.DisableTorchFunctionSubclass():
        return weight.detach().clone().view(torch.uint8)


@pytest.fixture(params=[torch.bfloat16, torch.uint8, torch.int8], ids=str)
def weight(request):
    """Of 4 bits, and int8 codes [N, K]."""
    if request.param is torch.int8:
        return Linear8bitLt(32, 32, has_fp16_weights=False).to("cpu").weight
    return layer(request.param).weight


# ---- torch's own list ----


def test_every_function_that_writes_is_guarded():
    """Each function of torch with an argument that its schema says it writes, and so of a later torch as well."""
    writers = written_arguments()
    assert len(writers) > 200 and {"add_", "_foreach_copy_", "_fused_adamw_", "index_put_"} <= set(writers)
    found = {
        (space.__name__, name): getattr(space, name)
        for name in writers
        for space in SPACES
        if callable(getattr(space, name, None)) and name not in guards._IN_PLACE
    }
    assert len(found) > 250
    for table in (Params4bit.handlers, guards.HANDLERS, guards.IN_PLACE):
        assert not [place for place, func in found.items() if func not in table]


@pytest.mark.parametrize("name", sorted(written_arguments()))
def test_operators_that_write_are_refused(weight, name):
    """`torch.ops.aten.name`, called with the weight in the place that is written; nothing is written before."""
    before = bytes_of(weight)
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or name in guards._IN_PLACE:
        return
    for overload in [getattr(packet, key) for key in packet.overloads()]:  # by __getattr__ it would be made anew
        places = [
            (i, str(argument.type).startswith("List"))
            for i, argument in enumerate(overload._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for place, is_list in places:
            other = torch.ones(weight.shape, dtype=torch.float64)
            args = [other] * place + [[weight] if is_list else weight] + [other]
            with pytest.raises(ValueError, match="holds packed bytes, not numbers"):
                guards.guarded(type(weight).handlers, overload, tuple(args), {})
    assert torch.equal(bytes_of(weight), before)


# ---- by what training code calls ----

ONES = torch.ones(1024, dtype=torch.float32)


def zeroed(w, x):
    torch._foreach_zero_([w])


@pytest.mark.parametrize(
    "write",
    [
        lambda w, x: torch._foreach_copy_([w], [x]),
        lambda w, x: torch._foreach_copy_(self=[w], src=[x]),
        lambda w, x: torch._foreach_lerp_([w], [x.to(w.dtype)], 0.5),
        lambda w, x: torch._foreach_mul_([x, w], 0.5),
        lambda w, x: torch._foreach_add_(self=[w], other=[x]),
        lambda w, x: torch._foreach_neg_([w]),
        zeroed,
        lambda w, x: w.clamp_(-1, 1),
        lambda w, x: w.mul_(2),
        lambda w, x: w.fill_(1),
        lambda w, x: w.abs_(),
        lambda w, x: w.__iadd__(1),
        lambda w, x: nn.init.ones_(w),
        lambda w, x: torch._fused_sgd_(
            [w],
            [x],
            [],
            weight_decay=0,
            momentum=0,
            lr=1,
            dampening=0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        ),  # noqa: E501
        lambda w, x: torch.ops.aten._foreach_copy_([w], [x]),
        lambda w, x: torch.ops.aten.copy_(w, x),
        lambda w, x: torch.ops.aten.add_.Tensor(w, x.to(w.dtype)),
        lambda w, x: torch.ops.aten.add_(w, 1),
        lambda w, x: torch.ops.aten.mul.out(x, x, out=w),
        lambda w, x: torch.add(x, x, out=w),
        lambda w, x: torch.frexp(x, out=(w, w)),
        lambda w, x: nn.functional.silu(w, inplace=True),
        lambda w, x: torch._C._nn.gelu_(w),
        lambda w, x: nn.functional.dropout(w, inplace=True),
        lambda w, x: torch._index_put_impl_(w, [torch.tensor(0)], x[0]),
        lambda w, x: (
            torch.amp.GradScaler("cpu") and torch._amp_foreach_non_finite_check_and_unscale_([w], x[:1, 0], x[:1, 0])
        ),  # noqa: E501
    ],
)
@pytest.mark.parametrize("through", ["weight", "data", "detached data"])
def test_values_are_not_written_into_packed_bytes(weight, write, through):
    """With whole numbers too, which codes could be: their values would be others without an error."""
    before, x = bytes_of(weight), ONES[: weight.numel()].view(weight.shape)
    target = {"weight": weight, "data": weight.data, "detached data": weight.data.detach()}[through]
    if write is zeroed and weight.dtype is torch.int8:  # the code of the value 0
        write(target, x)
        assert not bytes_of(weight).any()
        return
    with pytest.raises((ValueError, TypeError), match="packed bytes"):
        write(target, x)
    assert torch.equal(bytes_of(weight), before)


def test_data_of_float_weights_is_written():
    for made in (Linear4bit(64, 32), Linear8bitLt(64, 32, has_fp16_weights=False)):
        made.weight.data.fill_(2).mul_(2).clamp_(-1, 3)
        assert bool((made.weight == 3).all())


def test_bytes_of_the_same_dtype_are_copied(weight):
    """By every way of copying, and out of packed bytes into a plain tensor too."""
    other = torch.randint(0, 255, (weight.nbytes,), dtype=torch.uint8).view(weight.dtype).view(weight.shape)
    plain = torch.zeros(weight.shape, dtype=weight.dtype)
    for copy in (
        lambda: torch._foreach_copy_([weight], [other]),
        lambda: weight.data.copy_(other),
        lambda: torch.ops.aten.copy_(weight, other),
    ):
        with torch.no_grad():
            weight.data.copy_(plain)
            copy()
        assert torch.equal(bytes_of(weight), other.view(torch.uint8))
    torch._foreach_copy_([plain], [weight])
    assert torch.equal(plain.view(torch.uint8), other.view(torch.uint8))


# ---- threads ----


def test_modules_that_move_in_two_threads():
    """Two moves that overlap: a cast in a thread that moves nothing raises, then and afterwards."""
    first, second = nn.Sequential(layer()), nn.Sequential(layer())
    began, may_end, seen = threading.Event(), threading.Event(), []

    def move(model, wait):
        def convert(tensor):
            if wait:
                began.set()
                may_end.wait(10)
            return tensor.to(torch.float32)

        model._apply(convert)

    slow = threading.Thread(target=move, args=(first, True))
    slow.start()
    assert began.wait(10)
    move(second, False)
    for _ in range(2):
        with pytest.raises(TypeError, match="a cast would destroy"):
            second[0].weight.half()
        seen.append(guards.in_module_move())
        may_end.set()
        slow.join(10)
    assert seen == [False, False] and second[0].weight.dtype is torch.bfloat16
    assert first[0].weight.dtype is torch.bfloat16


def test_a_move_within_a_move_ends_alone():
    with guards.module_move():
        with guards.module_move():
            pass
        assert guards.in_module_move()
    assert not guards.in_module_move()


def test_init_functions_of_others(monkeypatch):
    """While transformers makes a model, its own functions stand in torch.nn.init, and torch hands these on."""
    weight = layer().weight
    before = bytes_of(weight)

    def normal_(tensor, *args, **kwargs):
        return original(tensor, *args, **kwargs)

    original = nn.init.normal_
    monkeypatch.setattr(nn.init, "normal_", normal_)
    for call in (nn.init.normal_, original):
        with pytest.raises(ValueError, match="packed bytes"):
            call(weight)
    assert torch.equal(bytes_of(weight), before)
