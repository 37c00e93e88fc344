"""Optimizer classes in one process: state dicts in both directions, settings, shapes and dtypes, bad input."""

import copy
import io
import logging
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from bitshard.optim import paged, paging, update
from bitshard.optim.base import schedule
from helpers import upstream
from helpers.bytes import same_bytes
from helpers.copies import pickled
from helpers.optim import CLASSES, PAGED, gradients, make, train, values_of
from original import upstream_optim as cases
from torch import nn

HIDDEN = "__bnb_optimizer_quant_state__"
NAMES = [name for name, _, _ in cases.cases()]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def parameter(*shape, dtype=torch.float32, seed=0):
    return nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype))


# ---- one call for all parameters ----


@pytest.mark.parametrize("name", [name for name in CLASSES if not name.startswith(("LAMB", "LARS"))])
def test_one_call_for_all_is_as_one_by_one(name, monkeypatch):
    """Of all dtypes and sizes, in two groups with numbers of their own, one parameter without a gradient at first."""
    results, done = [], []
    real = update._C.optimizer_steps
    for together in (True, False):
        call = (lambda batches: done.append(real(batches)) or done[-1]) if together else (lambda batches: False)
        monkeypatch.setattr(update, "_C", type("C", (), {"optimizer_steps": staticmethod(call)}))
        shapes = [(64, 100), (33, 129), (7,), (), (16, 256), (8, 512)]
        params = [parameter(*shape, dtype=DTYPES[i % 3], seed=i) for i, shape in enumerate(shapes)]
        optimizer = make(name, params[:4])
        optimizer.add_param_group({"params": params[4:], "lr": 3e-3, "weight_decay": 0.0})
        for step in range(3):
            for p, g in zip(params, gradients(params, step), strict=True):
                p.grad = None if p is params[1] and step == 0 else g
            optimizer.step()
        results.append({"params": [p.detach() for p in params], **optimizer.state_dict()})
    assert done == [True] * 3
    assert_same(*results)


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_call_that_failed_in_the_middle_goes_on_and_counts_nothing_twice(after, monkeypatch):
    """Parameters that were updated are left out by the next step with the same gradients, and take other gradients."""
    real, made = update._C.optimizer_steps, []

    def fails(batches):
        chunks = [(settings, chunk) for settings, own in batches for chunk in own]
        assert not after or real([(settings, [chunk]) for settings, chunk in chunks[:after]])
        error = RuntimeError(f"the device is gone ({after} of 4 parameters were updated)")
        error.done = [i < after for i in range(len(chunks))]
        raise error

    for again in (True, False):
        params, others = ([parameter(70, 60, seed=i) for i in range(4)] for _ in range(2))
        ours, theirs = make("AdamW8bit", params, min_8bit_size=1), make("AdamW8bit", others, min_8bit_size=1)
        train(ours, params, range(1))
        train(theirs, others, range(2 if again else 1))
        with monkeypatch.context() as patch:
            patch.setattr(update, "_C", type("C", (), {"optimizer_steps": staticmethod(fails)}))
            with pytest.raises(RuntimeError, match="the device is gone"):
                train(ours, params, range(1, 2))
        assert [ours.state[p]["step"] for p in params] == [2] * after + [1] * (4 - after)
        ours.state_dict()
        if again:
            ours.step()
        else:
            for i, (q, g) in enumerate(zip(others, gradients(params, 1), strict=True)):
                q.grad = g if i < after else None
            theirs.step()
            train(ours, params, range(2, 3))
            train(theirs, others, range(2, 3))
        made.append((ours, theirs, params, others))
    for ours, theirs, params, others in made:
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
        assert_same(ours.state_dict(), theirs.state_dict())


# ---- state dicts in both directions ----


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """State dicts by writer: from scratch, and after loading the other's."""
    upstream.folder_or_skip()
    root = tmp_path_factory.mktemp("optim")
    place = {name: root / name for name in ("theirs", "ours", "theirs_from_ours", "ours_from_theirs")}
    for path in place.values():
        path.mkdir()
    script = Path(cases.__file__)
    upstream.run(script, "write", str(place["theirs"]))
    cases.write(place["ours"])
    upstream.run(script, "read", str(place["ours"]), str(place["theirs_from_ours"]))
    cases.read(place["theirs"], place["ours_from_theirs"])
    return place


