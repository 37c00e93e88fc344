"""CPU kernels of int8 products and of optimizers in AVX2 beside AVX-512, one thread, in turn: CPU time of the process.

    python benchmarks/isa_cpu.py [--rounds 5]

AVX2 has half the lanes, so half the speed a clock is what it can have where lanes are the limit. Prints a table.
"""

import argparse
import os
import sys
import time

from timing import Contestant, cpu_name_and_flags, markdown_table, serve

ISAS = ("avx512", "avx2")
OPTIMIZERS = ("AdamW8bit", "Lion8bit", "AdEMAMix8bit", "SGD8bit", "AdamW32bit")
ROWS = (1, 4, 16, 64, 256)
N = K = 2048


def cases() -> dict:
    """{name: function} that each take about a millisecond."""
    import bitsandbytes as bnb
    import torch
    from bitshard.functions import int8

    found = {}
    weight = torch.nn.Parameter(torch.randn(512, 1024, dtype=torch.bfloat16))
    weight.grad = torch.randn_like(weight)
    for name in OPTIMIZERS:
        options = {"momentum": 0.9} if name.startswith("SGD") else {}
        found[name] = getattr(bnb.optim, name)([weight], lr=1e-4, **options).step
    codes, scales, _ = int8.quantize(torch.randn(N, K))
    layer = bnb.nn.Linear8bitLt(K, N, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(codes, requires_grad=False, SCB=scales)
    for rows in ROWS:
        x = torch.randn(rows, K, dtype=torch.bfloat16)
        found[f"int8 linear, {rows} rows"] = lambda x=x: layer(x)
        if rows == 1:
            continue
        y = layer(x.requires_grad_())
        dy = torch.ones_like(y)
        found[f"int8 gradient, {rows} rows"] = lambda x=x, y=y, dy=dy: torch.autograd.grad(y, x, dy, retain_graph=True)
    many = torch.randn(256, K, dtype=torch.bfloat16)
    found["quantize to int8"] = lambda: int8.quantize(many)
    return found


def answers():
    made = cases()

    def answer(op: str) -> dict:
        if op == "names":
            return {"names": list(made)}
        import bitshard._C as core

        call, best, until = made[op], float("inf"), time.perf_counter() + 0.3
        while time.perf_counter() < until:
            before = time.process_time()
            call()
            best = min(best, time.process_time() - before)
        return {"ms": 1e3 * best, "isa": core.isa()}

    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        return serve(answers())
    players = {
        isa: Contestant([sys.executable, __file__, "--serve"], {**os.environ, "BITSHARD_ISA": isa}) for isa in ISAS
    }
    rows = []
    for name in players["avx2"].ask(op="names")["names"]:
        best = dict.fromkeys(ISAS, float("inf"))
        for _ in range(arguments.rounds):
            for isa, player in players.items():
                found = player.ask(op=name)
                assert found["isa"] == isa, found
                best[isa] = min(best[isa], found["ms"])
        rows.append([name, f"{best['avx512']:.3f}", f"{best['avx2']:.3f}", f"{best['avx512'] / best['avx2']:.2f}"])
    print(cpu_name_and_flags()[0])
    print(markdown_table(["what", "AVX-512 ms", "AVX2 ms", "speed of AVX2 to AVX-512"], rows))
    return None


if __name__ == "__main__":
    main()
