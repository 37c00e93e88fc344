"""Short QLoRA runs for the workers: Trainer, a loop, merging; in one process and sharded."""

import datasets
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from shared import VOCABULARY, linears, rank, world
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainingArguments, set_seed

LENGTH, BATCH, STEPS = 24, 12, 4
BOUND = 1e-5  # relative, of each loss in fp32


def with_adapters(model, **options):
    """LoRA whose random matrices differ between the ranks: somebody must make them one."""
    set_seed(3 + rank())
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    return get_peft_model(model, config)


def beside(model):
    """The same without peft: two matrices in each 4-bit layer, and a hook that adds their product's output."""
    generator = torch.Generator().manual_seed(3 + rank())
    model.requires_grad_(False)
    for layer in linears(model).values():
        layer.adapter = nn.Sequential(
            nn.Linear(layer.in_features, 4, bias=False), nn.Linear(4, layer.out_features, bias=False)
        )
        for matrix in layer.adapter:
            nn.init.normal_(matrix.weight, std=0.05, generator=generator)
        layer.register_forward_hook(lambda layer, args, output: output + layer.adapter(args[0]))
    return model


def rows():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCABULARY, (3 * BATCH, LENGTH), generator=generator).tolist()


def trainer_losses(model, folder):
    arguments = TrainingArguments(
        output_dir=f"{folder}/out",
        per_device_train_batch_size=BATCH // world(),
        max_steps=STEPS,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=5,
    )
    data = datasets.Dataset.from_dict({"input_ids": rows(), "labels": rows()})
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def loop_losses(model, steps=STEPS):
    """A loop of one's own, which averages no gradients; the means of all ranks' losses."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    x = torch.tensor(rows()[:BATCH]).chunk(world())[rank()]
    losses = []
    model.train()
    for _ in range(steps):
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        mean = loss.detach().clone()
        if world() > 1:
            dist.all_reduce(mean)
        losses.append(mean.item() / world())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def gap(found, expected):
    assert len(found) == len(expected) >= 2
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def apart(model):
    """The largest difference of a trainable value between two ranks."""
    values = [p.full_tensor() if isinstance(p, DTensor) else p.data for p in model.parameters() if p.requires_grad]
    own = torch.cat([value.float().flatten() for value in values])
    everyone = [torch.empty_like(own) for _ in range(world())]
    dist.all_gather(everyone, own)
    return max((other - own).abs().max().item() for other in everyone)
