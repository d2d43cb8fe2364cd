"""Programs written by hand, one equation at a time: for tests of single passes, and for golden texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import numpy as np
from jax import lax

from autopar import jax_compat
from autopar.ir.options import Options
from autopar.ir.program import ArrayType, Atom, Block, Equation, Input, Output, Program, Var
from autopar.ir.trace import block_of

#: Of the table, and of a batch.
ROWS, WIDTH, IDS = 6, 2, 3


class Builder:
    """A block being written: `b(fun, *atoms)` appends the one equation that `fun` is."""

    def __init__(self) -> None:
        self.inputs: list[Var] = []
        self.given: list[Input] = []
        self.equations: list[Equation] = []

    def input(self, path: str, role: str, shape: Sequence[int], dtype: Any = np.float32) -> Var:
        self.inputs.append(Var(ArrayType(tuple(shape), np.dtype(dtype))))
        self.given.append(Input(path, role))
        return self.inputs[-1]

    def __call__(self, fun: Callable[..., Any], *atoms: Var) -> Var:
        shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in atoms]
        block = block_of(jax_compat.trace(fun, tuple(shapes), {}).jaxpr)
        (equation,) = block.equations
        theirs = dict(zip(block.inputs, atoms, strict=True))
        inputs = tuple(theirs.get(a, a) if isinstance(a, Var) else a for a in equation.inputs)
        self.equations.append(dataclasses.replace(equation, inputs=inputs, context=None, info=None, origin=None))
        return equation.outputs[0]

    def nested(self, op: str, body: Block, operands: Sequence[Atom], outputs: Sequence[Var], **params: Any) -> None:
        self.equations.append(Equation(op, tuple(operands), tuple(outputs), params, (body,)))

    def block(self, *outputs: Atom) -> Block:
        return Block(tuple(self.inputs), tuple(self.equations), outputs)

    def program(self, name: str, outputs: Sequence[tuple[Atom, str, int | None]]) -> Program:
        outs = tuple(Output(path, state) for _, path, state in outputs)
        return Program(self.block(*(a for a, _, _ in outputs)), tuple(self.given), outs, name)


def lookup(table: Any, ids: Any) -> Any:
    numbers = lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return lax.gather(table, ids, numbers, (1, WIDTH), mode="clip")


def add_rows(table: Any, ids: Any, rows: Any) -> Any:
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return lax.scatter_add(table, ids, rows, numbers, mode="drop")


def zeros() -> Any:
    return lax.broadcast_in_dim(np.float32(0), (ROWS, WIDTH), ())


def times(factor: float) -> Callable[[Any], Any]:
    return lambda x: lax.mul(x, np.float32(factor))


def total(x: Any) -> Any:
    return lax.reduce_sum(x, tuple(range(x.ndim)))


TOLD: list[float] = []
TELL = jax.extend.core.Primitive("tell")
TELL.def_impl(lambda x: TOLD.append(float(x)) or x)
TELL.def_abstract_eval(lambda x: x)


def dead_code() -> Program:
    """Dead equations go, an effect and what it reads stay, equal equations become one."""
    b = Builder()
    x = b.input("x", "state", (IDS,))
    b(lax.sin, x)
    loud = b(total, b(times(3.0), x))
    b(TELL.bind, loud)
    b.equations[-1] = dataclasses.replace(b.equations[-1], effects=True)
    first, second = b(lax.exp, b(times(2.0), x)), b(lax.exp, b(times(2.0), x))
    return b.program("dead_code", [(b(lax.add, first, second), "x", 0)])


def remat() -> Program:
    """The same ids computed twice are one value; what a remat computes again is not merged with the first time."""
    b = Builder()
    table, raw = b.input("table", "state", (ROWS, WIDTH)), b.input("ids", "batch", (IDS, 1), np.int32)
    ids, again = (b(lambda i: lax.add(i, np.int32(1)), raw) for _ in range(2))
    rows = b(lookup, table, ids)
    inner = Builder()
    leaf, inner_raw = inner.input("", "", table.shape), inner.input("", "", raw.shape, np.int32)
    inner_ids = inner(lambda i: lax.add(i, np.int32(1)), inner_raw)
    grads = Var(rows.type)
    body = inner.block(inner(times(2.0), inner(lookup, leaf, inner_ids)))
    b.nested("remat", body, (table, raw), (grads,), prevent_cse=True, policy=None)
    pushed = b(add_rows, b(zeros), again, grads)
    new = b(lax.sub, table, b(times(0.1), pushed))
    return b.program("remat", [(new, "table", 0), (b(total, rows), "loss", None)])


def sgd() -> Program:
    """A lookup, the gradient's scatter-add into zeros, and SGD: the table is a family of its own."""
    b = Builder()
    table, ids = b.input("table", "state", (ROWS, WIDTH)), b.input("ids", "batch", (IDS, 1), np.int32)
    rows = b(lookup, table, ids)
    pushed = b(add_rows, b(zeros), ids, b(times(2.0), rows))
    new = b(lax.sub, table, b(times(0.1), pushed))
    return b.program("sgd", [(new, "table", 0), (b(total, b(lax.mul, rows, rows)), "loss", None)])


