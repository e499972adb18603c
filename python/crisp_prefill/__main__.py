"""`python -m crisp_prefill` and `crisp-prefill`: the command line `crisp` of this package."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def binary() -> Path:
    """The executable that came with the package."""
    return Path(__file__).parent / "bin" / "crisp"


def main() -> int:
    path = binary()
    if not path.is_file():
        print(f"crisp-prefill: {path} is missing: the package was built without it", file=sys.stderr)
        return 1
    sys.stdout.flush()
    os.execv(path, ["crisp", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
