"""Keeps what was measured in the user's cache folder; whoever measures says so."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

from autopar.backends.devices import Devices
from autopar.launch.notices import noticing
from autopar.mpi.limits import cores

#: Says what is measured next.
Advance = Callable[[str], None]

#: What is measured, and how: files of other versions aren't read.
_VERSION = 11


def cache_file(devices: Devices, name: str) -> Path:
    """Returns the file that keeps measured figures of these devices.

    Its name depends on the machine, the cores that this process may use, kind and number of devices, mesh, processes
    and JAX version.

    Args:
      devices: The devices, whatever the mesh calls its axes.
      name: The file's name, with {} where those facts go.
    """
    first = devices.mesh.devices.flat[0]
    about = (
        _VERSION,
        platform.node(),
        cores(),
        first.platform,
        first.device_kind,
        devices.mesh.devices.shape,
        devices.mesh.axis_names.index(devices.axis),
        len(devices.processes.members),
        jax.__version__,
    )
    key = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return cache_folder() / name.format(key)


def cache_folder() -> Path:
    """Returns the folder of autopar's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


def write_cache(file: Path, text: str) -> None:
    """Writes all of a file or nothing; where nothing can be written, the next process measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(text)
        os.replace(new.name, file)
    except OSError:
        return


def shown_path(file: Path) -> str:
    """Returns a path as it is told: from the user's home folder on, if it is there."""
    home = re.escape(os.path.expanduser("~") + os.sep)
    return re.sub(f"^{home}", "~/", str(file))


@contextlib.contextmanager
def measuring(what: str, why: str, parts: int, kept: Path, *, shown: bool = True) -> Iterator[Advance]:
    """Shows a line that says what is being measured, why, and where it is kept; with a bar on a terminal.

    The block calls what it is given `parts` times. `kept`: where the figures are kept. `shown`: whether this process is
    the one that says so.
    """
    line = f"measuring {what}, {why}; kept in {shown_path(kept)}"
    with noticing(f"measuring {what}", parts=parts, at_once=line, shown=shown) as notice:
        done = itertools.count()
        yield lambda part: notice.tell(part, done=next(done))