def assert_same(left, right, what=""):
    """The same keys in the same nesting, the same types, the same bytes."""
    assert type(left) is type(right), what
    if isinstance(left, dict):
        assert left.keys() == right.keys(), (what, left.keys(), right.keys())
        for key in left:
            assert_same(left[key], right[key], f"{what}.{key}")
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right), what
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same(*pair, f"{what}[{index}]")
    elif isinstance(left, torch.Tensor):
        assert left.shape == right.shape and same_bytes(left, right), what
    else:
        assert left == right, (what, left, right)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("source", "reader"), [("theirs", "ours_from_theirs"), ("ours", "theirs_from_ours")])
def test_state_dicts_load_in_the_other(folders, name, source, reader):
    """Every byte arrives, and the next step of both is the same within the rounding of a CPU."""
    written, read = (torch.load(folders[key] / f"{name}.pt", weights_only=True) for key in (source, reader))
    assert_same(written["state_dict"], read["state_dict"])
    for before, after in zip(written["parameters"], read["parameters"], strict=True):
        assert not torch.equal(before, after)


@pytest.mark.parametrize("name", NAMES)
def test_state_dicts_have_the_same_form(folders, name):
    """From scratch: keys, dtypes and shapes; values close (8 bits: within 2 % of the largest)."""
    ours, theirs = (torch.load(folders[key] / f"{name}.pt", weights_only=True) for key in ("ours", "theirs"))
    assert ours["state_dict"]["param_groups"] == theirs["state_dict"]["param_groups"]
    left, right = ours["state_dict"]["state"], theirs["state_dict"]["state"]
    assert left.keys() == right.keys()
    for key in left:
        assert left[key].keys() == right[key].keys() and left[key]["step"] == right[key]["step"] == cases.STEPS
        a, b = left[key][HIDDEN], right[key][HIDDEN]
        assert {k: (v.shape, v.dtype) for k, v in a.items()} == {k: (v.shape, v.dtype) for k, v in b.items()}
        for n in (1, 2):
            if f"state{n}" in a:
                x, y = values_of(a, n), values_of(b, n)
                bound = 0.02 if a[f"state{n}"].dtype == torch.uint8 else 1e-4
                assert (x - y).abs().max() <= bound * y.abs().max(), (key, n)


# ---- steps ----


def test_adamw_is_torchs():
    params, others = [parameter(48, 100), parameter(7)], [parameter(48, 100), parameter(7)]
    ours = bnb.optim.AdamW32bit(params, lr=1e-2)
    theirs = torch.optim.AdamW(others, lr=1e-2)
    train(ours, params, range(5))
    train(theirs, others, range(5))
    for p, q in zip(params, others, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)  # 1 - beta2**step is in float32, as on a GPU


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_shape_and_dtype(name, dtype):
    """Zero-size, 0-dim and odd shapes move where they have elements; state in 8 bits from 4096 elements on."""
    params = [parameter(*shape, dtype=dtype) for shape in ((), (0,), (3, 0), (4095,), (4096,), (41, 100))]
    before = [p.detach().clone() for p in params]
    optimizer = make(name, params, lr=1.0 if name.startswith("LARS") else 0.1)  # LARS steps by 2 % of that
    train(optimizer, params, range(2))
    for p, old in zip(params, before, strict=True):
        assert p.dtype == dtype and torch.isfinite(p).all()
        assert p.numel() == 0 or not torch.equal(p, old)
    dtypes = [optimizer.state[p]["state1"].dtype for p in params]
    assert dtypes == [torch.float32] * 4 + [torch.uint8 if "8bit" in name else torch.float32] * 2


