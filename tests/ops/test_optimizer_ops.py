"""Optimizer steps of the C core: against the reference, equal on all instruction sets, and what they refuse."""

import itertools

import cases
import pytest
import reference
import torch
from bitshard import _C, ops
from bitshard.formats import maps
from helpers.alike import agree, by_isa, by_threads
from helpers.bytes import resident_bytes, same_bytes

NAMES = ("adam", "momentum", "rmsprop", "adagrad", "lion", "ademamix")
TWO_MOMENTS = ("adam", "ademamix")
PAIRS = list(itertools.product(cases.DTYPES, cases.DTYPES))  # dtypes of g and p
SIZES = (1, 5, 255, 256, 257, 1001, 5 * 256, 16384 + 300)
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def numbers(**changed) -> dict:
    """Hyperparameters as the C core sees them: rounded to float32."""
    h = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "beta3": 0.9999, "alpha": 5.0, "eps": 1e-8, "weight_decay": 0.0}
    h |= {"max_unorm": 0.0, "param_norm": 0.0, "gnorm_scale": 1.0} | changed
    h = {key: torch.tensor(value, dtype=torch.float32).item() for key, value in h.items() if key != "skip_zeros"}
    return h | {"step": int(h.get("step", 2)), "skip_zeros": changed.get("skip_zeros", False)}


