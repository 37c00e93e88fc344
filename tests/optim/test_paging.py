"""Paged state on its way through slots: on the CPU, which goes the way of a GPU here, beside unpaged optimizers."""

import copy
import io
import random
import re
from contextlib import contextmanager

import pytest
import torch
from bitshard.optim import paged, paging, update
from helpers.optim import PAGED, gradients, make, train, values_of
from torch import nn

SHAPES = ((60, 200), (7,), (1001, 3), (255,), (4096,), (1,), (257, 9))
NAMES = [f"{name}{bits}bit" for name in PAGED for bits in (8, 32)]


@pytest.fixture(autouse=True)
def slots(monkeypatch):
    """All states from 7 elements on are paged, in slots of at least nothing; the budget is a third of the states."""
    monkeypatch.setattr(paging, "ON_CPU", True)
    monkeypatch.setattr(paging, "PAGED_FROM", 7)
    monkeypatch.setattr(paging, "LEAST_SLOT", 1)
    monkeypatch.setenv("BITSHARD_PAGING_MB", "0.04")


def parameters(dtype=torch.float32, shapes=SHAPES):
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def assert_same(ours, theirs):
    """The same parameters and states, bit for bit; `ours` are paged."""
    pairs = zip(ours.param_groups, theirs.param_groups, strict=True)
    for p, q in (pair for one, two in pairs for pair in zip(one["params"], two["params"], strict=True)):
        assert torch.equal(p, q)
        left, right = ours.state[p], theirs.state[q]
        assert left.keys() == right.keys() and left["step"] == right["step"]
        for key, value in left.items():
            assert not isinstance(value, torch.Tensor) or (
                torch.equal(value, right[key]) and value.shape == right[key].shape
            )
        assert paging.is_paged(left["state1"]) == (p.numel() >= 7)


def pair(name, dtype=torch.float32, shapes=SHAPES, **options):
    params, others = parameters(dtype, shapes), parameters(dtype, shapes)
    return make(f"Paged{name}", params, **options), make(name, others, **options), params, others


# ---- the plan ----