@pytest.mark.parametrize("name", CLASSES)
def test_a_view_that_is_not_contiguous_is_updated(name):
    """A transposed parameter, a strided one and gradients of other strides: the update of a contiguous parameter."""
    base, wide = torch.randn(82, 100), torch.randn(100, 82)
    params = [nn.Parameter(base.clone().t()), nn.Parameter(wide[:, 1::2])]
    plain = [nn.Parameter(base.t().contiguous()), nn.Parameter(wide[:, 1::2].clone())]
    optimizer, other = make(name, params), make(name, plain)
    for step in range(2):
        for p, q, gradient in zip(params, plain, gradients(plain, step), strict=True):
            p.grad = gradient.t().contiguous().t()
            q.grad = gradient
        optimizer.step()
        other.step()
    assert not params[0].is_contiguous() and not params[1].is_contiguous()
    for p, q in zip(params, plain, strict=True):
        if name in ("LAMB32bit", "LARS32bit"):  # their norms are summed in the order of memory
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(p, q)
    assert torch.equal(wide[:, 1::2], params[1]), "the memory that the parameter is a view of"


def test_a_parameter_of_another_shape_for_a_while():
    """As GaLore's optimizers: a small matrix takes the parameter's place for the call of update_step."""
    p = parameter(64, 128)
    optimizer = bnb.optim.AdamW8bit([p], min_8bit_size=1)
    small = parameter(4, 128)
    expected = bnb.optim.AdamW8bit([small], min_8bit_size=1)
    small.grad = torch.ones(4, 128)
    saved, p.data, p.grad = p.data, small.data.clone(), None
    p.grad = torch.ones(4, 128)
    optimizer.init_state(optimizer.param_groups[0], p, 0, 0)
    optimizer.prefetch_state(p)
    optimizer.update_step(optimizer.param_groups[0], p, 0, 0)
    expected.step()
    assert torch.equal(p, small) and saved.shape == (64, 128)


def test_closure_and_parameters_without_gradient():
    p, q = parameter(8), parameter(8)
    optimizer = bnb.optim.Lion32bit([p, q])
    before = q.detach().clone()

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure) > optimizer.step(closure)
    assert torch.equal(q, before) and q not in optimizer.state


def test_schedule_of_ademamix():
    """Both warm up to their value, and stay there."""
    config = {"betas": (0.9, 0.999, 0.9999), "alpha": 5.0, "t_alpha": 10, "t_beta3": 10}
    first, middle, end, after = (schedule(config, step) for step in (1, 5, 10, 40))
    assert first[1] == pytest.approx(0.5) and middle[1] == pytest.approx(2.5) and end[1] == after[1] == 5.0
    assert 0.9 < first[0][2] < middle[0][2] < end[0][2] == after[0][2] == 0.9999
    assert schedule({"betas": (0.9, 0.99)}, 3) == ((0.9, 0.99, 0.0), 0.0)


def test_ademamix_is_its_reference():
    options = {"lr": 1e-2, "t_alpha": 4, "t_beta3": 4}
    p, q = parameter(50), parameter(50)
    train(bnb.optim.AdEMAMix([p], **options), [p], range(6))
    train(bnb.optim.ademamix._ReferenceAdEMAMix([q], **options), [q], range(6))
    torch.testing.assert_close(p, q, rtol=1e-4, atol=2e-5)


def test_ademamix_32bit_has_both_means():
    """A class of its own, which in the original allocates one of two and ignores the schedule."""
    p, q = parameter(10), parameter(10)
    options = {"t_alpha": 3, "t_beta3": 3}
    left, right = bnb.optim.AdEMAMix32bit([p], **options), bnb.optim.AdEMAMix([q], **options)
    train(left, [p], range(3))
    train(right, [q], range(3))
    assert torch.equal(p, q) and left.state[p]["state1"].shape == (2, 10)


# ---- settings ----


@pytest.fixture
def manager():
    """The process's manager, empty before and after."""
    found = bnb.optim.GlobalOptimManager.get_instance()
    found.initialize()
    yield found
    found.initialize()


