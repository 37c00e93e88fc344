"""The base classes of all optimizers: state in 8 or 32 bits, on this rank's shard, updated by the ops of the C core.

A step looks at all parameters first and raises before it changes any. State of a parameter: "step", "state1" and for
two-state algorithms "state2", float32 or uint8 in the shape of this rank's part (AdEMAMix's state1 with a leading 2);
for uint8 also "qmap1" [256], "absmax1" [blocks of 256] and the same for state2; "unorm_vec" [1] where updates are
bounded by max_unorm.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, compress
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from bitshard.formats.maps import create_dynamic_map
from bitshard.optim import paging, saved_state, shards
from bitshard.optim.config import GlobalOptimManager, MockArgs
from bitshard.optim.failed import Failed
from bitshard.optim.paged import GlobalPageManager, prefetch_tensor, say_without_gpu
from bitshard.optim.update import (
    UNBOUNDED,
    Bound,
    Settings,
    Tensors,
    algorithm,
    check_parameter,
    fits,
    update,
    update_all,
)
from bitshard.shards.gather import is_dtensor

DTYPES = {32: torch.float32, 8: torch.uint8}
COPIED = ("initialized", "name2qmap", "is_paged", "args", "optimizer_name", "non_castable_tensor_keys")


class Optimizer8bit(torch.optim.Optimizer):
    """Base of all optimizers; `Optimizer1State` and `Optimizer2State` know the algorithms."""

    _FSDP_WRAPPED_QUANT_STATE_KEY = saved_state.WRAPPED
    _states = 0

    def __init__(self, params: Iterable, defaults: dict[str, Any], optim_bits: int = 32, is_paged: bool = False):
        super().__init__(params, defaults)
        self.initialized = False
        self.name2qmap: dict[str, Tensor] = {}
        self.is_paged = is_paged
        self._begin()
        self.non_castable_tensor_keys = set(saved_state.HIDDEN)
        if optim_bits == 8:
            self.fill_qmap()

    def fill_qmap(self) -> None:
        """The maps of 8-bit state: "dynamic" for signed values, "udynamic" for values from 0 on."""
        self.name2qmap["dynamic"] = create_dynamic_map(signed=True)
        self.name2qmap["udynamic"] = create_dynamic_map(signed=False)

    def _begin(self) -> None:
        """What belongs to one optimizer of one process, and to no copy of it."""
        self._maps: dict[int, Tensor] = {}  # by id: all that are in use, each once
        self.paging = paging.Paging()
        self._failed = Failed()
        self.page_mng = GlobalPageManager.get_instance()
        self.mng = GlobalOptimManager.get_instance()

    # ---- copies ----

    def __getstate__(self) -> dict[str, Any]:
        """What a copy and a pickle hold: as torch's, and the settings, also those of single parameters.

        RuntimeError where a step failed and left a parameter updated in part.
        """
        self._failed.check_whole()
        own = {key: value for key, value in vars(self).items() if key in COPIED}
        configs = [self.mng.pid2config.get(id(p)) for p in self._parameters()]
        return super().__getstate__() | own | {"parameter_configs": configs}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` gave; or parts of it, as `load_state_dict` does."""
        configs = state.get("parameter_configs")
        super().__setstate__({key: value for key, value in state.items() if key != "parameter_configs"})
        if configs is None:
            return
        self._begin()
        for p, config in zip(self._parameters(), configs, strict=True):
            if config is not None:
                self.mng.set_config(p, config)
            page = self._page(p)
            for key in ("state1", "state2") if page and p in self.state else ():
                if (value := self.state[p].get(key)) is not None and not value.is_pinned():
                    self.state[p][key] = page(value)

    def _parameters(self) -> list[Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.param_groups))

    # ---- state dicts ----

    def _lead(self) -> int:
        """1 where state1 is a pair of tensors, else 0."""
        return int(getattr(self, "optimizer_name", "") == "ademamix")

    def _bits(self, group: dict[str, Any], gindex: int, pindex: int) -> int:
        """What the settings of a parameter ask for."""
        return self.get_config(gindex, pindex, group)["optim_bits"] if hasattr(self, "args") else 32

    def state_dict(self) -> dict[str, Any]:
        """As torch's; quantized state of each parameter stands in a dict of its own, and of a DTensor as DTensors.

        Paged state is shared with the optimizer as other state is: the next step changes it. RuntimeError where a step
        failed and left a parameter updated in part.
        """
        self._failed.check_whole()
        saved = super().state_dict()
        places = [(group, g, i) for g, group in enumerate(self.param_groups) for i in range(len(group["params"]))]
        params = {key: (group["params"][i], self._bits(group, g, i)) for key, (group, g, i) in enumerate(places)}
        saved["state"] = {
            key: saved_state.to_entries(value, params[key][0], self._lead(), params[key][1])
            if key in params and value
            else value
            for key, value in saved["state"].items()
        }
        return saved

    def load_state_dict(self, state_dict: dict[str, Any], move_to_device: bool = True) -> None:
        """Take a state dict: one of this class, or of bitsandbytes, of one process or of this mesh of ranks.

        Everything is checked before anything changes. ValueError or TypeError for a state dict of another optimizer,
        dtype, shape or blocksize.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        groups, saved = self.param_groups, state_dict["param_groups"]
        saved_state.check_groups(groups, saved, set(self.defaults) & {"lr", "betas", "eps", "weight_decay"})
        params = self._parameters()
        by_id = dict(zip(chain.from_iterable(group["params"] for group in saved), params, strict=True))
        places = {id(p): index for index, p in enumerate(params)}
        state = defaultdict(dict)
        for key, value in state_dict["state"].items():
            if key not in by_id:
                state[key] = value
                continue
            p = by_id[key]
            try:
                state[p] = saved_state.from_entries(value, p, self._states, self._lead(), move_to_device, self._page(p))
            except (TypeError, ValueError) as error:
                raise type(error)(f"state of {_describe(p, places[id(p)])}: {error}") from error
        merged = [{**other, "params": group["params"]} for group, other in zip(groups, saved, strict=True)]
        self.__setstate__({"state": state, "param_groups": merged})
        self.paging.forget()
        self._failed.forget()
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _page(self, p: Tensor) -> Callable[[Tensor], Tensor] | None:
        """What copies a state of `p` to paged memory; None where it is not paged."""
        part = shards.local(p)
        return (lambda value: self.paging.move(value, part)) if self.is_paged and paging.applies(part) else None

    def to_gpu(self) -> None:
        """Move state to the devices of its parameters, where those are not the CPU, and paged state to the host."""
        for p in self._parameters():
            page = self._page(p)
            for key, value in self.state.get(p, {}).items():
                if not isinstance(value, Tensor) or paging.is_paged(value):
                    continue
                if page and key in ("state1", "state2"):
                    self.state[p][key] = page(value)
                elif p.device.type != "cpu":
                    self.state[p][key] = value.to(p.device)

    # ---- settings ----

    def check_overrides(self) -> None:
        """Find the parameters of `GlobalOptimManager.register_module_override` among those of this optimizer."""
        own = {id(p) for group in self.param_groups for p in group["params"]}
        for module, name, config in self.mng.module_weight_config_triple:
            p = getattr(module, name, None)
            if p is not None and id(p) in own:
                self.mng.set_config(p, config)

    def get_config(self, gindex: int, pindex: int, group: dict[str, Any]) -> dict[str, Any]:
        """The settings of one parameter: its group's and the optimizer's, and over them its own."""
        config = {key: group[key] for key in ("betas", "eps", "weight_decay", "lr")}
        config |= {"alpha": group.get("alpha", 0.0), "t_alpha": group.get("t_alpha"), "t_beta3": group.get("t_beta3")}
        config |= {key: getattr(self.args, key) for key in ("optim_bits", "min_8bit_size", "max_unorm", "skip_zeros")}
        config |= self.mng.index2config.get((gindex, pindex), {})
        return config | self.mng.pid2config.get(id(group["params"][pindex]), {})

    # ---- a step ----

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; the result of `closure`, which computes the loss and the gradients anew.

        TypeError, ValueError or NotImplementedError before any parameter is changed. RuntimeError where a GPU fails:
        then the next step with the same gradients does what is left.
        """
        loss = loss_of(closure)
        if not self.initialized:
            self.check_overrides()
            self.to_gpu()
            self.initialized = True
        work = [
            (group, p, gindex, pindex)
            for gindex, group in enumerate(self.param_groups)
            for pindex, p in enumerate(group["params"])
            if p.grad is not None
        ]
        starts = self._starts(work) if self._failed else {}
        if starts:
            work = [item for item in work if starts[item[1]] is not None]
        states = [self.state.get(item[1]) for item in work]
        if not all(states):
            new = [item for item, state in zip(work, states, strict=True) if not state]
            for group, p, gindex, pindex in new:
                self._check(group, p, gindex, pindex)
            for group, p, gindex, pindex in new:
                self.init_state(group, p, gindex, pindex)
            states = [self.state[item[1]] for item in work]
        self._update_or_note(work, states, starts)
        return loss

    def _update_or_note(self, work: list[tuple], states: list[dict], starts: dict[Tensor, int | None]) -> None:
        """Update all parameters; where that fails, note what was updated, for the next step."""
        before, reached = [state.get("step") for state in states], {}
        try:
            self._update(work, states, starts, reached)
        except BaseException:
            for (_, p, gindex, pindex), state, step in zip(work, states, before, strict=True):
                if state.get("step") != step:
                    reached.setdefault(p, shards.local(p).numel())
                if p in reached:
                    self._failed.note(p, _describe(p, pindex, gindex), reached[p])
            raise
        if self._failed:
            self._failed.forget([*starts, *(p for _, p, _, _ in work)])

    def _starts(self, work: list[tuple]) -> dict[Tensor, int | None]:
        """The first element of each parameter that a failed step has not updated; None where it has updated all."""
        return {p: self._failed.end_of(p) for _, p, _, _ in work}

    def _update(self, work: list[tuple], states: list[dict], starts: dict[Tensor, int | None], reached: dict) -> None:
        """Update all parameters: what can be in one call, then what is paged, the others one by one.

        `reached` takes how far a parameter has come that is not whole: {parameter: elements, or None if not known}.
        """
        batches, single, paged = self._batches(work, states)
        unknown = paged if paged and not fits([(settings, [parameter]) for _, settings, parameter in paged]) else []
        for group, p, gindex, pindex in chain(single, (item for item, _, _ in unknown)):
            self._check(group, p, gindex, pindex)
        streamed = {id(item[1]) for item, _, _ in paged}
        if any(end and id(p) not in streamed for p, end in starts.items()):
            raise RuntimeError("a step failed and left a paged parameter updated in part, which is not paged any more")
        stream = self._stream(paged, starts, reached) if paged else None
        if batches and not self._update_batches(batches):
            again = [item for item in single if id(item[1]) in streamed]
            single = [item for item in work if id(item[1]) not in streamed] + again
            for group, p, gindex, pindex in single:
                self._check(group, p, gindex, pindex)
        if stream:
            stream()
        for item in single:
            self._update_single(item, reached)

    def _stream(self, paged: list[tuple], starts: dict[Tensor, int | None], reached: dict) -> Callable[[], None]:
        """What updates paged parameters, (work, settings, parameter); here its memory is made."""
        run = self.paging.prepare(
            [(settings, parameter) for _, settings, parameter in paged],
            [starts.get(item[1]) or 0 for item, _, _ in paged],
        )

        def note(index: int, end: int | None) -> None:
            (_, p, *_), settings, _ = paged[index]
            if end != shards.local(p).numel():
                reached[p] = end
            else:
                self.state[p]["step"] = settings.step

        return lambda: run(note)

    @staticmethod
    def _update_batches(batches: dict[tuple, list[tuple]]) -> bool:
        """Update all in one call, and count their steps; False where nothing was done."""
        own = [(settings, state) for settings, found in batches.items() for _, state in found]
        try:
            if not update_all([(settings, list(map(itemgetter(0), found))) for settings, found in batches.items()]):
                return False
        except RuntimeError as error:
            _count_steps(compress(own, getattr(error, "done", ())))
            raise
        _count_steps(own)
        return True

    def _update_single(self, item: tuple, reached: dict) -> None:
        group, p, gindex, pindex = item
        state = self.state[p]
        step = state.get("step")
        self.prefetch_state(p)
        try:
            with self.paging.whole(state, shards.local(p).device):
                self.update_step(group, p, gindex, pindex)
        except BaseException:
            if state.get("step") != step:
                reached[p] = None  # updated, and its paged state did not come back to the host
            raise

    def _batches(self, work: list[tuple], states: list[dict]) -> tuple[dict[tuple, list[tuple]], list, list[tuple]]:
        """({settings: [(tensors, its state)]}, work that must be done one by one, [(work,
        settings, parameter)] with paged state)."""
        return {}, work, []

    def _check(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Raise what the update of this parameter would, with its place."""
        try:
            part = shards.local(p)
            check_parameter(part, self._gradient(p))
            state1 = self.state.get(p, {}).get("state1")
            if state1 is None:
                self._state_dtype(p, self.get_config(gindex, pindex, group))
            elif state1.numel() != part.numel() * (1 + self._lead()) or (
                state1.device != part.device and not paging.is_paged(state1)
            ):
                raise ValueError(f"the state is {tuple(state1.shape)} on {state1.device}")
            elif paging.is_paged(state1):
                paging.check_state(self.state[p], part.numel(), self._lead())
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"{_describe(p, pindex, gindex)}: {error}") from error

    @staticmethod
    def _gradient(p: Tensor) -> Tensor:
        """This rank's part of the gradient; ValueError where it is placed otherwise than its parameter."""
        if is_dtensor(p) != is_dtensor(p.grad) or (
            is_dtensor(p) and (p.grad.placements != p.placements or p.grad.device_mesh != p.device_mesh)
        ):
            seen = [str(getattr(tensor, "placements", "no DTensor")) for tensor in (p, p.grad)]
            raise ValueError(f"the parameter is placed {seen[0]}, its gradient {seen[1]}")
        return shards.local(p.grad)

    def _state_dtype(self, p: Tensor, config: dict[str, Any]) -> torch.dtype:
        """float32, or uint8 for optim_bits 8 where the whole parameter has min_8bit_size elements or more."""
        if config["optim_bits"] not in DTYPES:
            raise NotImplementedError(f"Amount of optimizer bits not supported: {config['optim_bits']}")
        return DTYPES[32 if p.numel() < config["min_8bit_size"] else config["optim_bits"]]

    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Make the state of one parameter."""
        raise NotImplementedError("init_state method needs to be overridden")

    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Update one parameter that has a gradient and state."""
        raise NotImplementedError("The update_step method needs to be overridden")

    def get_state_buffer(self, p: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros in the shape of this rank's part of p, contiguous; paged where the optimizer is."""
        return self._buffer(p, dtype, 0)

    def _buffer(self, p: Tensor, dtype: torch.dtype, lead: int) -> Tensor:
        """The same, with a leading 2 for `lead` 1."""
        part = shards.local(p)
        if self.is_paged and paging.applies(part):
            return self.paging.zeros(part, lead, dtype)
        if self.is_paged and part.device.type == "cpu":
            say_without_gpu()
        return torch.zeros((*(2,) * lead, *part.shape), dtype=dtype, device=part.device)

    def prefetch_state(self, p: Tensor) -> None:
        """Start to bring paged state of one parameter to its device; nothing where a step streams it."""
        if self.is_paged:
            for key in ("state1", "state2"):
                if paging.is_paged(self.state[p].get(key)):
                    prefetch_tensor(self.state[p][key])


class _Stateful(Optimizer8bit):
    """What optimizers with one and with two states have in common: arguments, state, update."""

    def _set_up(
        self, name: str, params: Iterable, group: dict[str, Any], args: Any, bits: int, paged: bool, **own: Any
    ):
        """Check and keep the arguments of an optimizer; `own` are settings that `args` replaces."""
        for key, text in (("lr", "learning rate"), ("eps", "epsilon value")):
            if not 0.0 <= group[key]:
                raise ValueError(f"Invalid {text}: {group[key]}")
        for index, beta in enumerate(group["betas"]):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
        if not 0.0 <= group["weight_decay"]:
            raise ValueError(f"Invalid weight_decay value: {group['weight_decay']}")
        algorithm(name)
        Optimizer8bit.__init__(self, params, group, bits, paged)
        self.args = MockArgs({"optim_bits": bits, **own}) if args is None else args
        self.optimizer_name = name

    @torch.no_grad()
    def init_state(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Zeros, in the dtype that the settings and the size of the whole parameter ask for."""
        config = self.get_config(gindex, pindex, group)
        dtype, state = self._state_dtype(p, config), {"step": 0}
        for n, key in enumerate(("dynamic", "udynamic")[: self._states], 1):
            lead = self._lead() if n == 1 else 0
            state[f"state{n}"] = self._buffer(p, dtype, 1) if lead else self.get_state_buffer(p, dtype=dtype)
            if dtype == torch.uint8:
                state[f"qmap{n}"] = self._map(key, shards.local(p).device)
                state[f"absmax{n}"] = saved_state.new_scales(p, lead)
        if config["max_unorm"] > 0.0:
            state["unorm_vec"] = torch.zeros((1,), dtype=torch.float32, device=shards.local(p).device)
        self.state[p].update(state)

    def _batches(self, work: list[tuple], states: list[dict]) -> tuple[dict[tuple, list[tuple]], list, list[tuple]]:
        """As above; one by one go what is bounded by max_unorm or empty, and what a subclass updates."""
        if type(self).update_step is not _Stateful.update_step:
            return {}, work, []
        common = not (self.mng.pid2config or self.mng.index2config)
        single, found, paged, streamed = [], {}, [], set()
        for item, state in zip(work, states, strict=True):
            group, p, gindex, pindex = item
            key = (gindex if common else (gindex, pindex), state["step"])
            batch = found.get(key)
            if batch is None:
                config = self.get_config(gindex, pindex, group)
                batch = found[key] = (
                    None if config["max_unorm"] > 0.0 else self._settings(config, int(key[1]) + 1),
                    [],
                )
            parameter = None if batch[0] is None else self._parameter(p, state)
            if parameter is None:
                single.append(item)
            elif self.is_paged and paging.is_paged(parameter[2]):
                if id(p) in streamed:  # twice in the optimizer: its state must first come back
                    single.append(item)
                else:
                    streamed.add(id(p))
                    paged.append((item, batch[0], Tensors(*parameter)))
            else:
                batch[1].append((parameter, state))
        batches: dict[tuple, list[tuple]] = {}
        for settings, parameters in found.values():
            if parameters:
                batches.setdefault(settings, []).extend(parameters)
        return batches, single, paged

    def _settings(self, config: dict[str, Any], step: int) -> Settings:
        betas, alpha = schedule(config, step)
        numbers = map(float, (config["lr"], *betas, alpha, config["eps"], config["weight_decay"]))
        return Settings(algorithm(self.optimizer_name), *numbers, step, 1.0, bool(config["skip_zeros"]))

    def _parameter(self, p: Tensor, state: dict[str, Any]) -> tuple | None:
        """The fields of `Tensors` for this rank's part of p; None where that must be looked at closely.

        No `Tensors` yet, which takes longer to make than all the rest: a tenth of a step of many small parameters.
        """
        g = p.grad
        if type(p) is not torch.nn.Parameter and is_dtensor(p):
            if not is_dtensor(g) or p.placements != g.placements or p.device_mesh != g.device_mesh:
                return None
            p, g = p._local_tensor, g._local_tensor
        state1 = state["state1"]
        if not p.numel():
            return None
        qmap1 = state.get("qmap1")
        if qmap1 is None:
            return (g, p, state1, state.get("state2"), None, None, None, None)
        qmap2 = state.get("qmap2")
        if id(qmap1) not in self._maps:
            qmap1 = self._share_map(state, "qmap1")
        if qmap2 is not None and id(qmap2) not in self._maps:
            qmap2 = self._share_map(state, "qmap2")
        return (g, p, state1, state.get("state2"), qmap1, qmap2, state["absmax1"], state.get("absmax2"))

    def _share_map(self, state: dict[str, Any], key: str) -> Tensor:
        """The map of a state; where an equal one is known, that one takes its place, for one launch serves one map."""
        found = state[key]
        for known in self._maps.values():
            if known.device == found.device and torch.equal(known, found):
                state[key] = known
                return known
        self._maps[id(found)] = found
        return found

    def _map(self, name: str, device: torch.device) -> Tensor:
        if name not in self.name2qmap:
            self.fill_qmap()
        self.name2qmap[name] = self.name2qmap[name].to(device)
        return self.name2qmap[name]

    @torch.no_grad()
    def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        """Update this rank's part of one parameter, which has a gradient, and its state."""
        with self.paging.whole(self.state[p], shards.local(p).device):
            self._update_whole(group, p, gindex, pindex)

    def _update_whole(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
        state, config = self.state[p], self.get_config(gindex, pindex, group)
        settings, bound = self._settings(config, int(state["step"]) + 1), UNBOUNDED
        own = (state.get(name) for name in Tensors._fields[2:])
        tensors = Tensors(self._gradient(p), shards.local(p), *own)
        if tensors.qmap1 is None and config["max_unorm"] > 0.0:
            settings, bound = self._bounded(p, config, settings, tensors)
        if tensors.p.numel():
            update(settings, tensors, bound)
        state["step"] = settings.step

    def _bounded(self, p: Tensor, config: dict, settings: Settings, tensors: Tensors) -> tuple[Settings, Bound]:
        """What a step is made with whose norm is bounded.

        The op sees one shard, and the bound is of the whole parameter: for a sharded one the update is tried on copies,
        its norm summed over the ranks, and the step made shorter instead.
        """
        state, part = self.state[p], tensors.p
        values = part.float() if part.dtype is torch.float64 else part
        squares = torch.linalg.vector_norm(values, dtype=torch.float32).square()
        limit = float(shards.global_norm(squares, p))
        if "unorm_vec" not in state:
            state["unorm_vec"] = torch.zeros((1,), dtype=torch.float32, device=part.device)
        whole = Bound(state["unorm_vec"], config["max_unorm"], limit)
        if not shards.is_split(p):
            return settings, whole
        if part.numel():
            copies = {
                name: value.clone() for name, value in tensors._asdict().items() if name != "g" and value is not None
            }
            update(settings._replace(lr=0.0), tensors._replace(**copies), whole)
        norm = float(shards.global_norm(state["unorm_vec"], p))
        limit = config["max_unorm"] * limit + (config["eps"] if self._states == 1 else 0.0)
        if norm <= limit:
            return settings, UNBOUNDED
        ratio = limit / norm
        decoupled = self.optimizer_name in ("adam", "lamb", "ademamix", "lion")
        decay = settings.weight_decay / ratio if decoupled and ratio > 0.0 else settings.weight_decay
        return settings._replace(lr=settings.lr * ratio, weight_decay=decay), UNBOUNDED


class Optimizer2State(_Stateful):
    """Optimizers with two states a parameter: Adam, LAMB, AdEMAMix."""

    _states = 2

    def __init__(
        self,
        optimizer_name: str,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, ...] | str = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        max_unorm: float = 0.0,
        skip_zeros: bool = False,
        is_paged: bool = False,
        alpha: float = 0.0,
        t_alpha: int | None = None,
        t_beta3: int | None = None,
    ):
        """`args`, if given, has optim_bits, min_8bit_size, max_unorm and skip_zeros in place of the arguments."""
        if isinstance(betas, str):
            betas = [float(beta) for beta in betas.strip("() ").split(",")]
        group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        group |= {"alpha": alpha, "t_alpha": t_alpha, "t_beta3": t_beta3}
        own = {"min_8bit_size": min_8bit_size, "max_unorm": max_unorm, "skip_zeros": skip_zeros}
        self._set_up(optimizer_name, params, group, args, optim_bits, is_paged, **own)


class Optimizer1State(_Stateful):
    """Optimizers with one state a parameter: Lion, RMSprop, Adagrad, SGD, LARS."""

    _states = 1

    def __init__(
        self,
        optimizer_name: str,
        params: Iterable,
        lr: float = 1e-3,
        betas: tuple[float, ...] = (0.9, 0.0),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        optim_bits: int = 32,
        args: Any = None,
        min_8bit_size: int = 4096,
        max_unorm: float = 0.0,
        skip_zeros: bool = False,
        is_paged: bool = False,
    ):
        """`args`, if given, has optim_bits, min_8bit_size, max_unorm and skip_zeros in place of the arguments."""
        group = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        own = {"min_8bit_size": min_8bit_size, "max_unorm": max_unorm, "skip_zeros": skip_zeros}
        self._set_up(optimizer_name, params, group, args, optim_bits, is_paged, **own)


def loss_of(closure: Callable[[], Any] | None) -> Any:
    """What `closure` gives, which computes gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def schedule(config: dict[str, Any], step: int) -> tuple[tuple[float, float, float], float]:
    """((beta1, beta2, beta3), alpha) of a step: AdEMAMix warms beta3 up over t_beta3 steps and alpha over t_alpha.

    Source: "The AdEMAMix Optimizer" (arXiv 2409.03137), section 3.
    """
    beta1, beta2, beta3 = (*config["betas"], 0.0, 0.0)[:3]
    alpha = config.get("alpha", 0.0)
    if config.get("t_alpha"):
        alpha = min(step * alpha / config["t_alpha"], alpha)
    if config.get("t_beta3"):
        first, last, done = math.log(beta1), math.log(beta3), step / config["t_beta3"]
        beta3 = min(math.exp(first * last / ((1 - done) * last + done * first)), beta3)
    return (beta1, beta2, beta3), alpha


def _count_steps(own: Iterable[tuple[tuple, dict]]) -> None:
    """These parameters, (settings, state), are updated."""
    for settings, state in own:
        state["step"] = settings.step


def _describe(p: Tensor, pindex: int, gindex: int | None = None) -> str:
    group = "" if gindex is None else f" of group {gindex}"
    return f"parameter {pindex}{group} ({p.dtype} {tuple(p.shape)} on {p.device})"
