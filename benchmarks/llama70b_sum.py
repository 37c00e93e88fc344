"""Memory of QLoRA under FSDP2 on paper, and as torch's allocator lays it out.

`table` adds up what one GPU holds, part by part, with the moments of a step when the sum is largest. `at_peak` reads a
memory snapshot of torch and tells what lay where when most was in use. `python llama70b.py sum` prints the first,
`train --snapshot FILE` writes the second.
"""

import argparse
from collections import Counter

import loading

GIB = 2**30
RANK = 16  # of LoRA
WORKSPACE = (
    64 << 20
)  # bound of the panels into which 4-bit weights are dequantized, cuBLAS' workspace for them included
CUBLAS = 32 << 20  # torch's own workspace for the products of the adapters, on Hopper


class Parts:
    """Bytes on one GPU. N ranks; L layers of P weights each; V rows of H in embeddings and head; T tokens per rank."""

    def __init__(self, shape: tuple, options: argparse.Namespace):
        self.H, self.I, self.L, heads, kv_heads, self.V = shape
        self.N, self.T, self.options = options.ranks, options.tokens * options.batch, options
        sizes = loading.linears(self.H, self.I, heads, kv_heads).values()
        self.P = sum(rows * columns for rows, columns in sizes)
        self.A = RANK * sum(rows + columns for rows, columns in sizes)  # adapter numbers of a layer
        self.lora_bytes = 4 if options.lora_dtype == "float32" else 2
        self.on_gpu = 0 if options.offload_weights else 1
        # `shard_adapters` shards on the mesh's devices, behind a loading that left the weights on the host.
        self.adapters_on_gpu = 1 if options.load == "native" else self.on_gpu

    def packed(self) -> float:
        """L P / 2 / N: two weights in a byte."""
        return self.L * self.P / 2 / self.N * self.on_gpu

    def scales(self) -> float:
        """L P / 64 / N: a byte for each block of 64 weights."""
        return self.L * self.P / 64 / self.N * self.on_gpu

    def second_level(self) -> float:
        """L P / 64 / 256 * 4: a float for 256 scales, whole on every rank."""
        return self.L * self.P / 64 / 256 * 4

    def matrix(self) -> float:
        """V H 2: the embeddings, whole in bf16."""
        return self.V * self.H * 2

    def head(self) -> float:
        """V H 2: as large; in 4 bits V H / 2 + V H / 64."""
        return self.V * self.H * (0.5 + 1 / 64) if self.options.head == "4bit" else self.matrix()

    def vocabulary(self) -> float:
        """(V H 2 + head) / N: embeddings and head, sharded."""
        on_gpu = 1 if self.options.vocabulary == "split" else self.on_gpu
        return (self.matrix() + self.head()) / self.N * on_gpu

    def norms(self) -> float:
        """(2 L + 1) H 2 / N."""
        return (2 * self.L + 1) * self.H * 2 / self.N * self.on_gpu

    def adapters(self) -> float:
        """L A b / N, A = 16 times the rows and columns of a layer: the LoRA matrices; the gradients are as large."""
        return self.L * self.A * self.lora_bytes / self.N * self.adapters_on_gpu

    def adam(self) -> float:
        """2 L A b / N: both moments, in the dtype of the adapters, from the first step on."""
        return 2 * self.adapters()

    def layer(self) -> float:
        """P / 2 + P / 64 + A b + 2 H 2: a decoder layer when it is gathered."""
        return self.P / 2 + self.P / 64 + self.A * self.lora_bytes + 2 * self.H * 2

    def checkpoints(self) -> float:
        """L T H 2: the input of each decoder layer, kept from forward to backward; two of them if offloaded."""
        return (2 if self.options.offload_activations else self.L) * self.T * self.H * 2

    def recomputed(self) -> float:
        """About T (14 H + 5 I) 2: what autograd keeps of one layer; fp32 adapters add casts of their inputs."""
        casts = self.T * (6 * self.H + self.I) * 4 if self.lora_bytes == 4 else 0
        return self.T * (14 * self.H + 5 * self.I) * 2 + casts

    def logits(self, in_backward: bool) -> float:
        """t V times 10 bytes in forward (bf16, fp32, its log-softmax), 14 in backward (two gradients for the fp32);
        t is T, or a chunk. A head that is split has V / N columns and 8 bytes, both its gradient included.
        """
        options = self.options
        if options.vocabulary == "split":
            return options.chunk * self.V / self.N * 8 + self.N * self.T * self.H * 8
        if options.loss == "chunked":
            return min(options.chunk, self.T) * self.V * (14 if in_backward else 10)
        return self.T * self.V * (14 if in_backward else 10)

    def resident(self) -> float:
        """What is there all the time."""
        parts = (self.packed, self.scales, self.second_level, self.vocabulary, self.norms)
        return sum(part() for part in parts)

    def moments(self) -> dict[str, tuple[float, float]]:
        """{moment of a step: (bytes of the main stream, bytes of the stream that gathers)}.

        FSDP2 gathers a unit into one flat buffer and copies it out into the weights: twice its size. In forward the
        flat buffer stays until the next unit has been copied out, that of the last unit, the head, until forward ends,
        which includes the loss. The head stays gathered until its backward. In backward the next unit is gathered while
        one is computed; behind the first layer that is the embedding, in vain.
        """
        split, in_place = (self.options.vocabulary == word for word in ("split", "inplace"))
        embeddings, head = (0, 0) if split else (self.matrix(), self.head())
        if in_place:
            return self._moments_in_place()
        always = self.resident() + self.adapters() + self.adam() + WORKSPACE + CUBLAS
        layer, kept, grads = self.layer(), self.checkpoints(), self.adapters()
        late = self.logits(in_backward=True)
        return {
            "embeddings gathered": (always + embeddings, embeddings),
            "last layer forward": (always + kept + layer + self.recomputed(), layer),
            "loss": (always + kept + head + self.logits(in_backward=False), head or layer),
            "backward of the loss": (always + kept + head + late, 0),
            "backward of the last layer": (always + kept + layer + self.recomputed(), layer),
            "backward of the first layer": (always + grads + layer + self.recomputed(), max(layer, embeddings)),
            "AdamW": (always + grads, 0),
        }

    def _moments_in_place(self) -> dict[str, tuple[float, float]]:
        """The same with `gather_in_place` and a head in a unit of its own that is freed after its forward.

        The last norm's gather has freed the last layer's flat buffer before the head comes, and the head comes back
        when the gradient of the logits is there: until then the loss has no head beside it.
        """
        always = self.resident() + self.adapters() + self.adam() + WORKSPACE + CUBLAS
        layer, kept, grads = self.layer(), self.checkpoints(), self.adapters()
        plain = self.options.loss == "plain"
        logits = self.T * self.V * 2 if plain else self.logits(in_backward=True)
        beside = 0 if plain else self.head()  # chunks are computed while the head is there
        return {
            "embeddings gathered": (always + self.matrix(), 0),
            "last layer forward": (always + kept + layer + self.recomputed(), layer),
            "head forward": (always + kept + self.head() + logits, 0),
            "loss": (always + kept + beside + self.logits(in_backward=False), 0),
            "backward of the loss": (always + kept + beside + self.logits(in_backward=True), 0),
            "head backward": (always + kept + self.head() + logits, 0),
            "backward of the last layer": (always + kept + layer + self.recomputed(), layer),
            "backward of the first layer": (always + grads + layer + self.recomputed(), layer),
            "AdamW": (always + grads, 0),
        }