def test_overrides(manager):
    """By parameter, by registered place, and by a module's attribute; each parameter has its own."""
    layers = [nn.Linear(64, 64) for _ in range(4)]
    weights = [layer.weight for layer in layers]
    manager.override_config(weights[:2], key_value_dict={"optim_bits": 32})
    manager.override_config(weights[1], "lr", 0.5)
    manager.register_parameters(weights)
    manager.register_module_override(layers[2], "weight", {"optim_bits": 32})
    optimizer = bnb.optim.AdamW8bit(weights)
    train(optimizer, weights, range(1))
    dtypes = [optimizer.state[p]["state1"].dtype for p in weights]
    assert dtypes == [torch.float32, torch.float32, torch.float32, torch.uint8]
    group = optimizer.param_groups[0]
    assert [optimizer.get_config(0, index, group)["lr"] for index in range(2)] == [1e-3, 0.5]
    assert manager is bnb.optim.GlobalOptimManager.get_instance()
    with pytest.raises(RuntimeError, match="get_instance"):
        bnb.optim.GlobalOptimManager()
    with pytest.raises(ValueError, match="not both"):
        manager.override_config(weights, "lr", 1.0, {"lr": 1.0})


def test_an_override_stays_with_its_module(manager):
    """Another optimizer's first parameter is not the embedding of the first one."""
    embedding, linear = nn.Embedding(64, 64), nn.Linear(64, 64)
    manager.register_module_override(embedding, "weight", {"optim_bits": 32})
    first, second = bnb.optim.Adam8bit([embedding.weight]), bnb.optim.Adam8bit([linear.weight])
    for optimizer, p in ((first, embedding.weight), (second, linear.weight)):
        train(optimizer, [p], range(1))
    assert first.state[embedding.weight]["state1"].dtype == torch.float32
    assert second.state[linear.weight]["state1"].dtype == torch.uint8


def test_args_and_betas():
    args = bnb.optim.optimizer.MockArgs({"optim_bits": 8, "min_8bit_size": 1, "max_unorm": 0.0, "skip_zeros": False})
    p = parameter(8)
    optimizer = bnb.optim.Adam([p], args=args, betas="(0.8, 0.9)")
    train(optimizer, [p], range(1))
    assert optimizer.state[p]["state1"].dtype == torch.uint8 and optimizer.param_groups[0]["betas"] == [0.8, 0.9]
    for options in ({"lr": -1.0}, {"eps": -1.0}, {"betas": (0.9, 1.0)}, {"weight_decay": -1.0}):
        with pytest.raises(ValueError, match="Invalid"):
            bnb.optim.AdamW([p], **options)
    with pytest.raises(ValueError, match="Unsupported optimizer name: nadam"):
        bnb.optim.optimizer.Optimizer2State("nadam", [p])


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("Adam8bit", {"amsgrad": True}, "amsgrad"),
        ("PagedAdamW8bit", {"optim_bits": 8}, "PagedAdamW8bit only supports optim_bits=32"),
        ("Adagrad8bit", {"optim_bits": 32}, "only supports optim_bits=8"),
        ("Adagrad", {"lr_decay": 0.1}, "Lr Decay"),
        ("Adagrad32bit", {"initial_accumulator_value": 1.0}, "accumulator"),
        ("LAMB8bit", {"max_unorm": 0.5}, "max_unorm"),
        ("LARS", {"lr": 0.1}, "without momentum"),
        ("SGD8bit", {"lr": 0.1}, "without momentum"),
        ("RMSprop", {"centered": True}, "Centered"),
        ("RMSprop32bit", {"alpha": 0}, "alpha"),
        ("PytorchLARS", {"nesterov": True}, "Nesterov"),
    ],
)
def test_arguments_that_are_refused(name, options, text):
    with pytest.raises((ValueError, NotImplementedError), match=text):
        getattr(bnb.optim, name)([parameter(4)], **options)


def test_pytorch_lars():
    """SGD with momentum whose step is at most max_unorm of the parameter's norm."""
    p, q = parameter(50), parameter(50)
    free, sgd = bnb.optim.PytorchLARS([p], 0.1, 0.9, max_unorm=0.0), torch.optim.SGD([q], 0.1, 0.9)
    train(free, [p], range(3))
    train(sgd, [q], range(3))
    torch.testing.assert_close(p, q)
    before = p.detach().clone()
    train(bnb.optim.PytorchLARS([p], 1.0, 0.9, max_unorm=0.01), [p], range(1))
    torch.testing.assert_close((p - before).norm(), 0.01 * before.norm())


