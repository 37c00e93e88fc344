"""Options of FSDP2, and how layers are wrapped and run: each forward sees the bytes that were quantized."""

import functools

import torch
import torch.distributed as dist
from bitshard import fsdp
from bitshard.nn.linear import Linear4bit
from bitshard.sharding.weights.in_place import InPlaceAllGather
from checks.common import batch, build, exact, layers, raises, shard
from common import kept_scales
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def check_offload(device, args):
    for pin in (False, True) if device.type == "cuda" else (False,):
        model = shard(build(device), offload_policy=CPUOffloadPolicy(pin_memory=pin))
        exact(model, device, build(device), steps=3)
        for layer in layers(model):
            assert layer.weight._local_tensor.device.type == "cpu"
            assert dist.get_world_size() == 1 or kept_scales(layer).device.type == "cpu"


def check_checkpointing(device, args):
    plain, wrapped = shard(build(device)), build(device)
    for i, block in enumerate(wrapped):
        wrapped[i] = checkpoint_wrapper(block)
    wrapped = shard(wrapped)
    exact(plain, device, build(device), steps=1)
    exact(wrapped, device, build(device), steps=1)
    for a, b in zip(plain.parameters(), wrapped.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        assert a.grad is None or torch.equal(a.grad.to_local(), b.grad.to_local())


class Vocabulary(torch.nn.Module):
    """Embeddings and a head around a layer: two units of one parameter, of rows that no world divides."""

    def __init__(self, trained):
        super().__init__()
        self.embeddings, self.layer = torch.nn.Embedding(37, 16), torch.nn.Linear(16, 16)
        self.head = torch.nn.Linear(16, 37, bias=False)
        self.embeddings.requires_grad_(trained)
        self.head.requires_grad_(trained)

    def forward(self, ids):
        return self.head(torch.relu(self.layer(self.embeddings(ids))))


def vocabulary_losses(device, trained, reshard, in_place):
    """Losses of three steps; and in how many forwards of embeddings and head the weight was where it was gathered."""
    torch.manual_seed(0)
    model = Vocabulary(trained).to(device)
    for unit in (model.embeddings, model.layer, model.head):
        fully_shard(unit, reshard_after_forward=reshard)
    fully_shard(model)
    outputs, found = [], []
    if in_place:
        assert fsdp.gather_in_place(model) == 2
        allocate = InPlaceAllGather.allocate

        def spy(comm, size, **options):
            out = allocate(comm, size, **options)
            outputs.append(out.data_ptr())
            return out

        InPlaceAllGather.allocate = spy
        for unit in (model.embeddings, model.head):
            unit.register_forward_pre_hook(lambda unit, *_: found.append(unit.weight.data_ptr() in outputs))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for step in range(3):
        ids = (torch.arange(12).view(2, 6) + dist.get_rank() + step).to(device)
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if in_place:
        InPlaceAllGather.allocate = allocate
    return losses, found


def check_gather_in_place(device, args):
    """Units of one parameter, gathered without a second copy: the same losses, the weight is the gathered buffer."""
    for trained in (True, False):
        for reshard in (True, False):
            expected, _ = vocabulary_losses(device, trained, reshard, False)
            losses, found = vocabulary_losses(device, trained, reshard, True)
            assert losses == expected, (losses, expected)
            assert dist.get_world_size() == 1 or (len(found) == 6 and all(found)), found


def check_no_reshard(device, args):
    model = shard(build(device), reshard_after_forward=False)
    exact(model, device, build(device), steps=3)


def check_freed_after_use(device, args):
    """Between forwards the gathered bytes and scales hold no memory, and the layer says that it is sharded."""
    model = shard(build(device))
    model(batch(device)).float().sum().backward()
    for layer in layers(model):
        assert layer.quant_state.absmax.untyped_storage().nbytes() == 0
        assert isinstance(layer.weight, DTensor)
        raises(ValueError, "sharded", functools.partial(Linear4bit.forward, layer, batch(device)))
        raises(ValueError, "full_state_dict", layer.quant_state.as_dict)


def check_single_layers(device, args):
    """`fully_shard` of the 4-bit layers themselves, whose units then hold nothing else."""
    model, alone = build(device), build(device)
    for layer in layers(model):
        fully_shard(layer)
    fully_shard(model)
    for _ in range(2):
        y = model(batch(device))
        assert torch.equal(y, alone(batch(device)))
        y.float().sum().backward()
    assert all(isinstance(layer.weight, DTensor) for layer in layers(model))


def check_inference_mode(device, args):
    """A first forward under inference_mode, where composite ops reach the shards whole."""
    model, alone = shard(build(device)), build(device)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(model(batch(device)), alone(batch(device)))


def check_eval_modes(device, args):
    """A first forward without gradients, in inference mode too, then training."""
    model = shard(build(device))
    with torch.no_grad():
        exact(model, device, build(device), backward=False)
    exact(model, device, build(device))
    with torch.inference_mode():
        exact(model, device, build(device), backward=False)


def check_hsdp(device, args):
    world = dist.get_world_size()
    shapes = [(2, world // 2)] if world % 2 == 0 else []
    for shape in [*shapes, (1, world)]:
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        model = shard(build(device), mesh=mesh)
        other = shard(build(device, seed=50), mesh=mesh)
        exact(model, device, build(device))
        other.load_state_dict(model.state_dict())
        exact(other, device, build(device))
        third = shard(build(device, seed=60), mesh=mesh)
        full = fsdp.full_state_dict(model)
        fsdp.load_full_state_dict(third, full, broadcast_from_rank0=True)
        exact(third, device, build(device))
