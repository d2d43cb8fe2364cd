"""`ReplicaRunner`: runs a client's own step, and exchanges its weights with others' (`autopar.sync`)."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from autopar.backends.clients import Clients
from autopar.backends.global_arrays import is_global, local
from autopar.compile import Compiled
from autopar.errors import StepError
from autopar.ir.plan import SyncPlan
from autopar.ir.program import Program, known
from autopar.jax_types import Array, Leaf, Pytree, PyTreeDef
from autopar.launch.slowness import SLOWNESS
from autopar.measure.alpha import id_program, id_reader, is_exact
from autopar.run.agreement import check_same_arrays, warn_if_alone
from autopar.run.planned_step import Runner
from autopar.sync import Replicated
from autopar.tables.kinds import materialize
from autopar.tables.leaf import TableLeaf
from autopar.tables.replica import Replica, Replicas, Rows, Touched, replicas_of


def fragments_of(plan: SyncPlan, program: Program) -> list[list[int]]:
    numbers = {input_.path: k for k, input_ in enumerate(program.inputs) if k in program.new_states}
    return [[numbers[path] for path in fragment] for fragment in plan.fragments]


class ReplicaRunner(Runner):
    """Runs a client's own step by `inner`, and exchanges weights. `touched`: finds the rows of tables that steps touch.
    `program`, `plain`: the analysed step, and the traced one on flat arrays."""

    several_programs = "with sync="

    def __init__(
        self,
        inner: Runner,
        sync: Replicated,
        plan: SyncPlan,
        touched: TouchedRows,
        clients: Clients,
        program: Program,
        out_tree: PyTreeDef,
        plain: Callable[..., Sequence[Leaf]],
    ) -> None:
        self.inner, self.touched, self.clients = inner, touched, clients
        self._sync, self._plan, self._plain = sync, plan, plain
        self._new_states, self._out_tree = program.new_states, out_tree
        self._name, self._paths = program.name, [input_.path for input_ in program.inputs]
        self._fragments = fragments_of(plan, program)
        #: Inputs that are exchanged.
        self.weights = [k for fragment in self._fragments for k in fragment]

    @property
    def mode(self) -> str:
        """A name that steps share which can go on with each other's replicas."""
        return f"{self._plan.name} of {self._plan.fragments}"

    @abc.abstractmethod
    def resumed(self, saved: Mapping[str, Array]) -> Replicas:
        """Returns the shared state that a checkpoint has (`Replicas.shared`, and this client's own part); raises
        CheckpointError if it was saved with another `sync=`."""

    @abc.abstractmethod
    def first(self, weights: Mapping[int, Array]) -> Replicas:
        """Returns the shared state before the first step. `weights`: input -> its value on all clients."""

    @abc.abstractmethod
    def _before(self, replicas: Replicas, leaves: Sequence[Leaf], own: Sequence[Leaf]) -> Replicas:
        """Returns the shared state before a step. `leaves`: the step's flat arguments; `own`: this client's arrays for
        them."""

    @abc.abstractmethod
    def _after(self, replicas: Replicas, results: Sequence[Leaf]) -> tuple[Replicas, dict[int, Array]]:
        """Returns the shared state after a step, and the weights that aren't the step's results."""

    def loads(self) -> Sequence[int] | None:
        return self.inner.loads()

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments; returns its new state as replicas, and its own minibatch's results."""
        replicas = replicas_of(leaves)
        own = [self._own(leaf) for leaf in leaves]
        for k in self._new_states:
            own[k] = self.clients.placed(own[k]) if isinstance(own[k], jax.Array) else own[k]
        if replicas is None:
            replicas = self._begun(own)
        elif replicas.mode != self.mode:
            raise StepError(
                f"{self._name}: the state's replicas are of another sync=, {replicas.mode}, and this step has "
                f"{self.mode}. Begin with their mean, autopar.average(state)"
            )
        replicas = self._before(replicas, leaves, own)
        if SLOWNESS.is_on:
            jax.block_until_ready([x for x in own if isinstance(x, jax.Array)])  # a mean, which others may be late for
        with SLOWNESS.computing():
            results = jax.tree.leaves(self.inner(own))
            if SLOWNESS.is_on:
                jax.block_until_ready(results)
        replicas, new = self._after(replicas, results)
        for k, array in new.items():
            results[self._new_states[k]] = array
        for k, out in self._new_states.items():
            results[out] = Replica(results[out], replicas, k)
        return self._out_tree.unflatten(results)

    def _begun(self, leaves: Sequence[Leaf]) -> Replicas:
        """Returns the shared state before the first step of ordinary arrays. Collective. Raises StateError if the
        clients' arrays differ."""
        warn_if_alone(self._name, self._sync, self.clients)
        weights = Weights(dict(enumerate(leaves)))
        if self.clients.count > 1:
            mine = {self._paths[k]: local(weights[k]) for k in self.weights}
            check_same_arrays(self.clients.processes, self._name, mine)
        if self._sync.curvature == "measure" and self.clients.own == 0 and self.clients.leads:
            states = {k: self._new_states[k] for k in self.weights}
            self._sync.check_stable(slope_of(self._plain, [local(materialize(x)) for x in leaves], states))
        return self.first(weights)

    def _own(self, leaf: Leaf) -> Leaf:
        """Returns a client's own array; of one that is also on other clients' devices a copy."""
        if isinstance(leaf, Replica):
            return leaf.own
        is_elsewhere = is_global(leaf) and not leaf.sharding.device_set <= set(self.clients.devices.mesh.devices.flat)
        return local(leaf) if is_elsewhere else leaf


