"""Where upstream keeps its kernels by device. bitshard has its own; the names that others import are here."""