# ---- paged ----


@pytest.mark.parametrize("name", PAGED)
def test_paged_without_a_gpu(name, caplog, monkeypatch):
    """Plain host memory, the same steps, said once."""
    monkeypatch.setattr(paged, "_said", set())
    params, others = [parameter(400, 300), parameter(9)], [parameter(400, 300), parameter(9)]
    with caplog.at_level(logging.WARNING, logger="bitshard"):
        optimizer = make(f"Paged{name}8bit", params)
        train(optimizer, params, range(2))
        train(make(f"Paged{name}32bit", [parameter(8)]), [], range(1))
    train(make(f"{name}8bit", others), others, range(2))
    assert optimizer.is_paged and all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert [record.message.startswith("A paged optimizer") for record in caplog.records] == [True]


def test_paged_functions():
    f = bnb.functional
    tensor = f.get_paged(3, 4, dtype=torch.uint8, device=torch.device("cpu"))
    assert tensor.is_paged and tensor.shape == (3, 4) and tensor.sum() == 0
    f.fill(tensor, 7)
    assert (tensor == 7).all() and f.prefetch_tensor(tensor) is None and f.prefetch_tensor(tensor, to_cpu=True) is None
    assert f.get_paged(2).page_deviceid == 0
    with pytest.raises(ValueError, match="Only paged"):
        f.prefetch_tensor(torch.zeros(1))
    with pytest.raises(NotImplementedError, match="not implemented: nothing"):
        f.elementwise_func("nothing", torch.zeros(1), None, 0)
    pages = f.GlobalPageManager.get_instance()
    assert pages is f.GlobalPageManager.get_instance() and pages.prefetch_all() is None


# ---- functions and operators ----


def test_functions_are_the_operators():
    """`functional` and `torch.ops.bitsandbytes` make the same update; the operators check what is traced."""
    g, p, q = torch.randn(300), torch.randn(300), None
    q = p.clone()
    one, two = torch.zeros(300), torch.zeros(300)
    three, four = torch.zeros(300), torch.zeros(300)
    bnb.functional.optimizer_update_32bit("adam", g, p, one, 0.9, 1e-8, 1, 0.1, two, 0.99, weight_decay=0.01)
    numbers = (0.0, 0.0, 0.9, 0.99, 0.0, 0.0, 1e-8, 0.01, 1, 0.1, 1.0)
    torch.ops.bitsandbytes.optimizer_update_32bit("adam", g, q, three, four, None, *numbers)
    assert torch.equal(p, q) and torch.equal(one, three) and torch.equal(two, four) and one.abs().sum() > 0
    code, absmax = bnb.functional.create_dynamic_map(), [torch.zeros(2), torch.zeros(2)]
    states = [torch.zeros(300, dtype=torch.uint8) for _ in range(2)]
    numbers = (0.9, 0.99, 0.0, 0.0, 0.0, 1, 0.1, code, None)
    bnb.functional.optimizer_update_8bit_blockwise("lion", g, p, states[0], None, *numbers, absmax[0], None)
    torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
        "lion", g, q, states[1], None, *numbers, absmax[1], None, 0.0, 1.0
    )
    assert torch.equal(p, q) and torch.equal(*states) and torch.equal(*absmax) and absmax[0].min() > 0
    with pytest.raises(ValueError, match="Unsupported optimizer name: adamax"):
        bnb.functional.optimizer_update_32bit("adamax", g, p, one, 0.9, 1e-8, 1, 0.1)


# ---- float64 ----


FLOAT64 = (
    "AdEMAMix8bit Adagrad8bit Adam8bit AdamW32bit LAMB LARS Lion8bit PagedAdamW8bit PagedLion32bit RMSprop8bit SGD8bit"
)


