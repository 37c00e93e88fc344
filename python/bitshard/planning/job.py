"""What is to be trained where: the question that a plan answers."""

from __future__ import annotations

from typing import NamedTuple

GIB = 2**30
OPTIMIZERS = {  # name in TrainingArguments -> (bytes of state for a parameter of p bytes: multiple of p, plus bytes)
    "adamw_torch": (2.0, 0.0),
    "adamw_torch_fused": (2.0, 0.0),
    "adamw_8bit": (0.0, 2 * (1 + 4 / 256)),
    "paged_adamw_8bit": (0.0, 2 * (1 + 4 / 256)),
    "paged_adamw_32bit": (0.0, 8.0),
    "lion_8bit": (0.0, 1 + 4 / 256),
    "lion_32bit": (0.0, 4.0),
    "sgd": (0.0, 0.0),
}
WAYS = ("auto", "whole", "parts", "native")
SHARDINGS = ("none", "fsdp1", "fsdp2")
VOCABULARIES = ("gathered", "in_place", "split")
LIBRARIES = ("bitshard", "bitsandbytes")


class Job(NamedTuple):
    """A training job.

    Attributes:
        gpus: number of GPUs, each with the same memory.
        gib: GiB of one of them.
        seq, batch: tokens of a sequence, and sequences that each GPU computes at a time.
        rank: of the LoRA adapters.
        targets: names of linear layers with adapters, or "all-linear".
        lora_experts: whether stacks of experts have adapters too.
        lora_dtype: "float32" or "bfloat16", of adapters, gradients and states of torch's own optimizers.
        autocast: whether the step runs under autocast, as Trainer's bf16 and fp16 do. Without it peft casts the inputs
            of float32 adapters.
        optimizer: a key of OPTIMIZERS.
        sharding: one of SHARDINGS; "none" for one GPU.
        load: how the weights are loaded: every rank all of them ("whole"), all of them but keeping a part ("parts",
            accelerate with FSDP2), its rows only ("native", a DistributedConfig); "auto" is "parts" under FSDP2.
        vocabulary: how embeddings and head come to the tokens under FSDP2: "gathered" as FSDP2 does it, "in_place" by
            `bitshard.fsdp.gather_in_place`, "split": not at all (benchmarks/llama70b.py).
        loss_chunk: tokens whose logits exist at a time; 0: all.
        checkpointing: of gradients, decoder layer by decoder layer.
        offload_weights, offload_activations: to the host.
        bits: of the linear layers: 4, or 8 for LLM.int8, which has a threshold of outliers, as transformers sets it.
        experts_4bit: whether stacks of experts are 4-bit.
        head_4bit: whether the head is.
        skip: names of modules that stay in 16 bits.
        nested: whether scales are 8-bit with a second level.
        blocksize: 4-bit weights that share a scale.
        library: "bitshard", or "bitsandbytes" to compare with.
    """

    gpus: int = 1
    gib: float = 24.0
    seq: int = 2048
    batch: int = 1
    rank: int = 16
    targets: tuple[str, ...] | str = "all-linear"
    lora_experts: bool = False
    lora_dtype: str = "float32"
    autocast: bool = True
    optimizer: str = "adamw_torch"
    sharding: str = "none"
    load: str = "auto"
    vocabulary: str = "gathered"
    loss_chunk: int = 0
    checkpointing: bool = True
    offload_weights: bool = False
    offload_activations: bool = False
    bits: int = 4
    experts_4bit: bool = False
    head_4bit: bool = False
    skip: tuple[str, ...] = ()
    nested: bool = False
    blocksize: int = 64
    library: str = "bitshard"

    def checked(self) -> Job:
        """Itself. ValueError with the number or word that makes no sense."""
        for name in ("gpus", "seq", "batch", "rank", "blocksize"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected at least 1")
        if not self.gib > 0:
            raise ValueError(f"a GPU of {self.gib} GiB: expected more than 0")
        if self.loss_chunk < 0:
            raise ValueError(f"loss_chunk is {self.loss_chunk}, expected 0 or more")
        words = {
            "lora_dtype": ("float32", "bfloat16"), "optimizer": tuple(OPTIMIZERS), "sharding": SHARDINGS, "load": WAYS,
            "vocabulary": VOCABULARIES, "library": LIBRARIES,
        }  # fmt: skip
        for name, known in words.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")
        if self.sharding == "none" and self.gpus > 1:
            raise ValueError(f"{self.gpus} GPUs without sharding: choose fsdp1 or fsdp2")
        if self.vocabulary != "gathered" and self.sharding != "fsdp2":
            raise ValueError(f"vocabulary {self.vocabulary!r} is of FSDP2, the job has {self.sharding}")
        if self.bits not in (4, 8):
            raise ValueError(f"bits is {self.bits}, expected 4 or 8")
        if self.bits == 8:
            self._check_int8()
        return self

    def _check_int8(self) -> None:
        for name, what in (("nested", "scales"), ("experts_4bit", "experts"), ("head_4bit", "a head")):
            if getattr(self, name):
                raise ValueError(f"{name}: {what} of 4-bit models, the job has 8-bit layers (bits = 8)")
        if self.load == "native":
            raise ValueError("load 'native': a DistributedConfig shards before it quantizes, which 8-bit layers cannot")
        if self.library == "bitsandbytes" and self.sharding != "none":
            raise ValueError("bitsandbytes cannot shard 8-bit layers")

    @property
    def lora_bytes(self) -> int:
        """Bytes of one number of the adapters."""
        return 4 if self.lora_dtype == "float32" else 2

    @property
    def way(self) -> str:
        """How the weights are loaded."""
        if self.sharding == "none" or self.library == "bitsandbytes":
            return "whole"
        if self.load == "auto":
            return "parts" if self.sharding == "fsdp2" else "whole"
        return self.load

    @property
    def paged(self) -> bool:
        """Whether the optimizer's states are on the host."""
        return self.optimizer.startswith("paged_")