def table(shape: tuple, options: argparse.Namespace) -> str:
    """Both tables in Markdown, and whether it fits."""
    parts = Parts(shape, options)
    names = {
        "packed weights, sharded": parts.packed,
        "their scales, sharded": parts.scales,
        "second level of the scales": parts.second_level,
        "embeddings and head, sharded": parts.vocabulary,
        "norms, sharded": parts.norms,
        "adapters, sharded": parts.adapters,
        "their gradients, sharded": parts.adapters,
        "AdamW, sharded": parts.adam,
        "embeddings, gathered": parts.matrix,
        "head, gathered": parts.head,
        "one decoder layer, gathered": parts.layer,
        "inputs of the layers": parts.checkpoints,
        "one layer recomputed": parts.recomputed,
        "logits in forward, 10 bytes each": lambda: parts.logits(False),
        "logits in backward, 14 bytes each": lambda: parts.logits(True),
        "workspaces": lambda: WORKSPACE + CUBLAS,
    }
    lines = [f"{parts.N} ranks, {options.batch} x {options.tokens} tokens each, LoRA in {options.lora_dtype}, GiB"]
    lines += ["", "| part | formula | GiB |", "|---|---|---|"]
    for name, part in names.items():
        formula = (part.__doc__ or "").partition(":")[0].strip().rstrip(".")
        lines.append(f"| {name} | {formula} | {part() / GIB:.3f} |")
    moments = parts.moments()
    lines += ["", "| moment | allocated |", "|---|---|"]
    lines.append(f"| loaded | {parts.resident() / GIB:.2f} |")
    lines += [f"| {name} | {(main + gather) / GIB:.2f} |" for name, (main, gather) in moments.items()]
    most = max(main + gather for main, gather in moments.values()) / GIB
    # The allocator keeps a pool for each stream: what one has had is not there for the other until it is given back.
    pools = (max(main for main, _ in moments.values()) + max(gather for _, gather in moments.values())) / GIB
    verdict = "fits" if most < options.fit else "does not fit"
    lines += [
        "",
        f"Most at once {most:.2f} GiB of {options.fit:g}: {verdict}. Both pools at their largest: {pools:.2f} GiB",
    ]
    lines[-1] += " (beyond the limit the allocator gives memory back and asks again, which costs time)."
    lines.append("Driver, kernels and NCCL are not in it: `train` measures them as memory outside torch.")
    return "\n".join([*lines, "", *variants(shape, options)])