@pytest.mark.parametrize("name", FLOAT64.split())
def test_float64_parameters_move_as_float32_ones_do(name):
    """By the same steps, and what they are beyond float32 stays: upstream rounds them to float32 in each step."""
    options = {"momentum": 0.9} if name in ("LARS", "SGD8bit") else {}
    single = [parameter(64, 100), nn.Parameter(parameter(33, 7).detach().t())]
    beyond = 2.0**-40
    double = [nn.Parameter(p.detach().double() + beyond) for p in single]
    kept = [p.detach().clone() for p in double]
    for parameters in (single, double):
        optimizer = getattr(bnb.optim, name)(parameters, lr=1e-2, **options)
        for step in range(4):
            for i, p in enumerate(parameters):
                gradient = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
                p.grad = gradient.to(p.dtype)
            optimizer.step()
    for p32, p64, before in zip(single, double, kept, strict=True):
        gap = p64.detach() - p32.detach().double()
        assert p64.dtype is torch.float64 and not torch.equal(p64.detach(), before)
        assert gap.abs().max() <= 2.0**-36 and (gap == beyond).double().mean() > 0.9  # others passed close to zero


# ---- bad input ----


def bad_gradients():
    sparse = nn.Parameter(torch.zeros(4, 4))
    sparse.grad = torch.eye(4).to_sparse()
    complex_ = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
    complex_.grad = torch.ones_like(complex_)
    elsewhere = nn.Parameter(torch.zeros(4, device="meta"))
    elsewhere.grad = torch.zeros(4, device="meta")
    shared = nn.Parameter(torch.zeros(1).expand(4))
    shared.grad = torch.ones(4)
    own = nn.Parameter(torch.ones(4))
    own.grad = own.detach()
    return {
        "sparse": (sparse, TypeError, "sparse"),
        "complex64": (complex_, TypeError, "complex64"),
        "device": (elsewhere, NotImplementedError, "optimizer kernels for META are not there yet"),
        "overlap": (shared, ValueError, "share memory"),
        "gradient": (own, ValueError, "its gradient share memory"),
    }


@pytest.mark.parametrize("kind", bad_gradients())
@pytest.mark.parametrize("name", ["AdamW8bit", "Lion32bit"])
def test_nothing_changes_where_one_parameter_is_bad(kind, name):
    """The bad one comes last; those before it keep their values and have no state. The error names its place."""
    bad, error, text = bad_gradients()[kind]
    good = parameter(64, 100)
    optimizer = make(name, [good])
    optimizer.add_param_group({"params": [parameter(3), bad]})
    good.grad = torch.ones_like(good)
    before = good.detach().clone()
    with pytest.raises(error, match=rf"parameter 1 of group 1 .*{text}"):
        optimizer.step()
    assert torch.equal(good, before) and not optimizer.state


def test_a_gradient_that_becomes_the_parameter_is_refused():
    """Found in the call that updates all parameters: those before it keep their values, too."""
    good, p = parameter(4), parameter(10)
    optimizer = bnb.optim.AdamW32bit([good, p])
    train(optimizer, [good, p], range(1))
    p.grad, good.grad = p.detach(), torch.ones(4)
    before = good.detach().clone()
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 .*share memory"):
        optimizer.step()
    assert torch.equal(good, before)


def test_a_state_that_no_longer_fits_is_refused():
    good, p = parameter(4), parameter(10)
    optimizer = bnb.optim.AdamW32bit([good, p])
    train(optimizer, [good, p], range(1))
    p.data, p.grad = torch.zeros(11), None
    p.grad, good.grad = torch.ones(11), torch.ones(4)
    before = good.detach().clone()
    with pytest.raises(ValueError, match=r"parameter 1 of group 0 .*the state is \(10,\)"):
        optimizer.step()
    assert torch.equal(good, before)


def test_bits_that_there_are_not():
    p = parameter(5000)
    optimizer = bnb.optim.AdamW([p], optim_bits=4)
    p.grad = torch.ones_like(p)
    with pytest.raises(NotImplementedError, match="bits not supported: 4"):
        optimizer.step()
    assert not optimizer.state


def drop(key):
    return lambda saved: saved["state"][0][HIDDEN].pop(key)


def change(key, value):
    def apply(saved):
        hidden = saved["state"][0][HIDDEN]
        hidden[key] = value(hidden[key])

    return apply


