"""`TableLeaf`: what leaves of autopar's own have in common with an array, wherever their parts are."""

from __future__ import annotations

import abc
import operator
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, SupportsIndex, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from autopar import explicit_meshes, jax_compat
from autopar.backends import global_arrays
from autopar.errors import CheckpointError, SlowPlanWarning, warn
from autopar.ir.figures import format_bytes
from autopar.ir.layout import RowLayout
from autopar.jax_types import Dtype, Index, Leaf, Pytree, Sharding

#: From so many bytes on, and so many reads of whole leaves of a kind and shape by JAX and NumPy, a warning.
_LARGE_BYTES, _READS = 64 << 20, 10
_reads: Counter[tuple[type, tuple[int, ...]]] = Counter()


@dataclass(frozen=True)
class Shards:
    """The parts of a leaf as files have them."""

    layout: RowLayout  #: Which row is in which.
    axis: int  #: Of rows.
    #: (number, rows, row axis first) of those that this process saves; each is saved by one. Spare rows at the end are
    #: left out of files.
    own: Callable[[], Iterator[tuple[int, np.ndarray]]]


class TableLeaf(abc.ABC):
    """A leaf of the state that stands for an array [..., V, ...] of the rows' dtype.

    Python's operators, methods of arrays and functions of JAX read it whole, and make ordinary arrays, as
    `0.9 * average + 0.1 * table` of a moving average. `copy.deepcopy` makes a leaf with buffers of its own; `pickle`,
    Flax's `to_bytes` and Orbax write an ordinary array, if this process has all of it. docs/leaves.md lists it all.
    """

    #: Each client has its own (`sync=`), so that only steps of clients take it.
    of_clients: ClassVar[bool] = False
    #: NumPy's operators leave the work to those of this class, as they do for arrays of JAX.
    __array_priority__ = 100

    def __init_subclass__(cls, **kwargs: Pytree) -> None:
        super().__init_subclass__(**kwargs)
        jax_compat.register_array_like(cls, TableLeaf.__jax_array__)
        for name in {"materialize", "read", "current", "__getitem__", "_on_host"} & vars(cls).keys():
            setattr(cls, name, explicit_meshes.outside_mesh(getattr(cls, name)))

    def __new__(cls, *args: Pytree, **kwargs: Pytree) -> Any:
        flax = sys.modules.get("flax.serialization")  # it looks for the very class, and has no other way to ask it
        if flax is not None and not flax.is_serializable(cls):
            flax.register_serialization_state(cls, TableLeaf.ordinary, lambda leaf, state: state)
        handlers = getattr(sys.modules.get("orbax.checkpoint"), "type_handlers", None)
        if handlers is not None and not handlers.has_type_handler(cls):
            handlers.register_type_handler(TableLeaf, handler := _orbax_handler(handlers))
            handler.name = "np.ndarray"  # any process can read it; registered, it is taken
        return super().__new__(cls)

    def __init__(self, aval: Leaf) -> None:
        """Takes what has its shape and dtype."""
        self._aval = aval

    @property
    def shape(self) -> tuple[int, ...]:
        """The table's own shape, [..., V, ...]."""
        return self._aval.shape

    @property
    def dtype(self) -> Dtype:
        return self._aval.dtype

    @abc.abstractmethod
    def is_deleted(self) -> bool:
        """Tells whether the rows were given to a step, which updated them in place."""

    @explicit_meshes.outside_mesh
    def materialize(self) -> Leaf:
        """Returns the table as an ordinary array, which later steps leave alone. Collective as `_on_host` is."""
        return jnp.asarray(self._on_host())

    @abc.abstractmethod
    def _on_host(self) -> np.ndarray:
        """Returns the table as an array of NumPy. Collective where others have a part of it."""

    def read(self) -> Leaf:
        """Returns what `materialize` does, or an array that the next step updates: to be read at once."""
        return self.materialize()

    @property
    def stored_as(self) -> tuple[RowLayout, int] | None:
        """Layout and row axis of rows that are stored in one; None of others."""
        return None

    @property
    @abc.abstractmethod
    def is_whole_here(self) -> bool:
        """Tells whether this process alone has all of it, and no other has a replica."""

    def ordinary(self) -> Leaf:
        """Returns an ordinary array for a file that this process writes by itself. Raises CheckpointError if others
        have a part of it."""
        if not self.is_whole_here:
            raise CheckpointError(
                f"an {self!r} can't be pickled or made bytes of: this process has only a part of it, or a replica of "
                "its own. autopar.save(path, state), which all processes call, writes the state; "
                "autopar.materialize(state), or autopar.average(state) of replicas, collective as well, makes ordinary "
                "arrays, which one process may pickle"
            )
        return self._written()

    def _written(self) -> Leaf:
        """Returns all of it, in the memory where it is, for a file."""
        return self.materialize()

    def __jax_array__(self) -> Leaf:
        self._count_read()
        with jax_compat.outside_traces():
            array = self.materialize()
            devices = array.devices()
            if len(devices) > 1 and next(iter(devices)).platform == "cpu":
                array.block_until_ready()  # independent programs with collectives starve each other of CPUs' threads
            return array

    def __array__(self, dtype: Dtype = None, copy: bool | None = None) -> np.ndarray:
        self._count_read()
        array = self._on_host()
        return array.astype(dtype or array.dtype, copy=False)

    def _count_read(self) -> None:
        """Warns once where large leaves are read whole again and again."""
        kind = type(self), self.shape
        _reads[kind] += self.nbytes >= _LARGE_BYTES
        if _reads[kind] == _READS:
            warn(
                f"functions of JAX or NumPy have read {self!r} {_READS} times, {format_bytes(self.nbytes)} each time: "
                "all rows. Look rows up in a planned function, autopar.parallelize(evaluate), or make ordinary arrays "
                "once, autopar.materialize(state)",
                SlowPlanWarning,
            )

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return self.ordinary().__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: object) -> Any:
        """Copies it to buffers of its own, all rows up to date."""
        leaf = current(self)
        return leaf.duplicate() if isinstance(leaf, PlacedLeaf) else copied(leaf)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in _READING:
                return getattr(self.__jax_array__(), name)
            raise AttributeError(
                f"an autopar.{type(self).__name__} has no attribute {name!r}: table[...] is an ordinary array, and "
                "autopar.materialize(state) makes a state of such"
            )

    @property
    @abc.abstractmethod
    def _where(self) -> str:
        """Says where its rows are, for `repr`."""

    def __repr__(self) -> str:
        kind, shape = type(self).__name__, ",".join(map(str, self.shape))
        return f"autopar.{kind}({self.dtype}[{shape}]{self._where}; an ordinary array: autopar.materialize)"

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements, spare rows excepted."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Bytes of the table, spare rows excepted."""
        return self.size * self.dtype.itemsize

    #: By identity, as those of containers must be: `==` compares elements.
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(f"a table of {self.size} elements is neither true nor false: ask for `is None`, or any()")
        return bool(self.materialize())

    def __int__(self) -> int:
        return int(self.materialize())

    def __index__(self) -> int:
        return operator.index(self.materialize())

    def __float__(self) -> float:
        return float(self.materialize())

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[Leaf]:
        return iter(self.materialize())


