"""Layout of printed reports."""

import textwrap

HEADER_WIDTH = 60


def print_header(txt: str, width: int = HEADER_WIDTH, filler: str = "=") -> None:
    """Print `txt` in the middle of a line of `filler`, `width` characters wide."""
    print((f" {txt} " if txt else "").center(width, filler))


def print_dedented(text: str) -> None:
    """Print `text` without common indentation and outer blank lines."""
    print(textwrap.dedent(text).strip())
