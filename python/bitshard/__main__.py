"""`python -m bitshard`: the report, or any other command of `bitshard`."""

import sys

from bitshard_cli.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["report"]))