class PlacedLeaf(TableLeaf):
    """A leaf whose parts are somewhere."""

    @property
    @abc.abstractmethod
    def home(self) -> Home:
        """The memory that it is stored in."""

    @property
    @abc.abstractmethod
    def shards(self) -> Shards:
        """The shards that it is saved in."""

    @abc.abstractmethod
    def duplicate(self) -> PlacedLeaf:
        """Returns a copy on the same devices or hosts. Nothing is exchanged."""


P = TypeVar("P")


class StandingLeaf(TableLeaf, Generic[P]):
    """A leaf that stands for another one, or for an array, to which something is still to be done.

    Attributes:
      pending: What is still to be done: to all leaves of a state that share it.
      index: Its index among these.
    """

    def __init__(self, pending: P, index: int, aval: Leaf) -> None:
        """Takes, besides the attributes, what has its shape and dtype (`aval`)."""
        super().__init__(aval)
        self.pending, self.index = pending, index

    @abc.abstractmethod
    def current(self) -> Leaf:
        """Returns the leaf once nothing is left to be done to it: an array, or another leaf."""

    def read(self) -> Leaf:
        leaf = self.current()
        return leaf.read() if isinstance(leaf, TableLeaf) else leaf

    def materialize(self) -> Leaf:
        leaf = self.current()
        return leaf.materialize() if isinstance(leaf, TableLeaf) else copied(leaf)

    def _on_host(self) -> np.ndarray:
        leaf = self.current()
        return leaf._on_host() if isinstance(leaf, TableLeaf) else np.array(leaf)  # later steps update it in place

    def __getitem__(self, index: Index) -> Leaf:
        leaf = self.current()
        picked = leaf[index]
        return jnp.copy(picked) if picked is leaf else picked  # later steps update the leaf in place


def is_traced(index: Index) -> bool:
    """Returns whether rows are picked by numbers that a trace knows alone."""
    return any(isinstance(x, jax_compat.Tracer) for x in (index if isinstance(index, tuple) else (index,)))


def _orbax_handler(handlers: Any) -> Any:
    """Returns what writes leaves into Orbax's PyTree checkpoints, as arrays. `handlers`: Orbax's module of them."""

    class Handler(handlers.NumpyHandler):
        name = "autopar.TableLeaf"

        def typestr(self) -> str:
            return self.name

        async def serialize(self, values: Any, infos: Any, args: Any = None) -> Any:
            return await super().serialize([np.asarray(leaf.ordinary()) for leaf in values], infos, args)

    return Handler()