def inputs(n: int, g_dtype: torch.dtype, p_dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients over many magnitudes, a seventh of them zero, and parameters."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(n, generator=generator) * torch.rand(n, generator=generator) ** 6 * 0.1
    g[3::7] = 0
    return g.to(g_dtype), torch.randn(n, generator=generator).to(p_dtype)


def first_moments(name: str) -> int:
    return 2 if name == "ademamix" else 1


def call(op, device, g: torch.Tensor, tensors: tuple[torch.Tensor, ...], *numbers) -> None:
    """The op on copies on the device, which are copied back; on the CPU on the tensors themselves."""
    there = [tensor.to(device) for tensor in tensors]
    op(g.to(device), *there, *numbers)
    for tensor, result in zip(tensors, there, strict=True):
        if tensor is not result:
            tensor.copy_(result)


class Float:
    """A parameter with 32-bit states."""

    def __init__(self, name: str, p: torch.Tensor, seed: int = 1, device="cpu"):
        self.device = device
        generator = torch.Generator().manual_seed(seed)
        n = p.numel()
        squared = name in ("rmsprop", "adagrad")
        s1 = torch.randn(first_moments(name), n, generator=generator) * 0.02
        self.name, self.p = name, p.clone()
        self.state1 = (s1**2 if squared else s1).view(-1)
        self.state2 = torch.rand(n, generator=generator) * 1e-3 if name in TWO_MOMENTS else torch.empty(0)
        self.unorm = torch.zeros(1)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.p, self.state1, self.state2, self.unorm

    def states(self) -> tuple[torch.Tensor, ...]:
        return split(self.name, self.state1, self.state2, self.p.numel())

    def step(self, g: torch.Tensor, h: dict) -> None:
        order = ("lr", "beta1", "beta2", "beta3", "alpha", "eps", "weight_decay", "step")
        rest = ("max_unorm", "param_norm", "gnorm_scale", "skip_zeros")
        algorithm = ops.OPTIMIZERS[self.name]
        call(ops.optimizer_32bit, self.device, g, self.tensors(), algorithm, *(h[key] for key in order + rest))


def split(name: str, state1: torch.Tensor, state2: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
    """The three states that the reference knows; zeros where the algorithm has none."""
    zero = torch.zeros(n, dtype=state1.dtype)
    return state1[:n], state2 if name in TWO_MOMENTS else zero, state1[n:] if name == "ademamix" else zero


class Blocks:
    """A parameter with 8-bit states; random codes."""

    def __init__(self, name: str, p: torch.Tensor, blocksize: int = 256, seed: int = 1, device="cpu"):
        self.device = device
        generator = torch.Generator().manual_seed(seed)
        n, k, two = p.numel(), first_moments(name), name in TWO_MOMENTS
        blocks = ops.block_count(n, blocksize)
        squared = name in ("rmsprop", "adagrad")
        self.name, self.blocksize, self.p = name, blocksize, p.clone()
        self.state1 = torch.randint(128 if squared else 0, 256, (k * n,), dtype=torch.uint8, generator=generator)
        self.state2 = torch.randint(0, 256, (n if two else 0,), dtype=torch.uint8, generator=generator)
        self.absmax1 = torch.rand(k * blocks, generator=generator) * 0.05
        self.absmax2 = torch.rand(blocks if two else 0, generator=generator) * 1e-3
        self.qmap1, qmap2 = maps.create_dynamic_map(), maps.create_dynamic_map(signed=False)
        self.qmap2 = qmap2 if two else torch.empty(0)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.p, self.state1, self.state2, self.qmap1, self.qmap2, self.absmax1, self.absmax2

    def states(self) -> tuple[torch.Tensor, ...]:
        n, blocks = self.p.numel(), ops.block_count(self.p.numel(), self.blocksize)
        first = [
            reference.dequantize_blockwise(
                self.state1[i * n : i * n + n], self.absmax1[i * blocks :], self.qmap1, None, self.blocksize
            )
            for i in range(first_moments(self.name))
        ]
        second = torch.zeros(n)
        if self.name in TWO_MOMENTS:
            second = reference.dequantize_blockwise(self.state2, self.absmax2, self.qmap2, None, self.blocksize)
        return first[0], second, first[-1] if self.name == "ademamix" else torch.zeros(n)

    def codes(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """(codes, absmax, map) of each state, in the order of states()."""
        n, blocks = self.p.numel(), ops.block_count(self.p.numel(), self.blocksize)
        found = [(self.state1[:n], self.absmax1[:blocks], self.qmap1)]
        found += [(self.state2, self.absmax2, self.qmap2)] if self.name in TWO_MOMENTS else []
        return found + ([(self.state1[n:], self.absmax1[blocks:], self.qmap1)] if self.name == "ademamix" else [])

    def step(self, g: torch.Tensor, h: dict) -> None:
        order = ("lr", "beta1", "beta2", "beta3", "alpha", "eps", "weight_decay", "step", "gnorm_scale", "skip_zeros")
        op, numbers = ops.optimizer_8bit_blockwise, [h[key] for key in order]
        call(op, self.device, g, self.tensors(), ops.OPTIMIZERS[self.name], *numbers, self.blocksize)


VARIANTS = {
    "plain": numbers(),
    "first step": numbers(step=1),
    "decay": numbers(weight_decay=0.1),
    "clipped, zeros skipped": numbers(gnorm_scale=0.25, skip_zeros=True, step=100),
}
BOUNDED = {"bounded": numbers(max_unorm=0.02, param_norm=3.0), "not reached": numbers(max_unorm=1e4, param_norm=3.0)}


def assert_near(actual: torch.Tensor, expected: torch.Tensor, bound: torch.Tensor) -> None:
    """|actual - expected| <= bound, all float64."""
    error = (actual.double() - expected).abs()
    worst = int((error - bound).argmax()) if error.numel() else 0
    assert (error <= bound).all(), (worst, actual[worst].item(), expected[worst].item(), bound[worst].item())


def parameter_bound(name: str, p: torch.Tensor, expected: torch.Tensor, g_dtype: torch.dtype, h: dict) -> torch.Tensor:
    """fp32 arithmetic of the update, and up to three roundings of p: of the update, of the decay, and of lr (Lion).

    With 16-bit g and p of one dtype the gradient is rounded after clipping and decay too.
    """
    unit = UNIT[p.dtype]
    spacing = expected.abs().clamp(min=2.0**-14) if p.dtype is torch.float16 else expected.abs()
    change = (expected - p.double()).abs()
    same = unit if g_dtype is p.dtype else UNIT[torch.float32]
    return 2.5 * unit * spacing + change * (32 * UNIT[torch.float32] + 6 * same) + 1e-12


# ---- against the reference ----


@pytest.mark.parametrize("g_dtype, p_dtype", PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_32bit(name, g_dtype, p_dtype, device):
    """p and states after one step, for all variants and odd sizes."""
    variants = VARIANTS | (BOUNDED if name in ("adam", "momentum", "rmsprop") else {})
    for (label, h), n in itertools.product(variants.items(), SIZES):
        g, p = inputs(n, g_dtype, p_dtype)
        it = Float(name, p, device=device)
        expected_p, *expected, squared = reference.optimizer_32bit(name, g, p, it.states(), h)
        it.step(g, h)
        rounded = UNIT[g_dtype] if g_dtype is p_dtype else 0  # of g, where something was done to it
        for actual, state in zip(it.states(), expected, strict=True):
            assert_near(actual, state, (8 * UNIT[torch.float32] + 4 * rounded) * (state.abs() + 0.02) + 1e-12)
        if label in BOUNDED:
            assert it.unorm.item() == pytest.approx(squared, rel=1e-5 + 4 * rounded)
        assert_near(it.p, expected_p, parameter_bound(name, p, expected_p, g_dtype, h))


@pytest.mark.parametrize("g_dtype, p_dtype", PAIRS)
@pytest.mark.parametrize("name", NAMES)
def test_8bit(name, g_dtype, p_dtype, device):
    """p, scales and codes after one step: a code may be one off where a state is at the middle of two values."""
    differ = total = 0
    for (label, h), n in itertools.product(VARIANTS.items(), SIZES):
        g, p = inputs(n, g_dtype, p_dtype)
        it = Blocks(name, p, device=device)
        expected_p, *expected = reference.optimizer_8bit_blockwise(name, g, p, it.states(), h)
        it.step(g, h)
        expected = [state for state, used in zip(expected, (True, name in TWO_MOMENTS, True), strict=True) if used]
        for (codes, absmax, map), state in zip(it.codes(), expected, strict=False):
            wanted, scale = reference.state_codes(state, map, map is it.qmap1, 256)
            torch.testing.assert_close(absmax, scale, rtol=4e-6, atol=0)
            assert ((codes.long() - wanted).abs() <= 1).all(), label
            differ, total = differ + int((codes != wanted).sum()), total + codes.numel()
        assert_near(it.p, expected_p, parameter_bound(name, p, expected_p, g_dtype, h))
    assert differ <= total * 1e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", [Float, Blocks])
def test_it_trains(name, kind, device):
    """200 steps take a quadratic to less than a twentieth of where it began."""
    target = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    it = kind(name, torch.zeros(1000), device=device)
    for tensor in it.tensors()[1:]:
        if tensor.dtype is torch.uint8 or tensor.numel() not in (256, 0):
            tensor.zero_()
    lr = {"momentum": 0.02, "adagrad": 0.3}.get(name, 0.02)
    for step in range(1, 201):
        it.step(it.p - target, numbers(lr=lr, beta2=0.99, alpha=0.5, step=step))
    assert (it.p - target).square().mean() < target.square().mean() / 20


# ---- equal bits ----


def stepped(make, g: torch.Tensor, h: dict, steps: int = 3) -> tuple[torch.Tensor, ...]:
    """The tensors after some steps."""
    it = make()
    for _ in range(steps):
        it.step(g, h)
    return it.tensors()


def hostile(n: int, dtype: torch.dtype) -> torch.Tensor:
    """Gradients with NaN, infinities, denormals, huge ones, and blocks of zeros and of NaN only."""
    g, _ = inputs(n, torch.float32, dtype)
    g[1::11], g[5::97], g[7::89], g[2::31], g[6::83] = 1e-41, float("nan"), float("-inf"), 1e-21, 3e20
    g[256:512], g[512:768] = float("nan"), 0
    return g.to(dtype)


@pytest.mark.parametrize("kind", [Float, Blocks])
@pytest.mark.parametrize("name", NAMES)
def test_instruction_sets_agree(name, kind):
    """Bit for bit, for ordinary and hostile gradients."""
    variants = (*VARIANTS.values(), *BOUNDED.values())
    for (g_dtype, p_dtype), h, n in itertools.product(PAIRS, variants, (7, 1000 + 256, 20000)):
        g, p = inputs(n, g_dtype, p_dtype)
        agree(by_isa(lambda p=p, g=g, h=h: stepped(lambda: kind(name, p), g, h)))
    for (g_dtype, p_dtype), h in itertools.product(PAIRS, variants):
        _, p = inputs(3000, g_dtype, p_dtype)
        g = hostile(3000, g_dtype)
        agree(by_isa(lambda p=p, g=g, h=h: stepped(lambda: kind(name, p), g, h)))


def near_midpoints(number: float) -> torch.Tensor:
    """float32 numbers whose quotients by `number` lie nearest to midpoints of neighbouring float32 numbers.

    number = C 2^-s, C odd; 2 M + 1 twice such a midpoint: (2 M + 1) C = A 2^25 + r with a small r, solved modulo 2^25.
    """
    C = round(number * 2**24)
    C >>= (C & -C).bit_length() - 1
    inverse, found = pow(C, -1, 2**25), []
    for r in range(-1999, 2000, 2):
        odd = r * inverse % 2**25
        A = (odd * C - r) >> 25
        if odd >= 2**24 and 2**23 <= A < 2**24:
            found.append(A * 2.0**-30)
    return torch.tensor(found, dtype=torch.float32)


@pytest.mark.parametrize("step", [1, 2, 3, 5, 7, 11])
def test_quotients_of_roots_agree(step):
    """sqrt(s2) / correction2 is rounded as by a division where that is hardest: a block for each root, p the update."""
    roots = near_midpoints(torch.tensor((1 - 0.5**step) ** 0.5, dtype=torch.float32).item())
    squares = roots * roots
    for other in (squares.nextafter(torch.tensor(0.0)), squares.nextafter(torch.tensor(1.0))):
        squares = torch.where(squares.sqrt() == roots, squares, other)
    assert (squares.sqrt() == roots).double().mean() > 0.9 and len(roots) > 200

    def make() -> Blocks:
        it = Blocks("ademamix", torch.zeros(32 * len(roots)), blocksize=32)
        it.state2.fill_(255)  # the map's 1, and beta2 halves it
        it.absmax2.copy_(2 * squares)
        return it

    h = numbers(beta2=0.5, step=step, eps=0.0)
    agree(by_isa(lambda: stepped(make, torch.zeros(32 * len(roots)), h, steps=1)))


@pytest.mark.parametrize("name", ["adam", "momentum"])
@pytest.mark.parametrize("kind", [Float, Blocks])
def test_threads_and_alignment_do_not_matter(name, kind):
    """The same bits with one and several threads, and at addresses that are multiples of the element only."""
    g, p = inputs(70001, torch.bfloat16, torch.float32)
    h = numbers(max_unorm=0.02, param_norm=3.0)

    def shifted(shift):
        it = kind(name, p)
        for key, tensor in vars(it).items():
            if isinstance(tensor, torch.Tensor):
                moved = torch.empty(tensor.numel() + shift, dtype=tensor.dtype)[shift:]
                setattr(it, key, moved.copy_(tensor))
        it.step(torch.empty(g.numel() + shift, dtype=g.dtype)[shift:].copy_(g), h)
        return it.tensors()

    found = by_threads(lambda: shifted(0), 1, 2)
    agree(found | by_threads(lambda: shifted(1), 3) | {"2, at 3": by_threads(lambda: shifted(3), 2)[2]})


@pytest.mark.parametrize("map", ["linear", "equal", "unsorted", "nan", "no zero"])
def test_any_map(map):
    """Maps that have no table of cells are searched in plain C, with the same codes everywhere."""
    values = maps.create_linear_map()
    if map == "equal":
        values = torch.zeros(256)
    if map == "unsorted":
        values = values.flip(0)
    if map == "nan":
        values[100] = float("nan")
    if map == "no zero":
        values = torch.cat([torch.linspace(-1, -1e-3, 128), torch.linspace(1e-3, 1, 128)])
    g, p = inputs(3000, torch.float32, torch.float32)

    def make():
        it = Blocks("adam", p)
        it.qmap1 = it.qmap2 = values
        return it

    agree(by_isa(lambda: stepped(make, g, numbers())))


@pytest.mark.parametrize("blocksize", [32, 64, 1024, 4096])
@pytest.mark.parametrize("name", ["ademamix", "lion"])
def test_blocksizes(name, blocksize):
    g, p = inputs(9001, torch.float32, torch.bfloat16)
    agree(by_isa(lambda: stepped(lambda: Blocks(name, p, blocksize), g, numbers())))


# ---- gradients that are no numbers, and parameters that are hardly there ----


@pytest.mark.parametrize("name", NAMES)
def test_bad_gradients_stay_where_they_are(name, device):
    """8-bit: they leave their parameter and clear its states, and nothing else. 32-bit: only their element is lost."""
    g, p = inputs(1000, torch.float32, torch.float32)
    bad = torch.zeros(1000, dtype=torch.bool)
    bad[[3, 255, 256, 700]] = True
    it = Blocks(name, p, device=device)
    it.step(torch.where(bad, float("nan"), g), numbers())
    assert it.p.isfinite().all() and torch.equal(it.p[bad], p[bad])
    assert all((state[bad] == 0).all() and state.isfinite().all() for state in it.states())
    clean, it = Float(name, p, device=device), Float(name, p, device=device)
    clean.step(g, numbers())
    it.step(torch.where(bad, float("inf"), g), numbers())
    assert torch.equal(it.p[~bad], clean.p[~bad]) and not it.states()[0][bad].isfinite().any()


@pytest.mark.parametrize("name", NAMES)
def test_small_moments_keep_their_sign(name):
    """A first moment far below the largest of its block does not become zero, unless it is positive."""
    g = torch.full((256,), -1e-9)
    g[0] = 1.0
    it = Blocks(name, torch.zeros(256))
    it.state1.fill_(127)
    it.step(g, numbers())
    if name in ("rmsprop", "adagrad"):
        assert (it.state1[1:] == 127).all()
    else:
        assert (it.state1[1:256] == 126).all()


@pytest.mark.parametrize("kind", [Float, Blocks])
@pytest.mark.parametrize("name", NAMES)
def test_no_elements_and_no_dimensions(name, kind, device):
    kind(name, torch.empty(0), device=device).step(torch.empty(0), numbers())
    it, flat = kind(name, torch.tensor([0.5]), device=device), kind(name, torch.tensor([0.5]), device=device)
    it.p = torch.tensor(0.5)
    it.step(torch.tensor(0.25), numbers())
    flat.step(torch.tensor([0.25]), numbers())
    assert it.p.dim() == 0 and it.p != 0.5 and torch.equal(it.p, flat.p[0])


@pytest.mark.parametrize("kind", [Float, Blocks])
def test_zeros_are_skipped(kind, device):
    """With skip_zeros an element without gradient keeps p and its states; without it, momentum moves it."""
    g, p = inputs(1000, torch.float32, torch.float32)
    kept, moved = kind("adam", p, device=device), kind("adam", p, device=device)
    before = [state.clone() for state in kept.states()]
    kept.step(g, numbers(skip_zeros=True, weight_decay=0.1))
    moved.step(g, numbers(weight_decay=0.1))
    zero = g == 0
    assert torch.equal(kept.p[zero], p[zero]) and not torch.equal(moved.p[zero], p[zero])
    assert torch.equal(kept.p[~zero], moved.p[~zero])
    if kind is Float:
        assert all(torch.equal(a[zero], b[zero]) for a, b in zip(kept.states(), before, strict=True))


def test_gradient_is_only_read(device):
    g, p = inputs(1000, torch.float32, torch.float32)
    view = g.repeat_interleave(2)[::2]  # not contiguous
    before, it, plain = g.clone(), Blocks("adam", p, device=device), Blocks("adam", p, device=device)
    it.step(view, numbers(gnorm_scale=0.5))
    plain.step(g, numbers(gnorm_scale=0.5))
    assert torch.equal(g, before) and torch.equal(it.p, plain.p)


# ---- refused ----


def changed(it, g: torch.Tensor, attribute: str, tensor: torch.Tensor, match: str, **h) -> None:
    """The step is refused with these words, and nothing has changed."""
    if attribute == "g":
        g = tensor
    elif attribute:
        setattr(it, attribute, tensor)
    before = [t.clone() for t in it.tensors()]
    with pytest.raises(RuntimeError, match=match):
        it.step(g, numbers(**h))
    assert all(same_bytes(a, b) for a, b in zip(it.tensors(), before, strict=True))


@pytest.mark.parametrize("kind", [Float, Blocks])
def test_not_contiguous_is_refused(kind):
    """What is changed in place is never copied in silence."""
    attributes = (
        ("p", "state1", "state2", "unorm") if kind is Float else ("p", "state1", "state2", "absmax1", "absmax2")
    )
    for attribute in attributes:
        g, p = inputs(1000, torch.float32, torch.float32)
        it = kind("adam", p)
        tensor = getattr(it, attribute)
        strided = (
            torch.stack([tensor, tensor], 1)[:, 0] if tensor.numel() > 1 else torch.zeros(2).view(2, 1).expand(2, 2)
        )
        changed(it, g, attribute, strided, f"{attribute}, .*is not contiguous", max_unorm=1.0)


WRONG = [
    ("p", lambda t: t[:-1], "p has 999 elements, expected 1000"),
    ("p", lambda t: t.double(), "p must be float32, float16 or bfloat16"),
    ("g", lambda t: t.int(), "g must be float32, float16 or bfloat16"),
    ("g", lambda t: t[:0], "p has 1000 elements, expected 0"),
    ("state1", lambda t: t[:-1], "state1 has 999 elements, expected 1000"),
    ("state1", lambda t: t.double(), "state1 has ScalarType"),
    ("state2", lambda t: t[:0], "state2 has 0 elements, expected 1000"),
    ("state2", lambda t: t.half(), "state2 has ScalarType"),
]
WRONG_BLOCKS = [
    ("absmax1", lambda t: t[:3], "absmax1 has 3 elements, expected 4"),
    ("absmax2", lambda t: t[:0], "absmax2 has 0 elements, expected 4"),
    ("absmax1", lambda t: t.double(), "absmax1 has ScalarType"),
    ("qmap1", lambda t: t[:16], "qmap1 has 16 elements, expected 256"),
    ("qmap2", lambda t: torch.cat([t, t]), "qmap2 has 512 elements, expected 256"),
    ("qmap1", lambda t: t.half(), "qmap1 has ScalarType"),
]


@pytest.mark.parametrize(
    "kind, attribute, change, match",
    [(kind, *wrong) for kind in (Float, Blocks) for wrong in WRONG]
    + [(Blocks, *wrong) for wrong in WRONG_BLOCKS]
    + [(Float, "unorm", lambda t: t[:0], "unorm has 0 elements, expected 1")],
)
def test_wrong_tensors_are_refused(kind, attribute, change, match):
    g, p = inputs(1000, torch.float32, torch.float32)
    it = kind("adam", p)
    changed(it, g, attribute, change(g if attribute == "g" else getattr(it, attribute)), match, max_unorm=1.0)


@pytest.mark.parametrize("kind", [Float, Blocks])
def test_wrong_numbers_are_refused(kind):
    g, p = inputs(1000, torch.float32, torch.float32)
    changed(kind("adam", p), g, "", g, "step is 0: the first step is 1", step=0)
    it = kind("lion", p)
    changed(it, g, "state2", kind("adam", p).state2, "state2 has 1000 elements, expected 0")
    it = kind("ademamix", p)
    changed(it, g, "state1", it.state1[:1000], "state1 has 1000 elements, expected 2000")
    for number in (-1, 6, 2**40):
        it.name = "none"
        with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match=f"no algorithm {number}"):
            patch.setitem(ops.OPTIMIZERS, "none", number)
            it.step(g, numbers())


@pytest.mark.parametrize("blocksize", [0, -256, 100, 8192, 2**40])
def test_wrong_blocksizes_are_refused(blocksize):
    g, p = inputs(1000, torch.float32, torch.float32)
    it = Blocks("adam", p)
    it.blocksize = blocksize
    with pytest.raises(RuntimeError, match="blocksize"):
        it.step(g, numbers())


LIST_SETTINGS = (ops.OPTIMIZERS["adam"], 1e-3, 0.9, 0.999, 0.0, 0.0, 1e-8, 0.0, 1, 1.0, False)
LIST_BYTES = {  # of each tensor of a parameter of 300 elements, in two blocks
    "blocks": {
        "p": 1200,
        "state1": 300,
        "state2": 300,
        "absmax1": 8,
        "absmax2": 8,
        "g": 1200,
        "map1": 1024,
        "map2": 1024,
    },
    "float": {"p": 1200, "state1": 1200, "state2": 1200, "g": 1200},
}


def list_parameter(kind: str, memory: torch.Tensor, begins: dict[str, int]) -> tuple:
    """(g, p, state1, state2, map1, map2, absmax1, absmax2) in `memory`, each from its byte on."""
    found = {}
    for name, size in LIST_BYTES[kind].items():
        part = memory[begins[name] : begins[name] + size]
        found[name] = part if kind == "blocks" and name.startswith("state") else part.view(torch.float32)
    return tuple(map(found.get, ("g", "p", "state1", "state2", "map1", "map2", "absmax1", "absmax2")))


@pytest.mark.parametrize("kind", LIST_BYTES)
def test_many_at_once_leave_overlapping_tensors_to_the_ops(kind):
    """Where one that is written ends four bytes behind the begin of another nothing is done; beside it all is."""
    sizes, begins, end = LIST_BYTES[kind], {}, 0
    for name, size in sizes.items():
        begins[name], end = end, end + (size + 7) // 8 * 8
    memory = torch.zeros(end + 4096, dtype=torch.uint8)
    parameter = list_parameter(kind, memory, begins)
    assert _C.optimizer_steps([(LIST_SETTINGS, [parameter])])
    before = memory.clone()
    read = {"g", "map1", "map2"}
    for one, other in itertools.permutations(sizes, 2):
        if {one, other} <= read:
            continue
        changed = begins | {one: end}
        changed[other] = end + sizes[one] - 4  # the last element of one
        parameter = list_parameter(kind, memory, changed)
        assert not _C.optimizer_steps([(LIST_SETTINGS, [parameter])]), (one, other)
        assert torch.equal(memory, before)
        changed[other] += 4
        apart = list_parameter(kind, memory.clone(), changed)
        assert _C.optimizer_steps([(LIST_SETTINGS, [apart])]), (one, other)


# ---- leaks ----

NUMBERS = (0, 1e-3, 0.9, 0.999, 0.0, 0.0, 1e-8, 0.01, 2)
LEAK_CALLS = {
    "optimizer_32bit": lambda a: ops.optimizer_32bit(
        a["g"].t(), *(a[key] for key in ("p", "s1", "s2", "none")), *NUMBERS, 0.0, 0.0, 1.0, False
    ),
    "optimizer_8bit_blockwise": lambda a: ops.optimizer_8bit_blockwise(
        *(a["g"].t(), *(a[key] for key in ("p", "c1", "c2", "map", "map", "a1", "a2"))), *NUMBERS, 1.0, False, 256
    ),
}


@pytest.mark.parametrize("name", LEAK_CALLS)
@pytest.mark.parametrize("fails", [False, True])
def test_leak(name, fails):
    """Memory stays flat over many calls, of refused ones too; g is copied in each, since it is not contiguous."""
    a = {key: torch.rand(256, 512) for key in ("p", "s1", "s2")} | {"g": torch.rand(512, 256)}
    a |= {key: torch.zeros(256, 512, dtype=torch.uint8) for key in ("c1", "c2")}
    a |= {"a1": torch.zeros(512), "a2": torch.zeros(512), "map": ops.table("dynamic"), "none": torch.empty(0)}
    if fails:
        a |= {"s2": a["s2"].double(), "a2": a["a2"].double()}

    def call():
        if not fails:
            return LEAK_CALLS[name](a)
        with pytest.raises(RuntimeError, match=f"{name}: "):
            LEAK_CALLS[name](a)

    for _ in range(10):
        call()
    before = resident_bytes()
    for _ in range(100):
        call()
    assert resident_bytes() - before < 8 * 2**20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_blocks_of_a_gpu_have_256_elements():
    g, p = inputs(1000, torch.float32, torch.float32)
    it = Blocks("adam", p, blocksize=512, device="cuda")
    with pytest.raises(RuntimeError, match="blocksize is 512: on a GPU it must be 256"):
        it.step(g, numbers())


# ---- codes on a GPU ----


def near_thresholds(map: torch.Tensor) -> torch.Tensor:
    """The middles between entries and their neighbours, and entries, all in [-1, 1]."""
    middles = (map[1:] + map[:-1]) * 0.5
    up, down = torch.nextafter(middles, torch.tensor(2.0)), torch.nextafter(middles, torch.tensor(-2.0))
    found = torch.cat([middles, up, down, map, torch.tensor([0.0, -0.0, 2.0**-24, -(2.0**-24), 1e-30, -1e-30])])
    return found[(found.abs() <= 1) & ((found.abs() >= 2.0**-126) | (found == 0))]  # a GPU knows no denormals


def other_maps() -> dict[str, torch.Tensor]:
    found = {"dynamic": maps.create_dynamic_map(), "linear": maps.create_linear_map(), "equal": torch.zeros(256)}
    found |= {"unsigned": maps.create_dynamic_map(signed=False), "unsorted": found["linear"].flip(0)}
    found["no zero"] = torch.cat([torch.linspace(-1, -1e-3, 128), torch.linspace(1e-3, 1, 128)])
    found["nan"] = found["dynamic"].clone()
    found["nan"][100] = float("nan")
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("map", ["dynamic", "linear", "equal", "unsigned", "unsorted", "no zero", "nan"])
def test_codes_of_a_gpu(map):
    """Every code that the CPU gives: at thresholds and beside them, random states, blocks of zeros, NaN, infinities.

    Momentum's first step and Adam with betas of 0 take the gradient itself and its square for states, and blocks with
    a largest magnitude of 1 divide by 1.
    """
    values = other_maps()[map]
    states = torch.cat([near_thresholds(values.nan_to_num()), near_thresholds(maps.create_dynamic_map())])
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(200_000, generator=generator).clamp(-1, 1) * torch.rand(200_000, generator=generator) ** 8
    g = torch.cat([states, states.abs().sqrt(), random])
    g = torch.nn.functional.pad(g, (0, -g.numel() % 255)).view(-1, 255)
    g = torch.nn.functional.pad(g, (1, 0), value=1.0).flatten()
    g = torch.cat([g, torch.zeros(256), hostile(1000, torch.float32)])
    for name, h in (("momentum", numbers(step=1)), ("adam", numbers(beta1=0.0, beta2=0.0)), ("ademamix", numbers())):
        results = []
        for device in ("cpu", "cuda"):
            it = Blocks(name, torch.zeros(g.numel()), device=device)
            it.qmap1, it.qmap2 = values, values if name != "momentum" else it.qmap2
            if name == "ademamix":
                it.qmap2 = maps.create_dynamic_map(signed=False)
            it.step(g, h)
            results.append(it.tensors()[1:])
        if name == "ademamix":  # scales of any kind: the reciprocal of the GPU is approximate
            wrong = sum(int((a != b).sum()) for a, b in zip(*results, strict=True) if a.dtype is torch.uint8)
            assert wrong <= 1e-3 * g.numel()
        else:
            whole = g.numel() - 1000  # behind them scales are no powers of two
            for a, b in zip(*results, strict=True):
                a, b = (a[:whole], b[:whole]) if a.numel() == g.numel() else (a[: whole // 256], b[: whole // 256])
                assert same_bytes(a, b)