def put(place, value):
    def apply(saved):
        saved["state"][0][place] = value

    return apply


BAD_STATES = {
    "no state2": (drop("state2"), "no state2"),
    "no absmax": (drop("absmax1"), "no float32 absmax1"),
    "no map": (drop("qmap2"), "qmap2 must be float32"),
    "short map": (change("qmap1", lambda t: t[:255]), r"qmap1 must be float32 \[256\]"),
    "other shape": (change("state1", lambda t: t[:-1]), r"state1 has shape \(63, 100\)"),
    "flat": (change("state1", lambda t: t.view(-1)), r"state1 has shape \(6400,\)"),
    "other dtype": (change("state1", lambda t: t.to(torch.bfloat16)), "must both be float32, or both uint8"),
    "one in 32 bits": (change("state1", lambda t: t.float()), "must both be float32, or both uint8"),
    "blocks of 2048": (change("absmax1", lambda t: t[:4]), "4 scales, 25 blocks of 256"),
    "scales cut": (change("absmax2", lambda t: t[:-1]), "24 scales, 25 blocks of 256"),
    "scales of another rank": (change("absmax1", lambda t: t.view(5, 5)), "none of blocks of 256"),
    "scales 0-dim": (change("absmax1", lambda t: t[0]), "none of blocks of 256"),
    "half scales": (change("absmax1", lambda t: t.half()), "no float32 absmax1"),
    "negative step": (put("step", -1), "step must be"),
    "step a text": (put("step", "3"), "step must be"),
    "no dict": (lambda saved: saved["state"].update({0: 3}), "the state is a int"),
    "hidden no dict": (put(HIDDEN, [1]), "is a list, not a dict"),
    "torch's": (lambda saved: saved["state"].update({0: {"step": 1, "exp_avg": torch.zeros(64, 100)}}), "exp_avg"),
    "groups": (lambda saved: saved["param_groups"].append(saved["param_groups"][0]), "different number of param"),
    "sizes": (lambda saved: saved["param_groups"][0]["params"].pop(), "match the size"),
    "other groups": (lambda saved: saved["param_groups"][0].pop("betas"), "no betas: it is of another optimizer"),
}


@pytest.mark.parametrize("kind", BAD_STATES)
def test_bad_state_dicts_change_nothing(kind):
    """The bad entry is the first parameter's, or the last one's where it is read later; all stay as they were."""
    spoil, text = BAD_STATES[kind]
    params = [parameter(64, 100), parameter(64, 100, seed=1)]
    optimizer = bnb.optim.AdamW8bit(params)
    train(optimizer, params, range(2))
    saved = copy.deepcopy(optimizer.state_dict())
    other = bnb.optim.AdamW8bit(params, lr=0.5)
    train(other, params, range(1))
    before = copy.deepcopy(other.state_dict())
    spoil(saved)
    with pytest.raises((ValueError, TypeError), match=text):
        other.load_state_dict(saved)
    assert_same(before, other.state_dict())


@pytest.mark.parametrize(
    ("source", "target", "text"),
    [
        ("AdamW8bit", "Lion8bit", "this algorithm has one state"),
        ("Lion32bit", "AdamW32bit", "no state2"),
        ("AdamW32bit", "AdEMAMix", "2 betas, this optimizer 3"),
        ("AdEMAMix8bit", "AdamW8bit", "3 betas, this optimizer 2"),
    ],
)
def test_state_dicts_of_other_algorithms(source, target, text):
    params = [parameter(64, 100)]
    optimizer = make(source, params)
    train(optimizer, params, range(1))
    with pytest.raises(ValueError, match=text):
        make(target, params).load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("name", CLASSES)
