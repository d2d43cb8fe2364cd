"""`python -m autopar COMMAND`."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version

from autopar import __version__, calibration
from autopar.launch import launcher

USAGE = """usage: python -m autopar COMMAND ...
       python -m autopar --version

commands:
  launch     start a script as several processes: python -m autopar launch -n 4 train.py
  calibrate  measure ahead what plans are made by: python -m autopar calibrate --devices 4"""


def main(arguments: list[str]) -> int:
    """Runs a command; returns its exit code."""
    if arguments[:1] == ["launch"]:
        return launcher.main(arguments[1:])
    if arguments[:1] == ["calibrate"]:
        return calibration.main(arguments[1:])
    if arguments[:1] == ["--version"]:
        packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib"))
        print(f"autopar {__version__} ({packages}, Python {platform.python_version()})")
        return 0
    if arguments and arguments[0] not in ("-h", "--help"):
        print(f"autopar: there is no command {arguments[0]!r}\n{USAGE}", file=sys.stderr)
        return 2
    print(USAGE)
    return 0 if arguments else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
