"""One process: the model on disk, and what it saves, merged and not.

python tests/fsdp/saving/alone.py --dir DIR --out DIR/alone
"""

import models
from models import CELLS, write_reference
from shared import make_dense, run, start


def references(folder):
    make_dense(f"{folder}/dense")
    models.make_wide(folder)
    for cell in CELLS:
        write_reference(folder, cell)
    for kind in models.KINDS:
        write_reference(folder, CELLS[0], kind)
        write_reference(folder, CELLS[0], kind, "bf16")
    write_reference(folder, CELLS[0], "none", "bf16")
    write_reference(folder, CELLS[1], "lora", "bf16")


if __name__ == "__main__":
    run({"references": references}, start())