def test_resumed_steps_are_the_same(name):
    """Through a deep copy of a state dict, for bfloat16 parameters too; the dict does not change with later steps."""
    params = [parameter(64, 100, dtype=torch.bfloat16), parameter(5)]
    optimizer = make(name, params)
    train(optimizer, params, range(2))
    saved, values = optimizer.state_dict(), [p.detach().clone() for p in params]
    others = [nn.Parameter(value.clone()) for value in values]
    resumed = make(name, others)
    resumed.load_state_dict(saved)
    kept = copy.deepcopy(resumed.state_dict())
    train(optimizer, params, range(2, 4))
    assert_same(kept, resumed.state_dict(), "memory of its own")
    train(resumed, others, range(2, 4))
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
    assert_same(optimizer.state_dict(), resumed.state_dict())


@pytest.mark.parametrize("name", ["Adam8bit", "Adam32bit"])
def test_autograd_sees_that_a_parameter_changed(name):
    """Backward through a value that was saved before the step raises, as after any change in place."""
    p = torch.nn.Parameter(torch.ones(8192))
    y = (p * p).sum()
    optimizer = getattr(bnb.optim, name)([p], lr=0.1)
    p.grad = torch.ones_like(p)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


# ---- settings and copies ----


def test_settings_of_a_parameter_that_is_gone_are_no_others():
    """Memory of dead parameters is used again, and so are their ids."""
    manager = bnb.optim.GlobalOptimManager.get_instance()
    manager.initialize()
    try:
        for _ in range(300):
            manager.override_config(parameter(8), "lr", 0.0)
        module = nn.Linear(4, 4)
        manager.register_module_override(module, "weight", {"lr": 0.0})
        params = [parameter(8) for _ in range(300)]
        optimizer = make("AdamW8bit", params)
        before = [p.detach().clone() for p in params]
        train(optimizer, params, range(1))
        assert not sum(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        kept = parameter(8)
        manager.override_config(kept, "lr", 0.0)
        manager.override_config(kept, key_value_dict={"eps": 1e-3})
        last = make("AdamW8bit", [kept])
        assert last.get_config(0, 0, last.param_groups[0])["lr"] == 0.0
        assert list(manager.pid2config) == [id(kept)] and manager.pid2config[id(kept)] == {"lr": 0.0, "eps": 1e-3}
    finally:
        manager.initialize()


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": pickled,
    "torch.save": lambda value: torch.load(io.BytesIO(saved_bytes(value)), weights_only=False),
}


def saved_bytes(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", [*CLASSES, "PagedAdamW8bit", "PagedAdEMAMix32bit"])
def test_copied_and_unpickled_optimizers_step(name, way, monkeypatch):
    """Before the first step and after some, with a setting of one parameter; the original is another one's."""
    if name.startswith("Paged"):
        monkeypatch.setattr(paging, "ON_CPU", True)
        monkeypatch.setattr(paging, "PAGED_FROM", 7)
    for steps in (0, 2):
        params = [parameter(64, 100), parameter(7, seed=1), parameter(16, 256, seed=2)]
        optimizer = make(name, params)
        manager = bnb.optim.GlobalOptimManager.get_instance()
        manager.override_config(params[1], "lr", 0.5)
        train(optimizer, params, range(steps))
        copied = COPIES[way](optimizer)
        others = copied.param_groups[0]["params"]
        assert type(copied) is type(optimizer) and all(p is not q for p, q in zip(params, others, strict=True))
        train(optimizer, params, range(steps, steps + 2))
        assert all(not torch.equal(p, q) for p, q in zip(params, others, strict=True))
        train(copied, others, range(steps, steps + 2))
        assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))
        assert_same(copied.state_dict(), optimizer.state_dict())
        if name.startswith("Paged"):
            assert all(paging.is_paged(copied.state[q]["state1"]) for q in others)
            places = [pager.pages for pager in copied.paging._pagers.values()]
            assert places and all(places[0].place(copied.state[q]["state1"])[1] >= 0 for q in others)
            assert any(state.data_ptr() in places[0]._places for state in (copied.state[q]["state1"] for q in others))


def test_a_shallow_copy_steps_and_leaves_the_state_where_it_is():
    params = [parameter(64, 100)]
    optimizer = make("AdamW8bit", params)
    train(optimizer, params, range(1))
    copied = copy.copy(optimizer)
    train(copied, params, range(1, 2))
    assert optimizer.state is copied.state and optimizer.state[params[0]]["step"] == 2
