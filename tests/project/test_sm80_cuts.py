"""benchmarks/sm80_cuts.py without a GPU: it knows every way that the plan can take."""

import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gemm_sm80  # noqa: E402
import sm80_cuts  # noqa: E402

SIZES = ((4096, 4096), (14336, 4096), (1024, 4096), (2048, 6144), (256, 128))


@pytest.mark.parametrize("sm, sms", [(80, 108), (90, 132)])
def test_the_plans_way_is_among_those_that_are_timed(sm, sms, tmp_path):
    """The table says how much longer it takes: here always twice as long."""
    lines = [{"device": "a GPU", "sm": sm, "sms": sms}]
    for (N, K), M, gradient in itertools.product(SIZES, (1, 65, 192, 640, 4096), (False, True)):
        width, depth = (K, N) if gradient else (N, K)
        way = sm80_cuts.planned((N, K, M, gradient), sm, sms)
        for resident, _, cut in gemm_sm80.cuts(sms, M, width, depth):
            line = {"N": N, "K": K, "M": M, "gradient": gradient, "resident": resident, **cut}
            lines.append(line | {"us": 2.0 if tuple(line.get(name, 0) for name in sm80_cuts.WAY) == way else 1.0})
    file = tmp_path / "cuts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    text = sm80_cuts.table(file)
    assert f"a GPU, 50 cases, {len(lines) - 1} ways: the plan's takes 2.0000 times as long" in text