def current(leaf: Leaf) -> Leaf:
    """Brings a leaf up to date: a table updates rows that wait, an array that is on its way arrives."""
    while isinstance(leaf, StandingLeaf):
        leaf = leaf.current()
    return leaf


def copied(leaf: Leaf) -> Leaf:
    """Copies an array, to where it is; returns anything else, and a value that is being traced, as it is."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if not isinstance(leaf, jax.Array) or jax_compat.is_tracer(leaf):
        return leaf
    with jax_compat.outside_traces():
        if jax_compat.is_key(leaf.dtype):
            return jax.random.wrap_key_data(copied(jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf))
        duplicate = jnp.copy(leaf)
        if duplicate.sharding.is_equivalent_to(leaf.sharding, leaf.ndim):
            return duplicate
        return jax.device_put(leaf, leaf.sharding, may_alias=False)  # in another kind of memory, say


#: What arrays of JAX have that is read, or computed, of their elements alone.
_READING = frozenset(
    "T mT at real imag all any argmax argmin argpartition argsort astype choose clip compress conj conjugate copy "
    "cumprod cumsum diagonal dot flatten item max mean min nonzero prod ptp ravel repeat reshape round searchsorted "
    "sort squeeze std sum swapaxes take tolist trace transpose var".split()
)


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: TableLeaf, *others: Leaf) -> Any:
        arrays = [x.__jax_array__() if isinstance(x, TableLeaf) else x for x in others]
        return getattr(self.__jax_array__(), name)(*arrays)

    apply.__name__ = name
    apply.__doc__ = "As of an array: the result is an ordinary one, of all rows."
    return apply


_BINARY = "add sub mul truediv floordiv mod divmod pow matmul and or xor lshift rshift".split()
_OTHERS = "eq ne lt le gt ge neg pos abs invert".split()
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_OTHERS):
    setattr(TableLeaf, f"__{_name}__", _operator(f"__{_name}__"))


# --- `Home`: where a leaf is, and how it is brought there from what has all of it, a file or an array ---


class Source(Protocol):
    """All of a leaf, read part by part. Nothing is exchanged."""

    def whole(self) -> np.ndarray: ...

    def part(self, index: Index) -> np.ndarray:
        """Returns `leaf[index]`; `index`: a slice for each axis."""
        ...

    def rows(self, numbers: np.ndarray, axis: int) -> np.ndarray:
        """Returns [n, ...]: a copy of what has these numbers along an axis, that axis first."""
        ...


class Described(Protocol):
    """Describes a leaf before it is read."""

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def numpy_dtype(self) -> np.dtype: ...
    @property
    def weak(self) -> bool: ...
    @property
    def key(self) -> str | None: ...


class Home(abc.ABC):
    """Memory that leaves are stored in: it makes, saves and restores them. Each kind of leaf has its own, beside it."""

    @abc.abstractmethod
    def made(self, source: Source, leaf: Described) -> Pytree:
        """Makes the leaf at this home; of what several processes have, this one's part."""

    @property
    def reads_itself(self) -> Any:
        """The sharding by which Orbax may read an ordinary array straight to its devices; None: it may not."""
        return None


@dataclass(frozen=True)
class ArrayHome(Home):
    """An ordinary array of JAX, or of random keys. `sharding`: None: where JAX puts arrays by itself."""

    sharding: Sharding = None

    @property
    def reads_itself(self) -> Any:
        return self.sharding if self.sharding is not None and len(self.sharding.device_set) > 1 else None

    def made(self, source: Source, leaf: Described) -> jax.Array:
        require_dtype(leaf)
        if leaf.key is not None:
            keys = jax.random.wrap_key_data(jnp.asarray(source.whole()), impl=leaf.key)
            return keys if self.sharding is None else global_arrays.place_array(keys, self.sharding)
        if self.sharding is None:
            array = jnp.asarray(source.whole())
        else:
            array = jax.make_array_from_callback(leaf.shape, self.sharding, source.part)
        return jax_compat.weak(array) if leaf.weak else array


class NumpyHome(Home):
    """An array of NumPy."""

    def made(self, source: Source, leaf: Described) -> np.ndarray:
        return np.array(source.whole())


def require_dtype(leaf: Described) -> None:
    """Checks that JAX has the leaf's dtype. Raises CheckpointError if it hasn't, as without 64 bits."""
    if jax.dtypes.canonicalize_dtype(leaf.numpy_dtype) != leaf.numpy_dtype:
        raise CheckpointError(
            f"{leaf.path} was saved as {leaf.numpy_dtype}, which JAX doesn't have now: set jax_enable_x64 as it was"
        )


@dataclass(frozen=True)
class Whole:
    """A source that this process has all of."""

    array: np.ndarray  #: The leaf.

    def whole(self) -> np.ndarray:
        return self.array

    def part(self, index: Index) -> np.ndarray:
        return self.array[index]

    def rows(self, numbers: np.ndarray, axis: int) -> np.ndarray:
        return np.moveaxis(np.take(self.array, numbers, axis), axis, 0)