def adagrad() -> Program:
    """A slot joins the table's family; the norm of the gradient is a reduction over the rows."""
    b = Builder()
    table, slot = b.input("table", "state", (ROWS, WIDTH)), b.input("slot", "state", (ROWS,))
    ids = b.input("ids", "batch", (IDS, 1), np.int32)
    pushed = b(add_rows, b(zeros), ids, b(times(2.0), b(lookup, table, ids)))
    squares = b(lax.mul, pushed, pushed)
    clip = b(lax.rsqrt, b(lambda n: lax.max(n, np.float32(1)), b(total, squares)))
    sums = b(lax.add, slot, b(lambda x: lax.reduce_sum(x, (1,)), squares))
    scale = b(lax.rsqrt, b(lambda s: lax.add(s, np.float32(0.5)), sums))
    wide = b(lambda s: lax.broadcast_in_dim(s, (ROWS, WIDTH), (0,)), scale)
    clipped = b(lax.mul, pushed, b(lambda c: lax.broadcast_in_dim(c, (ROWS, WIDTH), ()), clip))
    new = b(lax.sub, table, b(lax.mul, clipped, wide))
    return b.program("adagrad", [(new, "table", 0), (sums, "slot", 1)])


def scan() -> Program:
    """A loop with the table closed over, and its backward: the gradient is a carry, the ids don't change."""
    b = Builder()
    table, ids = b.input("table", "state", (ROWS, WIDTH)), b.input("ids", "batch", (4, IDS, 1), np.int32)
    start = b(zeros)
    inner = Builder()
    leaf, carry = inner.input("", "", table.shape), inner.input("", "", table.shape)
    now = inner(lambda i: lax.rem(i, np.int32(ROWS)), inner.input("", "", (IDS, 1), np.int32))
    rows = inner(lookup, leaf, now)
    body = inner.block(inner(add_rows, carry, now, inner(times(2.0), rows)), inner(total, rows))
    grads, losses = Var(table.type), Var(ArrayType((4,), np.dtype(np.float32)))
    loop = {"length": 4, "reverse": False, "unroll": 1, "num_consts": 1, "num_carry": 1}
    b.nested("scan", body, (table, start, ids), (grads, losses), **loop)
    new = b(lax.sub, table, b(times(0.1), grads))
    return b.program("scan", [(new, "table", 0), (b(total, losses), "loss", None)])


def tied() -> Program:
    """A product over all rows: the gradient is dense, and the table stays so."""
    b = Builder()
    table, ids = b.input("table", "state", (ROWS, WIDTH)), b.input("ids", "batch", (IDS, 1), np.int32)
    rows = b(lookup, table, ids)
    dims = (((1,), (1,)), ((), ()))
    logits = b(lambda r, t: lax.dot_general(r, t, dims), rows, table)
    back = b(lambda a, r: lax.dot_general(a, r, (((0,), (0,)), ((), ()))), logits, rows)
    pushed = b(add_rows, back, ids, b(lambda a, t: lax.dot_general(a, t, (((1,), (0,)), ((), ()))), logits, table))
    new = b(lax.sub, table, b(times(0.1), pushed))
    return b.program("tied", [(new, "table", 0), (b(total, b(lax.mul, logits, logits)), "loss", None)])