@pytest.mark.parametrize("room", [1, 255, 512, 4096, 5000, 10**6])
def test_plan_has_all_elements_once_in_slots_that_fit(room):
    sizes, widths = [1000, 256, 1, 3, 70_000, 255, 513], [2, 8, 12, 3, 2, 4, 1]
    slots = paging.cut(sizes, widths, room)
    chunks = [chunk for slot in slots for chunk in slot]
    ends = [0] * len(sizes)
    for index, begin, end in chunks:
        assert begin == ends[index] and begin < end and begin % 256 == 0 and (end % 256 == 0 or end == sizes[index])
        ends[index] = end
    assert ends == sizes and chunks == sorted(chunks)
    for slot in slots:
        used = [-(-(end - begin) // 256) * 256 * widths[index] for index, begin, end in slot]
        assert sum(used) <= room or (len(used) == 1 and slot[0][2] - slot[0][1] <= 256)
    if room == 10**6:
        assert len(slots) == 1
    assert paging.cut([], [], room) == []


def test_slots_are_within_the_budget(monkeypatch):
    monkeypatch.setattr(paging, "LEAST_SLOT", 4 * 2**20)
    big = [268_000_000]
    assert paging.slot_room(big, [8], 256 * 2**20) == 64 * 2**20
    assert 31 * 2**20 <= paging.slot_room(big, [2], 256 * 2**20) <= 33 * 2**20
    assert paging.slot_room([100_000] * 100, [2] * 100, 256 * 2**20) == 4 * 2**20
    assert paging.slot_room([100_000], [12], 1) == 12 * 256


@pytest.mark.parametrize("text", ["0", "-1", "nan", "much", "inf"])
def test_nonsense_for_a_budget(monkeypatch, text):
    monkeypatch.setenv("BITSHARD_PAGING_MB", text)
    ours, _, params, _ = pair("AdamW8bit")
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="BITSHARD_PAGING_MB must be"):
        train(ours, params, range(1))
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


# ---- steps ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mib", ["0.00001", "0.04", "64"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_unpaged_state(monkeypatch, name, mib, dtype):
    monkeypatch.setenv("BITSHARD_PAGING_MB", mib)
    ours, theirs, params, others = pair(name, dtype, min_8bit_size=200)
    train(ours, params, range(4))
    train(theirs, others, range(4))
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit", "Lion32bit"])
@pytest.mark.parametrize("possible", [True, False])
def test_op_by_op(monkeypatch, name, possible):
    """Where one call for all is not possible, chunks go through the ops."""
    ours, theirs, params, others = pair(name)
    train(theirs, others, range(2))
    calls = []
    real = update._C
    functions = {
        "optimizer_steps": lambda self, batches: calls.append(1) or (possible and real.optimizer_steps(batches)),
        "optimizer_fits": lambda self, batches: possible and real.optimizer_fits(batches),
    }
    monkeypatch.setattr(update, "_C", type("C", (), functions)())
    train(ours, params, range(2))
    assert len(calls) > 8
    assert_same(ours, theirs)


def test_budget_bounds_the_buffer(monkeypatch):
    """States of three times the budget and more; one block of each is the least."""
    ours, _, params, _ = pair("AdamW32bit")
    train(ours, params, range(1))
    (pager,) = ours.paging._pagers.values()
    states = sum(value.nbytes for state in ours.state.values() for value in state.values() if paging.is_paged(value))
    assert sum(buffer.numel() for buffer in pager.buffers) <= paging.budget() <= states / 3
    assert len(pager.buffers) == paging.RING < len(pager.slots)


def test_neighbours_are_one_copy(monkeypatch):
    """Small states that stand one behind another on the host move at once."""
    monkeypatch.setenv("BITSHARD_PAGING_MB", "64")
    monkeypatch.setattr(paging, "LEAST_SLOT", 2**18)
    ours, theirs, params, others = pair("AdamW8bit", shapes=[(300, 20)] * 40)
    train(ours, params, range(2))
    train(theirs, others, range(2))
    assert_same(ours, theirs)
    (pager,) = ours.paging._pagers.values()
    assert [len(slot.parts) for slot in pager.slots] == [22, 19]  # one parameter is cut
    assert [len(slot.copies) for slot in pager.slots] == [2, 2]


@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix32bit"])
def test_groups_strides_and_missing_gradients(name):
    """Settings of two groups in one slot; what is not contiguous; gradients that are missing in some steps."""
    made = []
    for prefix in ("Paged", ""):
        params = parameters(shapes=((300, 200), (5000,), (9, 1000)))
        params[0] = nn.Parameter(params[0].detach().t())
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.3, "weight_decay": 0.0}]
        optimizer = make(prefix + name, groups)
        for step in range(4):
            for index, p in enumerate(params):
                p.grad = gradients(params, step)[index].t().contiguous().t() if index != step else None
            optimizer.step()
        made.append(optimizer)
    assert_same(*made)
    assert made[0].param_groups[0]["params"][0].stride() == (1, 200)


@pytest.mark.parametrize("name", ["AdamW32bit", "AdEMAMix8bit", "Lion32bit"])
def test_bounded_updates_take_the_whole_parameter(name):
    ours, theirs, params, others = pair(name)
    for optimizer in (ours, theirs):
        optimizer.args.max_unorm = 0.02
    train(ours, params, range(3))
    train(theirs, others, range(3))
    assert_same(ours, theirs)


def test_update_step_by_itself():
    """As a subclass that calls it for one parameter."""
    ours, theirs, params, others = pair("AdamW8bit")
    for optimizer, ps in ((ours, params), (theirs, others)):
        train(optimizer, ps, range(1))
        optimizer.update_step(optimizer.param_groups[0], ps[0], 0, 0)
    assert_same(ours, theirs)


