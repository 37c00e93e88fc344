"""Entry point of `python -m bitsandbytes`."""

import sys

from bitsandbytes.diagnostics.main import main

sys.exit(main())
