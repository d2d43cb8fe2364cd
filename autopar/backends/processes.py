"""Small messages between the processes of a mesh, on the host: what they must agree on before they run one program.

They go through the key-value store of `jax.distributed`, not through the devices: a message doesn't wait for the
programs in flight there, needs no compilation, and may be of any size. Every process must come to every exchange, in
the same order; one that waits says for whom.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from autopar import jax_compat
from autopar.errors import ArgumentsError, AutoparError
from autopar.launch.progress import PROGRESS

_logger = logging.getLogger("autopar")

#: How long is waited before it is said for whom.
_PATIENCE_S = 20
#: Exchanges so far between some processes: each has a name of its own in the store. Unavoidably global, as those are.
_exchanges: Counter[tuple[int, ...]] = Counter()


@dataclass(frozen=True)
class Processes:
    """The processes that own devices of a mesh, in order."""

    members: tuple[int, ...]

    @staticmethod
    def of(mesh: Mesh) -> Processes:
        """Those of a mesh."""
        return Processes(tuple(sorted({d.process_index for d in mesh.devices.flat})))

    @property
    def several(self) -> bool:
        """Whether there is more than this one: arrays then have parts that this process can't read."""
        return len(self.members) > 1

    @property
    def rank(self) -> int:
        """This process's place among them.

        Raises:
          ArgumentsError: it has none.
        """
        me = jax.process_index()
        if me not in self.members:
            raise ArgumentsError(
                f"process {me} has no device in the mesh, whose devices are those of {self.members}. Make the mesh of "
                "all devices, jax.devices(), or run the step on those processes alone"
            )
        return self.members.index(me)

    def gather(self, value: bytes, about: str) -> list[bytes]:
        """Each process's value, in their order. Waits for all of them, and says so if one doesn't come.

        Args:
          value: This process's.
          about: What it is for; every process must say the same.

        Raises:
          AutoparError: another process exchanges something else.
        """
        if not self.several:
            return [value]
        store = jax_compat.key_value_store()
        assert store is not None, "a mesh over several processes needs jax.distributed, and so its store"
        before = PROGRESS.last
        PROGRESS.mark(before.step, "an agreement of processes", "waits")
        try:
            return self._exchange(store, value, about)
        finally:
            PROGRESS.mark(before.step, before.what, before.kind)

    def _exchange(self, store: jax_compat.KeyValueStore, value: bytes, about: str) -> list[bytes]:
        number = _exchanges[self.members]
        _exchanges[self.members] += 1
        store.key_value_set_bytes(self._key(number, self.rank), about.encode() + b"\0" + value)
        values = []
        for k, member in enumerate(self.members):
            with PROGRESS.during(about, "waits"):
                theirs, _, data = self._wait(store, self._key(number, k), member, about).partition(b"\0")
            if theirs != about.encode():
                raise AutoparError(
                    f"process {member} is at '{theirs.decode()}' where this one, process {jax.process_index()}, is at "
                    f"'{about}'. All processes have to make the same calls in the same order"
                )
            values.append(data)
        if number:  # all have come to this one, so all have read the one before
            store.key_value_delete(self._key(number - 1, self.rank))
        return values

    def _key(self, number: int, rank: int) -> str:
        return f"autopar/{'-'.join(map(str, self.members))}/{number}/{rank}"

    @staticmethod
    def _wait(store: jax_compat.KeyValueStore, key: str, member: int, about: str) -> bytes:
        for turn in itertools.count(1):
            try:
                return store.blocking_key_value_get_bytes(key, 1000 * _PATIENCE_S)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                waited = turn * _PATIENCE_S
                _logger.warning("%s: waiting for process %d since %d s; all have to come", about, member, waited)
        raise AssertionError("itertools.count doesn't end")


def own_devices(devices: Iterable[Any]) -> list[Any]:
    """Those of this process."""
    return [device for device in devices if device.process_index == jax.process_index()]