def test_scheduled_rates_and_versions():
    """The slots are those of the step before; the rate is the new one; autograd sees the change."""
    ours, theirs, params, others = pair("AdamW8bit")
    known = None
    for step in range(3):
        versions = [p._version for p in params]
        train(ours, params, [step])
        train(theirs, others, [step])
        slots = next(iter(ours.paging._pagers.values())).slots
        assert step == 0 or slots is known
        assert all(p._version > version for p, version in zip(params, versions, strict=True))
        known = slots
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] *= 0.5
    assert_same(ours, theirs)


def test_a_parameter_that_is_there_twice_is_stepped_twice(monkeypatch):
    """torch warns only. The second update must not begin from a state that the first has not left yet."""
    monkeypatch.setenv("BITSHARD_PAGING_MB", "64")
    made = []
    for times in (1, 2):
        params = parameters(shapes=((60, 200), (30, 300)))
        optimizer = make("PagedAdamW32bit" if times == 1 else "AdamW32bit", params)
        if times == 1:
            optimizer.param_groups[0]["params"] = [*params, params[0]]
            train(optimizer, params, range(1))
        else:
            train(optimizer, params, range(1))
            params[1].grad = None
            optimizer.step()
        made.append((params, optimizer))
    (params, ours), (others, theirs) = made
    assert [ours.state[p]["step"] for p in params] == [2, 1]
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q) and torch.equal(ours.state[p]["state1"], theirs.state[q]["state1"])


# ---- the order of streams ----


class Streams:
    """`_Lanes` whose streams run what they have as late as they may, in any order that their events allow."""

    cuda = False

    def __init__(self, seed):
        self.random, self.kept = random.Random(seed), None
        self.fetch, self.keep, self.updates = queues = ([], [], [])
        self.queues, self.ran, self.lane = queues, [0, 0, 0], self.updates

    @contextmanager
    def on(self, lane):
        before, self.lane = self.lane, lane
        yield
        self.lane = before

    def current(self):
        return self.updates

    def mark(self, lane):
        return self.queues.index(next(q for q in self.queues if q is lane)), len(lane)

    def wait(self, lane, event):
        if event is not None:
            lane.append(event)

    end, finish = paging._Lanes.end, lambda self: self.kept and self.drain()

    def drain(self):
        """Run all; a stream stands still at an event until what the event is behind has run."""
        while any(ran < len(queue) for ran, queue in zip(self.ran, self.queues, strict=True)):
            ready = [queue[ran : ran + 1] for ran, queue in zip(self.ran, self.queues, strict=True)]
            free = [i for i, work in enumerate(ready) if work and self.passes(work[0])]
            number = self.random.choice(free)
            work = self.queues[number][self.ran[number]]
            if callable(work):
                work()
            self.ran[number] += 1

    def passes(self, work):
        return callable(work) or self.ran[work[0]] >= work[1]


class Late:
    """A tensor that is copied to when the streams come to it."""

    def __init__(self, tensor, streams):
        self.tensor, self.streams = tensor, streams

    def copy_(self, other, non_blocking=False):
        self.streams.lane.append(lambda: self.tensor.copy_(other.tensor))


def states(optimizer, params):
    return [optimizer.state[p][key] for p in params for key in ("state1", "state2")]


