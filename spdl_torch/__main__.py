"""`python -m spdl_torch` is the command line, as `spdl-torch` is."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
