"""Keeps measured figures in the user's cache folder, and reports what is being measured."""

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

#: Reports the next measurement.
Advance = Callable[[str], None]

#: Version of the measurements; files of other versions aren't read.
_VERSION = 12


def cache_file(devices: Devices, name: str) -> Path:
    """Returns the file that keeps measured figures of these devices, whatever the mesh calls its axes.

    Its name depends on the machine, the cores that this process may use, kind and number of devices, mesh, processes
    and JAX version, whose hash replaces {} in `name`.
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
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "autopar"


def write_cache(file: Path, text: str) -> None:
    """Writes a file atomically; if it can't be written, the next process measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            new.write(text)
        os.replace(new.name, file)
    except OSError:
        return


def shown_path(file: Path) -> str:
    """Returns a path for people, with "~" for the user's home folder."""
    home = re.escape(os.path.expanduser("~") + os.sep)
    return re.sub(f"^{home}", "~/", str(file))


@contextlib.contextmanager
def measuring(what: str, why: str, parts: int, kept: Path, *, shown: bool = True) -> Iterator[Advance]:
    """Shows a line that says what is measured, why, and where it is kept; with a bar on a terminal.

    The block calls the yielded function `parts` times. `kept`: the file of the figures. `shown`: this process shows it.
    """
    line = f"measuring {what}, {why}; kept in {shown_path(kept)}"
    with noticing(f"measuring {what}", parts=parts, at_once=line, shown=shown) as notice:
        done = itertools.count()
        yield lambda part: notice.tell(part, done=next(done))
