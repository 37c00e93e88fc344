"""merge_4bit on a GPU: the bytes of the CPU for large weights, its launches, and its time beside other ops.

python benchmarks/checks/cuda_merge.py
"""

import copy

import torch
from bitshard import functional
from bitshard.functions.merge import merge_4bit
from bitshard.kinds import kind_of
from torch.profiler import ProfilerActivity, profile

COMPARED = [
    (14336, 4096, 16, torch.bfloat16, False),
    (4096, 14336, 16, torch.float32, False),
    (4096, 4096, 64, torch.float16, False),
    (1000, 4000, 8, torch.bfloat16, False),
    (576, 1536, 16, torch.float32, True),
    (4096, 4096, 16, torch.bfloat16, True),
]
TIMED = [(1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)]


def case(N: int, K: int, r: int, dtype: torch.dtype, nested: bool, quant_type: str = "nf4") -> tuple:
    """Packed codes, state and one adapter that changes most codes."""
    generator = torch.Generator("cuda").manual_seed(N + K)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda") * 0.02

    kind = kind_of(quant_type)
    settings = {"quant_type": quant_type, "compress_statistics": nested} if kind.nests else {}
    packed, state = kind.quantize(random(N, K), quant_storage=torch.uint8, **settings)
    return packed, state, [(random(r, K).to(dtype), random(N, r).to(dtype), 2.0)]


def differing(packed: torch.Tensor, state: object, adapters: list) -> tuple[int, ...]:
    """Codes' bytes, scales and second-level scales that are not those of the CPU; and bytes that the merge changed."""
    found, new = merge_4bit(packed, state, adapters)
    given = [(A.cpu(), B.cpu(), s) for A, B, s in adapters]
    exact, on_cpu = merge_4bit(packed.cpu(), copy.deepcopy(state).to("cpu"), given)
    counts = [found.cpu() != exact, new.absmax.cpu() != on_cpu.absmax]
    if new.nested:
        counts += [new.state2.absmax.cpu() != on_cpu.state2.absmax, new.offset.cpu() != on_cpu.offset]
    return *(int(each.sum()) for each in counts), int((found != packed).sum())


def microseconds(call: object, times: int = 30) -> float:
    for _ in range(5):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / times * 1e3


def main() -> None:
    for shape in COMPARED:
        for quant_type in ("nf4", "fp4", "mxfp4", "nvfp4"):
            print(shape, quant_type, "differing, and changed:", differing(*case(*shape, quant_type)))
    for nested in (False, True):
        given = case(4096, 4096, 16, torch.bfloat16, nested)
        merge_4bit(*given)
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            merge_4bit(*given)
            torch.cuda.synchronize()
        print(f"launches, nested {nested}:", [e.name[:60] for e in trace.events() if e.device_type.name == "CUDA"])
    for N, K in TIMED:
        for r in (8, 16, 64):
            plain, nested = case(N, K, r, torch.bfloat16, False), case(N, K, r, torch.bfloat16, True)
            w, x = torch.randn(N, K, device="cuda").bfloat16(), torch.randn(2048, K, device="cuda").bfloat16()
            short = [case(N, K, r, torch.bfloat16, False, quant_type) for quant_type in ("mxfp4", "nvfp4")]
            found = {
                "merge": microseconds(lambda plain=plain: merge_4bit(*plain)),
                "nested": microseconds(lambda nested=nested: merge_4bit(*nested)),
                "MXFP4": microseconds(lambda of=short[0]: merge_4bit(*of)),
                "NVFP4": microseconds(lambda of=short[1]: merge_4bit(*of)),
                "quantize": microseconds(lambda w=w: functional.quantize_nf4(w)),
                "product of 2,048 rows": microseconds(lambda x=x, of=plain: functional.linear_4bit(x, *of[:2])),
            }
            print(f"[{N}, {K}] r {r}:", ", ".join(f"{name} {us:.0f} us" for name, us in found.items()))


if __name__ == "__main__":
    main()
