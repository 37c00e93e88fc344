"""Damaged optimizer states and arguments: a right result, or an error after which no byte is another."""

import copy
import itertools
import random
import tracemalloc

import pytest
import torch
from bitshard import ops
from bitshard.formats import maps
from helpers.bytes import resident_bytes, same, same_bytes
from helpers.optim import gradients, make
from torch import nn

HIDDEN = "__bnb_optimizer_quant_state__"
REFUSED = (TypeError, ValueError)
VALUES = (None, True, -1, 0, 1, 255, 2**31, 2**63, -(2**63), 10**30, 0.5, float("nan"), float("inf"), 1e308, "", "a")
VALUES += ([], [64], {}, {"a": 1}, (0.9, 0.999), b"x", torch.float32)
DTYPES = (torch.uint8, torch.int8, torch.int64, torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES = ((64, 100), (16, 256), (7,), ())
NAMES = ("AdamW8bit", "AdEMAMix8bit", "Lion8bit", "AdamW32bit", "LAMB32bit", "AdEMAMix32bit", "SGD32bit")


# ---- state dicts ----


def trained(name, seed=0):
    """An optimizer with state of two steps."""
    generator = torch.Generator().manual_seed(seed)
    params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    optimizer = make(name, params)
    for step in range(2):
        set_gradients(optimizer, step + 7 * seed)
        optimizer.step()
    return optimizer


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_gradients(optimizer, step):
    params = parameters(optimizer)
    for p, gradient in zip(params, gradients(params, step), strict=True):
        p.grad = gradient


def another(rng, tensor):
    """A tensor of another dtype, size, device, layout or with other values, or something that is none."""
    kind = rng.randrange(10)
    if tensor.is_meta or tensor.is_sparse:
        return tensor
    if kind == 0:
        return tensor.to(rng.choice(DTYPES))
    if kind == 1:
        return tensor.flatten()[: rng.randrange(tensor.numel() + 1)]
    if kind == 2:
        return tensor.repeat(*([1] * (tensor.dim() - 1) + [rng.randrange(3)] if tensor.dim() else [2]))
    if kind == 3:
        return tensor.roll(1)
    if kind == 4:
        return tensor.to("meta")
    if kind == 5:
        return tensor.flatten()[:1].expand(tensor.numel()).view(tensor.shape) if tensor.numel() else tensor
    if kind == 6:
        return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor.unsqueeze(rng.randrange(2) * -1)
    if kind == 7:
        return tensor.to_sparse() if tensor.dim() else tensor.view(1)
    if kind == 8 and tensor.is_floating_point() and tensor.numel():
        changed = tensor.clone()
        changed.view(-1)[rng.randrange(tensor.numel())] = rng.choice((float("nan"), float("inf"), -1.0, 1e38))
        return changed
    return rng.choice(VALUES)


def change_entry(rng, saved):
    """One entry of one parameter: another tensor or value, dropped, renamed, or one more."""
    entries = saved["state"].get(rng.randrange(len(SHAPES)))
    if not isinstance(entries, dict) or not entries:
        return
    hidden = entries.get(HIDDEN)
    place = hidden if isinstance(hidden, dict) and hidden and rng.random() < 0.8 else entries
    key = rng.choice(list(place))
    kind = rng.randrange(8)
    if kind == 0:
        del place[key]
    elif kind == 1:
        place[rng.choice(("step", "state1", "state2", "absmax1", "qmap2", "exp_avg", 3, HIDDEN))] = place.pop(key)
    elif kind == 2:
        place[rng.choice(("state2", "absmax1", "absmax2", "state1_0", "unorm_vec", "state_bits"))] = rng.choice(VALUES)
    elif isinstance(place[key], torch.Tensor):
        place[key] = another(rng, place[key])
    else:
        place[key] = rng.choice(VALUES)


def change_state(rng, saved):
    """A parameter's state dropped, swapped with another's, or something else."""
    state, key = saved["state"], rng.randrange(len(SHAPES))
    kind = rng.randrange(3)
    if kind == 0:
        state.pop(key, None)
    elif kind == 1:
        other = rng.randrange(len(SHAPES))
        if key in state and other in state:
            state[key], state[other] = state[other], state[key]
    else:
        state[key] = rng.choice(VALUES)


def change_groups(rng, saved):
    """Groups of other parameters, more or fewer of them, or without what they need."""
    groups = saved["param_groups"]
    kind = rng.randrange(5)
    if kind == 0:
        groups.append(copy.deepcopy(groups[0]))
    elif kind == 1:
        groups[0]["params"] = groups[0]["params"][: rng.randrange(len(SHAPES))]
    elif kind == 2:
        groups[0].pop(rng.choice(("lr", "betas", "eps", "weight_decay", "params")), None)
    elif kind == 3:
        groups[0][rng.choice(("lr", "betas", "eps", "weight_decay", "params"))] = rng.choice(VALUES)
    else:
        saved["param_groups"] = rng.choice(VALUES)


CHANGES = (change_entry, change_entry, change_entry, change_entry, change_state, change_groups)


def snapshot(optimizer):
    """Everything a load or a step may change, in memory of its own."""
    return copy.deepcopy(([p.detach() for p in parameters(optimizer)], optimizer.state_dict()))


@pytest.mark.parametrize("name", NAMES)
def test_damaged_state_dicts(name):
    """Each is loaded and can be stepped with, or refused before anything has changed; the message stays short."""
    rng = random.Random(NAMES.index(name))
    sound, optimizer = trained(name).state_dict(), trained(name, 1)
    loaded = refused = 0
    for _ in range(150):
        saved = copy.deepcopy(sound)
        for _ in range(rng.choice((1, 1, 2, 3))):
            if isinstance(saved["param_groups"], list) and saved["param_groups"]:
                rng.choice(CHANGES)(rng, saved)
        before = snapshot(optimizer)
        try:
            optimizer.load_state_dict(saved)
            loaded += 1
        except REFUSED as error:
            refused += 1
            assert len(str(error)) < 1500
            assert same(before, snapshot(optimizer)), error
            continue
        before = snapshot(optimizer)
        set_gradients(optimizer, 0)
        try:
            optimizer.step()
        except REFUSED as error:
            raise AssertionError(f"loaded, and a step refuses it: {error}") from error
        optimizer = trained(name, 1)
    assert loaded > 10 and refused > 60, (loaded, refused)


# ---- the two ops ----

ALGORITHMS = tuple(ops.OPTIMIZERS)
NUMBERS = (0.0, 1e-3, 1.0, -1.0, 1e38, 1e308, float("nan"), float("inf"), 1e-45)


def arguments(rng, name, kind):
    """{argument: value} of a sound call, in the order of the op, for n elements."""
    n = rng.choice((0, 1, 7, 256, 300, 1000))
    pair, two = 2 if name == "ademamix" else 1, name in ("adam", "ademamix")
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    a = {key: torch.randn(n, generator=generator).to(rng.choice(dtypes)) for key in ("g", "p")}
    blocks = ops.block_count(n, 256)
    if kind == "32":
        a |= {"state1": torch.rand(pair * n), "state2": torch.rand(n * two), "unorm": torch.zeros(1)}
    else:
        a["state1"] = torch.randint(0, 256, (pair * n,), dtype=torch.uint8, generator=generator)
        a["state2"] = torch.randint(0, 256, (n * two,), dtype=torch.uint8, generator=generator)
        map = maps.create_dynamic_map()
        a |= {"qmap1": map, "qmap2": maps.create_dynamic_map(signed=False) if two else map[:0]}
        a |= {"absmax1": torch.rand(pair * blocks), "absmax2": torch.rand(blocks * two)}
    a |= {"algorithm": ops.OPTIMIZERS[name], "lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "beta3": 0.999, "alpha": 1.0}
    a |= {"eps": 1e-8, "weight_decay": 0.01, "step": 3}
    if kind == "32":
        a |= {"max_unorm": rng.choice((0.0, 0.5)), "param_norm": 1.0}
    a |= {"gnorm_scale": 1.0, "skip_zeros": rng.random() < 0.3}
    return a | ({} if kind == "32" else {"blocksize": 256})


def damage(rng, a):
    """Another tensor, one with bad values, memory of another argument, or another number."""
    tensors = [key for key, value in a.items() if isinstance(value, torch.Tensor)]
    key, kind = rng.choice(tensors), rng.randrange(6)
    if kind == 0:
        a[rng.choice(("lr", "beta1", "beta2", "eps", "weight_decay", "gnorm_scale"))] = rng.choice(NUMBERS)
    elif kind == 1:
        a[rng.choice(("algorithm", "step"))] = rng.choice((-1, 0, 6, 7, 2**31, 2**62))
    elif kind == 2 and "blocksize" in a:
        a["blocksize"] = rng.choice((0, -1, 1, 64, 255, 512, 4096, 2**40))
    elif kind == 3:
        a[key] = shared(rng, a[key], a[rng.choice(tensors)])
    else:
        changed = another(rng, a[key])
        a[key] = changed if isinstance(changed, torch.Tensor) else a[key]


def shared(rng, tensor, other):
    """The memory of another argument, or memory that begins some elements further: the arguments overlap."""
    if other.is_meta or other.is_sparse or not other.numel():
        return tensor
    return other if rng.random() < 0.5 else other.flatten()[rng.randrange(other.numel()) :]


def overlaps(left, right):
    """Whether two tensors share a byte."""
    spans = [(t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for t in (left, right)]
    return all(end > begin for begin, end in spans) and spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]


def strided(tensors):
    return [t for t in tensors if not t.is_meta and t.layout is torch.strided]


@pytest.mark.parametrize("kind", ["32", "8"])
def test_damaged_calls(kind):
    """A refused call changes nothing; one that is taken gives what the same values in memory of their own give."""
    op = ops.optimizer_32bit if kind == "32" else ops.optimizer_8bit_blockwise
    rng, taken, refused = random.Random(int(kind)), 0, 0
    for _ in range(4000):
        a = arguments(rng, rng.choice(ALGORITHMS), kind)
        for _ in range(rng.choice((1, 1, 2))):
            damage(rng, a)
        tensors = [value for value in a.values() if isinstance(value, torch.Tensor)]
        before = [t.clone() for t in strided(tensors)]
        own = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in a.items()}
        try:
            op(*a.values())
        except (RuntimeError, NotImplementedError) as error:
            refused += 1
            assert not str(error).startswith("INTERNAL"), error
            assert all(map(same_bytes, strided(tensors), before)), error
            continue
        taken += 1
        if len(strided(tensors)) == len(tensors):
            op(*own.values())
            left, right = ([v for v in it.values() if isinstance(v, torch.Tensor)] for it in (a, own))
            alone = [sum(overlaps(t, u) for u in left) <= 1 for t in left]  # unorm is not always used
            shapes = {key: (v.dtype, tuple(v.shape)) for key, v in a.items() if isinstance(v, torch.Tensor)}
            assert all(same_bytes(t, u) for t, u, one in zip(left, right, alone, strict=True) if one), shapes
    assert taken > 500 and refused > 500, (taken, refused)


# ---- leaks ----


@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit", "Lion32bit", "LAMB32bit"])
def test_steps_do_not_leak(name):
    """Steps after the first ones leave no Python object behind, and no memory beside Python's."""
    params = [nn.Parameter(torch.randn(shape)) for shape in ((64, 64), (5,), (16, 16))]
    params.append(nn.Parameter(torch.randn(32, 32).t()))
    optimizer = make(name, params, min_8bit_size=1)
    set_gradients(optimizer, 0)
    for _ in range(200):
        optimizer.step()
    resident, traced = resident_bytes(), []
    tracemalloc.start()
    try:
        for _ in range(20):
            optimizer.step()
        for _ in range(4):
            traced.append(tracemalloc.get_traced_memory()[0])
            for _ in range(200):
                optimizer.step()
        traced.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    for _ in range(1500):
        optimizer.step()
    # A leak grows every time; what another thread of the process allocates, the runner's own, does so once.
    grown = min(after - before for before, after in itertools.pairwise(traced))
    assert grown < 200 * 16, f"{traced} bytes after every 200 steps"  # less than the smallest object a step
    assert resident_bytes() - resident < 8 * 2**20  # one state tensor of 16 KiB a step would be 24 MiB