@pytest.mark.parametrize("queued", [True, False], ids=["steps queued at once", "steps that wait"])
@pytest.mark.parametrize("seed", range(6))
def test_streams_wait_for_one_another(monkeypatch, seed, queued):
    """Three steps, run in some order that the events allow: the result is that of unpaged state. A step waits until the
    host sees its state, but would not need to for the next one."""
    ours, theirs, params, others = pair("AdamW8bit")
    train(ours, params, range(1))
    train(theirs, others, range(4))
    (pager,) = ours.paging._pagers.values()
    pager.lanes = streams = Streams(seed)
    pager.slots = [
        paging._Slot(slot.parts, [tuple(Late(tensor, streams) for tensor in copy) for copy in slot.copies])
        for slot in pager.slots
    ]
    real = paging._update_slot

    def later(work):
        streams.updates.append(lambda: real(work))
        return None, [True] * len(work.places)

    monkeypatch.setattr(paging, "_update_slot", later)
    with monkeypatch.context() as patch:
        if queued:
            patch.setattr(ours.paging, "finish", lambda: None)
        train(ours, params, range(1, 4))
        assert len(streams.updates) >= 3 * len(pager.slots) and (streams.ran == [0, 0, 0]) == queued
        seen = all(map(torch.equal, states(ours, params), states(theirs, others)))
        assert seen != queued
    ours.paging.finish()
    assert_same(ours, theirs)


# ---- state dicts ----


