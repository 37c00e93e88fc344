"""What lay where in a GPU's memory when most was in use, from a memory snapshot of torch: `at_peak`."""

from collections import Counter


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