class Weights(Mapping[int, Array]):
    """Input -> leaf as an ordinary array, its rows in order and up to date. Each is made when it is read."""

    def __init__(self, leaves: Mapping[int, Leaf]) -> None:
        self._leaves = leaves

    def but(self, new: Mapping[int, Array]) -> Weights:
        return Weights({**self._leaves, **new})

    def __getitem__(self, k: int) -> Array:
        leaf = self._leaves[k]
        return leaf.read() if isinstance(leaf, TableLeaf) else jnp.asarray(leaf)

    def __iter__(self) -> Iterator[int]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)


# --- the rows of tables that a client has touched since the last mean; other rows don't differ ---
#
# It serves tables whose other rows a step leaves unchanged (`SyncPlan.by_rows`).


#: The smallest padded number of rows.
_LEAST = 256


class TouchedRows:
    """Finds the rows that steps of a client look up."""

    def __init__(self, compiled: Compiled, plan: SyncPlan) -> None:
        program = compiled.analysed
        by_path = {program.inputs[k].path: k for k in program.new_states}
        #: Input -> its family, of tables of which the touched rows are sent.
        self._families = {k: known(program.facts.space_of(k)) for k in (by_path[path] for path in plan.by_rows)}
        family = compiled.bound.family
        lifted = {k: program.ids[s.family] for k, s in self._families.items() if family(s.family) is not None}
        self._readers = {k: id_reader(program, x) for k, x in lifted.items() if is_exact(id_program(program, x)[0])}

    def __contains__(self, k: int) -> bool:
        return k in self._families

    def none(self, tables: Collection[int]) -> dict[int, Touched]:
        return {k: Touched(space.extent) for k, space in self._families.items() if k in tables}

    def after(self, touched: Mapping[int, Touched], leaves: Sequence[Leaf]) -> dict[int, Touched]:
        """Returns for each table the rows touched after one more call, whose `leaves` aren't donated yet; all rows
        where nobody has counted them."""
        made = {}
        for k, space in self._families.items():
            so_far = touched.get(k)
            if so_far is None or k not in self._readers:  # no reader: all rows move, or ids may round differently
                made[k] = Touched(space.extent, (self.everything(k),))
                continue
            ids = self._readers[k](leaves)
            assert ids is not None, "a call has all of its arguments"
            found = np.unique(np.concatenate(ids))
            made[k] = so_far.with_call(found[(found >= 0) & (found < space.extent)])
        return made

    def of_bits(self, k: int, bits: np.ndarray) -> Touched:
        """Returns the rows that a checkpoint's bits name."""
        return Touched.of_bits(self._families[k].extent, bits)

    def rows(self, k: int, bits: np.ndarray) -> np.ndarray | None:
        """Returns the rows that bits name, padded; None if there are so many that all are sent."""
        extent = self._families[k].extent
        (rows,) = np.nonzero(np.unpackbits(bits, count=extent))
        padded = self.padded(rows)
        return None if 2 * padded.size > extent else padded

    def padded(self, rows: np.ndarray) -> np.ndarray:
        """Repeats rows up to a power of two, so that few programs are compiled."""
        count = max(_LEAST, 1 << max(0, rows.size - 1).bit_length())
        return np.resize(rows if rows.size else np.zeros(1, np.int64), count)

    def everything(self, k: int) -> np.ndarray:
        return np.arange(self._families[k].extent)

    def picked(self, k: int, array: Array, rows: np.ndarray) -> Array:
        """Returns rows of a table, [n, ...]."""
        return _picked(array, rows.astype(np.int32), self.axis(k))

    def rows_of(self, k: int, rows: np.ndarray, values: Array) -> Rows:
        return Rows(self.axis(k), rows.astype(np.int32), values)

    def put(self, k: int, array: Array, rows: np.ndarray, values: Array, *, in_place: bool) -> Array:
        return _putter(in_place)(array, rows.astype(np.int32), values, self.axis(k))

    def axis(self, k: int) -> int:
        space = self._families[k]
        return space.axes[space.leaves.index(k)]


