"""`python -m crisp_prefill` and `crisp-prefill`: the command line `crisp` of this package, and the
commands `capture` and `compare`, which need transformers."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def binary() -> Path:
    """The executable that came with the package."""
    return Path(__file__).parent / "bin" / "crisp"


def main() -> int:
    from . import _commands

    if len(sys.argv) > 1 and sys.argv[1] in _commands.NAMES:
        return _commands.main(sys.argv[1:])
    path = binary()
    if not path.is_file():
        print(f"crisp-prefill: {path} is missing: the package was built without it", file=sys.stderr)
        return 1
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(f"Also: {' and '.join(_commands.NAMES)}, on a model of transformers (COMMAND --help).\n")
    sys.stdout.flush()
    os.execv(path, ["crisp", *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