def projected(ids_count: int = 4, wide: int = 2) -> Program:
    """A lookup that goes through a dense parameter, and SGD for both."""
    b = Builder()
    table, w = b.input("table", "state", (ROWS, WIDTH)), b.input("w", "state", (WIDTH, wide))
    ids = b.input("ids", "batch", (ids_count, 1), np.int32)
    rows = b(lookup, table, ids)
    product = b(lambda r, w: lax.dot_general(r, w, (((1,), (0,)), ((), ()))), rows, w)
    towards_w = b(lambda r, y: lax.dot_general(r, y, (((0,), (0,)), ((), ()))), rows, product)
    back = b(lambda y, w: lax.dot_general(y, w, (((1,), (1,)), ((), ()))), product, w)
    pushed = b(add_rows, b(zeros), ids, back)
    new = b(lax.sub, table, b(times(0.1), pushed)), b(lax.sub, w, b(times(0.1), towards_w))
    loss = b(total, b(lax.mul, product, product))
    return b.program("projected", [(new[0], "table", 0), (new[1], "w", 1), (loss, "loss", None)])


def shards() -> Program:
    """Two devices: a dense parameter in shards is gathered for use, and each device's program has its reductions."""
    return projected()


def hosts() -> Program:
    """Two ranks, the table in their memory: compiled programs of owners and devices, with exchanges in between."""
    return projected()


def border() -> Program:
    """Two devices: a slice of looked-up rows, and the pad of its gradient, run at the rows' owners."""
    b = Builder()
    table, ids = b.input("table", "state", (ROWS, WIDTH)), b.input("ids", "batch", (2 * IDS, 1), np.int32)
    kept = b(lambda x: lax.slice(x, (0, 1), (2 * IDS, 2)), b(lookup, table, ids))
    wide = b(lambda x: lax.pad(x, np.float32(0), ((0, 0, 0), (1, 0, 0))), b(times(2.0), kept))
    pushed = b(add_rows, b(zeros), ids, wide)
    new = b(lax.sub, table, b(times(0.1), pushed))
    return b.program("border", [(new, "table", 0), (b(total, kept), "loss", None)])


def repeated() -> Program:
    """One rank with more ids than rows: what is computed of a row is computed once for each."""
    return projected(ids_count=24, wide=8)


def _product(axes: tuple[int, int]) -> Callable[[Any, Any], Any]:
    return lambda x, y: lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())))


def microbatches() -> Program:
    """Two products and their gradients: what sums over the examples ends the microbatches, and the update follows."""
    b = Builder()
    first, second = (b.input(name, "state", (WIDTH, WIDTH)) for name in ("first", "second"))
    x = b.input("x", "batch", (2 * IDS, WIDTH))
    hidden = b(_product((1, 0)), x, first)
    y = b(_product((1, 0)), hidden, second)
    dy = b(times(0.5), y)
    dhidden = b(_product((1, 1)), dy, second)
    grads = b(_product((0, 0)), x, dhidden), b(_product((0, 0)), hidden, dy)
    steps = [b(lax.add, w, b(times(-0.125), g)) for w, g in zip((first, second), grads, strict=True)]
    outputs = [(steps[0], "first", 0), (steps[1], "second", 1), (b(total, y), "loss", None)]
    return b.program("microbatches", outputs)


PROGRAMS = {
    p.__name__: p for p in (dead_code, remat, sgd, adagrad, scan, tied, shards, hosts, border, repeated, microbatches)
}
#: By rows on one device unless they are here; those aren't run, for they are programs of one device or rank of several.
OPTIONS = {
    "shards": Options(strategy={"table": "ps", "w": "ps"}, devices=2),
    "hosts": Options(strategy={"table": ("ps", "hosts")}, devices=2, hosts=True),
    "border": Options(strategy="ps", devices=2),
    "microbatches": Options(microbatches=2),
    "repeated": Options(strategy={"table": ("ps", "hosts")}, hosts=True),
}