@functools.partial(jax.jit, static_argnums=2)
def _picked(array: Array, indices: Array, axis: int) -> Array:
    return jnp.moveaxis(jnp.take(array, indices, axis), axis, 0)


@functools.cache
def _putter(in_place: bool) -> Callable[[Array, Array, Array, int], Array]:
    def put(array: Array, indices: Array, values: Array, axis: int) -> Array:
        return array.at[(slice(None),) * axis + (indices,)].set(jnp.moveaxis(values, 0, axis))

    return jax.jit(put, static_argnums=3, donate_argnums=0 if in_place else ())


# --- the curvature of a step's update, eta h of SGD, by power iteration ---


#: Most products with the Jacobian, and the relative change of the eigenvalue that ends them.
_PRODUCTS, _TOLERANCE = 64, 1e-3


def slope_of(step: Callable[..., Sequence[Array]], leaves: Sequence[Array], weights: Mapping[int, int]) -> float:
    """Returns the largest eigenvalue of I - dx'/dx, where the plain step, on flat arrays, maps weights x to x'.
    `weights`: floating-point arguments -> the results that are their new values.

    With SGD x' = x - eta g(x), so it is eta h with h the largest eigenvalue of the loss's Hessian on this batch; with
    momentum, too. With other optimizers it is the rate at which a step shrinks a distance from a minimum. It takes at
    most 64 Jacobian-vector products, or 128 if the eigenvalue of largest magnitude is negative.
    """
    numbers = list(weights)

    @jax.jit
    def product(x: Sequence[Array], along: Sequence[Array], leaves: Sequence[Array]) -> list[Array]:
        def moved(x: Sequence[Array]) -> list[Array]:
            results = step(*({**dict(enumerate(leaves)), **dict(zip(numbers, x, strict=True))}.values()))
            return [results[out] for out in weights.values()]

        _, change = jax.jvp(moved, (x,), (along,))
        return [a - b for a, b in zip(along, change, strict=True)]

    x = [jnp.asarray(leaves[k]) for k in numbers]
    keys = jax.random.split(jax.random.key(0), len(x))
    start = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, x, strict=True)]
    largest = _dominant(lambda along: product(x, along, leaves), start)
    if largest >= 0:
        return largest
    # The eigenvalue of largest magnitude is negative: shifted by it, the largest one dominates.
    return largest + _dominant(
        lambda along: [a - largest * b for a, b in zip(product(x, along, leaves), along, strict=True)], start
    )


def _dominant(product: Callable[[list[Array]], list[Array]], along: list[Array]) -> float:
    """Returns the eigenvalue of largest magnitude of a roughly symmetric matrix."""
    value = 0.0
    for _ in range(_PRODUCTS):
        norm = jnp.sqrt(sum(jnp.vdot(a, a).real for a in along))
        if not norm > 0:
            return 0.0
        along = [(a / norm).astype(a.dtype) for a in along]
        image = product(along)
        last, value = value, float(sum(jnp.vdot(a, b).real for a, b in zip(along, image, strict=True)))
        if abs(value - last) <= _TOLERANCE * abs(value):
            break
        along = image
    return value