def variants(shape: tuple, options: argparse.Namespace) -> list[str]:
    """The most that is allocated at once, for one change after the other."""
    changes: dict[str, dict] = {
        "as asked": {},
        "loss in chunks": {"loss": "chunked"},
        "offloaded activations": {"offload_activations": True},
        "both": {"loss": "chunked", "offload_activations": True},
        "vocabulary gathered in place": {"vocabulary": "inplace"},
        "gathered in place, loss in chunks": {"vocabulary": "inplace", "loss": "chunked"},
        "gathered in place, both": {"vocabulary": "inplace", "loss": "chunked", "offload_activations": True},
        "4-bit head": {"head": "4bit"},
        "4-bit head, loss in chunks": {"head": "4bit", "loss": "chunked"},
        "4-bit head, both": {"head": "4bit", "loss": "chunked", "offload_activations": True},
        "split vocabulary": {"vocabulary": "split"},
        "split vocabulary, offloaded activations": {"vocabulary": "split", "offload_activations": True},
        "offloaded weights": {"offload_weights": True},
        "offloaded weights, loss in chunks": {"offload_weights": True, "loss": "chunked"},
        "4 ranks": {"ranks": 4},
    }
    tokens = (512, 1024, 2048, 4096)
    lines = ["| most at once, tokens of a sequence: | " + " | ".join(map(str, tokens)) + " |", "|---|---|---|---|---|"]
    for name, change in changes.items():
        cells = []
        for length in tokens:
            moments = Parts(shape, argparse.Namespace(**{**vars(options), **change, "tokens": length})).moments()
            cells.append(f"{max(main + gather for main, gather in moments.values()) / GIB:.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


# ---- a snapshot of the allocator ------------------------------------------------------------------------------------


class Replay:
    """Segments and blocks of torch.cuda.memory._snapshot(), run backward from its end to an earlier event."""

    def __init__(self, snapshot: dict, device: int):
        self.events = [event for event in snapshot["device_traces"][device]]
        self.segments: dict[int, tuple[int, int]] = {}  # address: (bytes, stream)
        self.blocks: dict[int, tuple[int, str]] = {}  # address of a block in use: (bytes, who allocated it)
        for segment in snapshot["segments"]:
            if segment["device"] != device:
                continue
            self.segments[segment["address"]] = (segment["total_size"], segment["stream"])
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    self.blocks[block["address"]] = (block["size"], who(block.get("frames", [])))

    def back(self, event: dict) -> int:
        """Undo one event; how many bytes more were in use before it."""
        action, address, size = event["action"], event.get("addr"), event["size"]
        if action == "alloc":
            self.blocks.pop(address, None)
            return -size
        if action == "free_completed":
            self.blocks[address] = (size, who(event.get("frames", [])))
            return size
        if action in ("segment_alloc", "segment_map"):
            self.segments.pop(address, None)
        elif action in ("segment_free", "segment_unmap"):
            self.segments[address] = (size, event.get("stream", 0))
        return 0

    def to_peak(self) -> int:
        """Go back to the last failed allocation, or else to the event after which most was in use; its number."""
        failed = [number for number, event in enumerate(self.events) if event["action"] == "oom"]
        change, sums = 0, {len(self.events) - 1: 0}
        signs = {"alloc": -1, "free_completed": 1}
        for number in range(len(self.events) - 1, 0, -1):
            change += signs.get(self.events[number]["action"], 0) * self.events[number]["size"]
            sums[number - 1] = change
        peak = failed[-1] if failed else max(sums, key=sums.__getitem__)
        for event in reversed(self.events[peak + 1 :]):
            self.back(event)
        return peak


def who(frames: list[dict]) -> str:
    """The innermost functions outside torch's modules machinery, callee first."""
    dull = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/_ops.py", "autograd/function.py", "??")
    named = [f for f in frames if f["filename"] and not any(part in f["filename"] for part in dull)]
    return " < ".join(f"{f['filename'].rpartition('/')[2]}:{f['line']} {f['name']}" for f in named[:4]) or "(no frames)"


def at_peak(snapshot: dict, device: int = 0, largest: int = 25) -> str:
    """What is in use at the peak by place of allocation, and the largest gaps between blocks with their neighbours."""
    replay = Replay(snapshot, device)
    if not replay.events:
        return "no events: memory history was not recorded"
    peak = replay.to_peak()
    mib = 2**20
    in_use = sum(size for size, _ in replay.blocks.values())
    reserved = sum(size for size, _ in replay.segments.values())
    lines = [f"event {peak + 1} of {len(replay.events)} ({replay.events[peak]['action']})"]
    lines.append(f"reserved {reserved / mib:.0f} MiB in {len(replay.segments)} segments, in use {in_use / mib:.0f} MiB")
    by_stream = Counter()
    for size, stream in replay.segments.values():
        by_stream[stream] += size
    lines += [f"stream {stream:#x}: {size / mib:.0f} MiB reserved" for stream, size in by_stream.most_common()]
    found = gaps(replay)
    lines += ["", "Largest segments: MiB reserved, MiB in use, MiB of the largest gap, stream"]
    for start, (total, stream) in sorted(replay.segments.items(), key=lambda segment: -segment[1][0])[:largest]:
        free = [gap[0] for gap in found if gap[5] == start] or [0]
        lines.append(f"{total / mib:9.1f} {(total - sum(free)) / mib:9.1f} {max(free) / mib:9.1f}  {stream:#x}")
    by_place, count = Counter(), Counter()
    for size, place in replay.blocks.values():
        by_place[place] += size
        count[place] += 1
    lines += ["", "In use, by place of allocation:"]
    lines += [f"{size / mib:9.1f} MiB in {count[place]:5d}  {place}" for place, size in by_place.most_common(largest)]
    lines += ["", "Largest gaps, each with the block before and behind it in its segment:"]
    for size, stream, total, before, behind, _ in sorted(found, key=lambda gap: -gap[0])[:largest]:
        lines.append(f"{size / mib:9.1f} MiB of a segment of {total / mib:.1f}, stream {stream:#x}")
        lines += [f"{'':14}before: {before}", f"{'':14}behind: {behind}"]
    return "\n".join(lines) + "\n"


def gaps(replay: Replay) -> list[tuple[int, int, int, str, str, int]]:
    """(bytes, stream, bytes of the segment, block before, block behind, segment) of each stretch that is not in use."""
    found = []
    addresses = sorted(replay.blocks)
    for start, (total, stream) in replay.segments.items():
        inside = [address for address in addresses if start <= address < start + total]
        end, before = start, "start of the segment"
        for address in inside:
            size, place = replay.blocks[address]
            described = f"{size / 2**20:.1f} MiB, {place}"
            if address > end:
                found.append((address - end, stream, total, before, described, start))
            end, before = address + size, described
        if end < start + total:
            found.append((start + total - end, stream, total, before, "end of the segment", start))
    return found