@pytest.mark.parametrize("saved", [True, False])
@pytest.mark.parametrize("source, reader", [("Paged", "Paged"), ("Paged", ""), ("", "Paged")])
@pytest.mark.parametrize("name", ["AdamW8bit", "AdEMAMix8bit", "AdEMAMix32bit", "Lion32bit"])
def test_state_dicts_of_paged_and_unpaged_optimizers(name, source, reader, saved):
    """Written after two steps, read by another optimizer, trained on; sizes on disk are those of the state."""
    params, others = parameters(), parameters()
    first, straight = make(source + name, params), make(name, others)
    train(first, params, range(2))
    train(straight, others, range(4))
    state_dict = copy.deepcopy(first.state_dict())
    if saved:
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        held = sum(v.nbytes for s in first.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        assert file.tell() < held + 100_000
        file.seek(0)
        state_dict = torch.load(file, weights_only=True)
    second = make(reader + name, params)
    second.load_state_dict(state_dict)
    for p in params:
        own = second.state[p]["state1"]
        assert paging.is_paged(own) == (reader == "Paged" and p.numel() >= 7)
        assert own.data_ptr() != first.state[p]["state1"].data_ptr()
    train(second, params, range(2, 4))
    for p, q in zip(params, others, strict=True):
        assert torch.equal(p, q)
        assert torch.equal(values_of(second.state[p], 1), values_of(straight.state[q], 1))


def test_state_from_elsewhere_is_taken():
    """A state that is paged and stands in no arena of this optimizer; one that is not paged and goes there."""
    ours, theirs, params, others = pair("AdamW32bit")
    train(ours, params, range(1))
    train(theirs, others, range(1))
    state = ours.state[params[0]]["state1"]
    ours.state[params[0]]["state1"] = paged.get_paged(*state.shape).copy_(state)
    ours.state[params[4]]["state2"] = ours.state[params[4]]["state2"].clone()
    ours.to_gpu()
    assert all(paging.is_paged(ours.state[params[4]][key]) for key in ("state1", "state2"))
    train(ours, params, range(1, 3))
    train(theirs, others, range(1, 3))
    assert_same(ours, theirs)


def test_arenas_live_as_long_as_their_states():
    pages, device = paging.Pages(), torch.device("cpu")
    states = [pages.take((300,), torch.float32, device) for _ in range(3)]
    arena, offset = pages.place(states[1])
    assert arena.data_ptr() + offset == states[1].data_ptr() and offset % paging.ALIGN == 0
    assert states[1].untyped_storage().nbytes() == 1200 and paging.is_paged(states[1])
    del pages, arena
    states[2].fill_(3.0)
    assert (states[2] == 3.0).all() and (states[0] == 0.0).all()


# ---- failures ----


def failing(monkeypatch, number, after=0, name="update_all"):
    """The calls of `paging.update_all`, of which one fails after that many of its chunks were updated, as in C."""
    calls, real = [], getattr(paging, name)

    def call(batches):
        calls.append(batches)
        if len(calls) != number:
            return real(batches)
        chunks = [(settings, chunk) for settings, own in batches for chunk in own]
        assert not after or real([(settings, [chunk]) for settings, chunk in chunks[:after]])
        error = RuntimeError("the device is gone")
        error.done = [i < after for i in range(len(chunks))]
        raise error

    monkeypatch.setattr(paging, name, call)
    return calls


def changed(params, before):
    """Elements that are others than they were."""
    return [int((p != q).sum()) for p, q in zip(params, before, strict=True)]


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("name", ["AdamW32bit", "AdEMAMix8bit", "Lion8bit"])
def test_a_step_that_failed_in_the_middle_goes_on_and_counts_nothing_twice(monkeypatch, name, after):
    """At every slot: the message counts what has changed; the next step with the same gradients does the rest."""
    number, parted = 1, 0
    while True:
        ours, theirs, params, others = pair(name, shapes=((60, 200), (30, 300)))
        train(ours, params, range(1))
        train(theirs, others, range(2))
        before = [p.detach().clone() for p in params]
        with monkeypatch.context() as patch:
            failing(patch, number, after)
            try:
                train(ours, params, range(1, 2))
                break
            except RuntimeError as error:
                text = str(error)
        whole = int(re.search(r"paged parameters (\d)", text)[1])
        parts = re.findall(r"(\d+) of (\d+) elements", text)
        done = changed(params, before)
        both = list(zip(done, params, strict=True))
        assert sum(n >= 0.99 * p.numel() for n, p in both) == whole, text
        assert [ours.state[p]["step"] for p in params] == [2] * whole + [1] * (2 - whole)
        assert [int(size) for _, size in parts] == [p.numel() for n, p in both if 0 < n < 0.99 * p.numel()]
        assert abs(sum(done) - sum(p.numel() for p in params[:whole]) - sum(int(end) for end, _ in parts)) < 9
        parted += len(parts)
        ours.step()
        assert_same(ours, theirs)
        number += 1
    assert number > 4 and parted > 1
    train(ours, params, range(2, 4))
    train(theirs, others, range(2, 4))
    assert_same(ours, theirs)


def test_half_a_step_takes_no_other_gradient_and_is_not_saved(monkeypatch):
    """The rest of a parameter must not get another gradient, nor the same twice, nor a state dict halves."""
    ours, _, params, _ = pair("AdamW32bit")
    train(ours, params, range(1))
    saved, values = copy.deepcopy(ours.state_dict()), [p.detach().clone() for p in params]
    with monkeypatch.context() as patch:
        failing(patch, 3)
        with pytest.raises(RuntimeError, match="the device is gone"):
            train(ours, params, range(1, 2))
    half = [p.detach().clone() for p in params]
    for p in params:
        p.grad = p.grad.clone()
    for call in (ours.step, ours.state_dict, lambda: copy.deepcopy(ours)):
        with pytest.raises(RuntimeError, match=r"parameter 0 of group 0.* the first \d+ of 12000 elements .*load"):
            call()
    assert all(torch.equal(p, q) for p, q in zip(params, half, strict=True))
    ours.load_state_dict(saved)
    others = parameters()
    fresh = make("PagedAdamW32bit", others)
    with torch.no_grad():
        for p, q, value in zip(params, others, values, strict=True):
            p.copy_(value), q.copy_(value)
    fresh.load_state_dict(saved)
    train(ours, params, range(1, 2))
    train(fresh, others, range(1, 2))
    assert all(torch.equal(p, q) for p, q in zip(params, others, strict=True))


def test_what_is_not_known_after_a_failure_is_not_stepped_again(monkeypatch):
    """A copy back that fails leaves updated parameters beside old states: the step says so, and the next one raises."""
    ours, _, params, _ = pair("AdamW32bit")
    train(ours, params, range(1))
    real = paging._Pager._keep
    kept = []

    def fails(self, slot, after):
        kept.append(slot)
        if len(kept) == 2:
            raise RuntimeError("the link is down")
        return real(self, slot, after)

    with monkeypatch.context() as patch:
        patch.setattr(paging._Pager, "_keep", fails)
        with pytest.raises(RuntimeError, match=r"the link is down .*of \d it is not known"):
            train(ours, params, range(1, 2))
    after = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="it is not known"):
        ours.step()
    assert all(torch.equal(p, q) for p, q in zip(params, after, strict=True))


def test_interrupted_between_slots_goes_on(monkeypatch):
    """Ctrl-C, which is no Exception, counts what was done as other failures do."""
    ours, theirs, params, others = pair("AdamW8bit", min_8bit_size=200)
    train(ours, params, range(1))
    train(theirs, others, range(2))
    real, fetched = paging._Pager._fetch, []

    def interrupted(self, slot, after):
        fetched.append(slot)
        if len(fetched) == paging.RING + 2:
            raise KeyboardInterrupt
        return real(self, slot, after)

    with monkeypatch.context() as patch:
        patch.setattr(paging._Pager, "_fetch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(ours, params, range(1, 2))
    ours.step()
    assert_same(ours, theirs)


def test_bad_states_and_gradients_are_seen_before_anything_changes():
    ours, _, params, _ = pair("AdamW8bit", min_8bit_size=200)
    train(ours, params, range(1))
    before = [p.detach().clone() for p in params]
    good = ours.state[params[4]]["absmax2"]
    ours.state[params[4]]["absmax2"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"parameter 4 of group 0.*absmax2 is torch.float32 \(3,\), of which 16"):
        train(ours, params, range(1))
    ours.state[params[4]]["absmax2"] = good
    for p in params:
        p.grad = torch.ones_like(p)
    params[2].grad = torch.sparse_coo_tensor([[0], [0]], [1.0], params[2].shape)
    with pytest.raises(TypeError, match="parameter 2 of group 0"):
        ours.step()
    assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))


def test_what_fits_is_checked_at_once(monkeypatch):
    """In C; what it declines is looked at parameter by parameter, for reasons and for what it does not know."""
    ours, theirs, params, others = pair("AdamW8bit", min_8bit_size=200)
    train(ours, params, range(1))
    train(theirs, others, range(1))
    checked = []
    check = type(ours)._check
    monkeypatch.setattr(
        type(ours), "_check", lambda self, group, p, *place: checked.append(p) or check(self, group, p, *place)
    )
    train(ours, params, range(1, 2))
    small = [p for p in params if not paging.is_paged(ours.state[p]["state1"])]
    assert not checked and len(small) == 1
    params[2].grad = params[2].grad.t().contiguous().t()
    ours.step()
    assert len(checked) == len(params) - len(small)
    train(theirs, others, range(1, 2))
    theirs.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize(
    "key, value",
    [
        ("state1", torch.zeros(8, dtype=torch.uint8)),
        ("state2", torch.zeros(4096)),
        ("state2", None),
        ("absmax1", torch.zeros(16, dtype=torch.float64)),
        ("absmax2", torch.zeros(17)),
        ("qmap1", torch.zeros(255)),
    ],
)
def test_what_does_not_fit(key, value):
    ours, _, params, _ = pair("AdamW8bit", min_8bit_size=200)
    train(ours, params, range(1))
    state, settings = ours.state[params[4]], ours._settings(ours.get_config(0, 4, ours.param_groups[0]), 2)
    assert update.fits([(settings, [ours._parameter(params[4], state)])])
    state[key] = value
    assert not update.fits([(settings, [ours._parameter(params[4], state)])])


@pytest.mark.parametrize("gpu, kind", [(True, "pinned host memory"), (False, "host memory")])
def test_no_memory_to_pin(monkeypatch, gpu, kind):
    def fails(*args, **options):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch, "zeros", fails)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    with pytest.raises(RuntimeError, match=rf"no 3\.00 GiB of {kind} for paged tensors: CUDA error"):
        paged.host_bytes(3 * 2**30)
