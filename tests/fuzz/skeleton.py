"""A random program's text: what was drawn for it, then what all of them have. As it stands here, the plainest one.

`script.py` puts other choices into the place of those that are drawn here. A script needs nothing but JAX, Optax and
autopar; run by itself, it prints the leaves in which plain and planned steps differ.
"""

# --- head ---
import os
from dataclasses import replace
from typing import Any, NamedTuple  # noqa: F401

import jax
import jax.numpy as jnp
import numpy as np
import optax  # noqa: F401
from jax import lax  # noqa: F401
from jax.experimental.multihost_utils import process_allgather

import autopar
from autopar.passes.choosing import families

# --- drawn ---
SEED, TABLES, ROWS, WIDTH, IDS, PARTS = 0, 1, 11, 3, 4, 2
DTYPE: Any = float
DEVICES, OPTIONS = 1, {"strategy": "ps", "donate": False}
PIPELINE: Any = ()
NUMBER, NUMPY, BAGS = 1.0, False, False
STORED = (lambda t: t, lambda t: t)
CHAIN: Any = []
LOOKUPS: Any = [(lambda t, i: t[i], lambda i, k: i)]
AFTER: Any = lambda h: h  # noqa: E731
LOSS: Any = lambda h, y: jnp.mean((h - y) ** 2)  # noqa: E731
WHERE: Any = ("", lambda x, bad, p: x)
GRADIENT: Any = lambda loss, params, ids, y: jax.value_and_grad(loss)(params, ids[0], (y[0][0], y[1][0]))  # noqa: E731
TRANSFORMS: Any = []
SLOT: Any = jnp.zeros_like
OPTIMIZER: Any = lambda p, g, s, step, norm: (p - 0.1 * g, s)  # noqa: E731
WRITES: Any = []
RESULTS: Any = []
KEPT: Any = []
CLOSED: Any = (lambda k: (), lambda c, new, old: new)
GUARD: Any = lambda new, old, value, k: new  # noqa: E731
AROUND: Any = lambda train: train  # noqa: E731
CALL: Any = (lambda train: train, lambda f, state, batch: f(state, batch))
EVENTS: Any = [lambda s, k: s.train(batch(k)), lambda s, k: s.train(batch(k))]

# --- the same for all ---
NAMES = [f"table{k}" for k in range(TABLES)]
AXES = {"batch/ids": 1, "batch/y": 1, "batch/numbers": None}
#: Relative size of what start and batches are disturbed by, to see how far a program amplifies rounding.
SHAKE, SHAKEN = 0.0, 0


def enter(part, value, number, leaf=None):
    """The value with the batch's number in it, if this is the part of the step that it enters."""
    where, change = WHERE
    return change(value, number, value if leaf is None else leaf) if where == part else value


def loss(params, ids, labels, step):
    y, number = labels
    total = jnp.zeros((len(ids), WIDTH))
    for name in NAMES:
        table = STORED[1](params[name])
        for link in CHAIN:
            table = link(params, table)
        table = enter("table", table, number)
        for look, kind in LOOKUPS:
            total = total * 0.7 + look(table, kind(ids, step))
    total = AFTER(enter("rows", total, number))
    return enter("loss", LOSS(total @ params["w"] + params["bias"], enter("labels", y, number)), number)


def like(new, old):
    return jax.tree.map(lambda a, b: jnp.asarray(a).astype(jnp.asarray(b).dtype), new, old)


def train_with(number):
    """The step that closes over the constants of this number."""
    constants = CLOSED[0](number)

    def step(state, batch):
        return train(state, batch, constants)

    return step


def train(state, batch, constants):
    params, step, i = state["params"], state["step"], batch["ids"][0]
    to_stored, view = STORED
    value, grads = GRADIENT(
        lambda params, ids, labels: loss(params, ids, labels, step),
        params,
        batch["ids"],
        (batch["y"], batch["numbers"]),
    )
    number = jnp.prod(batch["numbers"])
    grads = {name: enter("gradient", g, number, params[name]) for name, g in grads.items()}
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    new, slots, results = {}, {}, {"loss": value, "norm": norm}
    for name, p in params.items():
        g, table = grads[name], name in NAMES
        for change in TRANSFORMS if table else ():
            g = to_stored(change(view(g), view(p), norm, i)).astype(g.dtype)
        moved = OPTIMIZER(p, g, state["slots"][name], step, norm) if p.ndim else (p - 0.1 * g, state["slots"][name])
        new[name], slots[name] = like(moved, (p, state["slots"][name]))
        if table:
            new[name] = like(to_stored(CLOSED[1](constants, view(new[name]), view(p))), p)
        for write in WRITES if table else ():
            new[name] = like(to_stored(write(view(new[name]), view(p), view(g), i, step)), p)
    tables = [view(x["table0"]) for x in (new, params, grads)]
    for name, result in RESULTS:
        results[name] = result(*tables, i)
    kept = {name: like(update(state["kept"][name], *tables, i, step), state["kept"][name]) for name, _, update in KEPT}
    return GUARD({"params": new, "slots": slots, "kept": kept, "step": step + 1}, state, value, step), results


def evaluate(params, batch):
    value = loss(params, batch["ids"][0], (batch["y"][0], batch["numbers"][0]), 3)
    return value, STORED[1](params["table0"])[batch["ids"][0]] * 2


def shaken(x, k):
    wobble = np.random.default_rng([SHAKEN, k]).uniform(-1, 1, np.shape(x))
    eps = float(jnp.finfo(x.dtype).eps) if SHAKE else 0.0
    return jnp.asarray(x * (1 + SHAKE * eps * wobble), x.dtype)


def start():
    rng = np.random.default_rng(SEED)
    params = {name: STORED[0](jnp.asarray(rng.normal(0, 0.5, (ROWS, WIDTH)), DTYPE)) for name in NAMES}
    params["w"] = jnp.asarray(np.eye(WIDTH) + 0.05 * rng.normal(0, 1, (WIDTH, WIDTH)), float)
    params["bias"], params["scale"] = jnp.asarray(rng.normal(0, 0.5, (WIDTH,)), float), jnp.asarray(1.25, float)
    params = {name: shaken(p, k) for k, (name, p) in enumerate(params.items())}
    kept = {name: make(STORED[1](params["table0"])) for name, make, _ in KEPT}
    slots = {name: SLOT(p) if p.ndim else jnp.zeros_like(p) for name, p in params.items()}
    state = {"params": params, "slots": slots, "kept": kept, "step": jnp.zeros((), jnp.int32)}
    return jax.tree.map(np.asarray, state) if NUMPY else state


def batch(k, size=IDS):
    rng = np.random.default_rng([SEED, k])
    ids = jnp.asarray(rng.integers(-ROWS - 3, ROWS + 4, (PARTS, size)), jnp.int32)
    y = shaken(jnp.asarray(rng.normal(0, 1, (PARTS, size, WIDTH)), float), 100 + k)
    return {"ids": ids, "y": y, "numbers": jnp.asarray([NUMBER if k == 1 else 1.0, *[1.0] * (PARTS - 1)], float)}


def whole(x):
    """An ordinary array; of ranks, a result with a value for each example is one over all of them."""
    return np.asarray(x if getattr(x, "is_fully_addressable", True) else process_allgather(x, tiled=True))


class Session:
    """A user's session: a state that steps and other things are done to, and what was seen."""

    def __init__(self, planned):
        self.planned, self.state, self.older, self.seen = planned, start(), [], []
        wrap, self.call = CALL
        own, other = (wrap(AROUND(train_with(number))) for number in (0, 1))
        self.plain_step = jax.jit(own)
        self.step, self.other_step, self.second_step, self.evaluate = map(
            self.made, (own, other, wrap(slower), evaluate)
        )

    def made(self, fun):
        if not self.planned:
            return jax.jit(fun)
        options = dict(OPTIONS)
        if DEVICES > 1:
            kinds = {"axis_types": (jax.sharding.AxisType.Auto,), "devices": jax.devices()[:DEVICES]}
            options |= {"mesh": jax.make_mesh((DEVICES,), ("data",), **kinds)}
        if fun is evaluate:
            options = {name: option for name, option in options.items() if name in ("mesh", "strategy")}
        elif PIPELINE:
            schedule, stages, slack = PIPELINE
            microbatches = 2 if slack is None else None
            options |= {"mesh": None, "pipeline": autopar.Pipeline(stages, schedule, microbatches, slack=slack)}
        step = autopar.parallelize(fun, batch_axis=AXES, **options)
        if BAGS:  # owners add them up, however few bytes that saves
            families._BAGS_PAY = 0, -(1 << 60)
            step.planner = replace(step.planner, options=replace(step.options, least_saved=0))
        return step

    def see(self, tree):
        self.seen.append(jax.tree.map(whole, autopar.materialize(tree)))

    def train(self, batch, step=None):
        self.older, step = [*self.older[-1:], self.state], step or self.step
        if PIPELINE:  # without a flush, nothing is late where each minibatch is drained
            ((self.state, _, results),) = autopar.train_batches(lambda s, b: self.call(step, s, b), self.state, [batch])
        else:
            self.state, results = self.call(step, self.state, batch)
        self.see(results)

    def older_state(self):
        return self.older[0] if self.older else self.state

    def kept_on_disk(self):
        if not self.planned:
            return self.state
        folder = f"{os.path.splitext(os.path.abspath(__file__))[0]}-{os.getppid()}"  # one for all ranks
        autopar.save(folder, self.state)
        return autopar.restore(folder, like=self.state).state


def slower(state, batch):
    """Another step on the same state, with tables of their own that it looks up."""
    grads = jax.grad(lambda params: loss(params, batch["ids"][0], (batch["y"][0], batch["numbers"][0]), 0))(
        state["params"]
    )
    return {
        **state,
        "params": like(jax.tree.map(lambda p, g: p - 0.02 * g, state["params"], grads), state["params"]),
    }, ()


def run(session):
    """Everything that the user sees; the last is the state."""
    for k, event in enumerate(EVENTS):
        event(session, k)
    session.see(session.state)
    return session.seen


# --- by itself ---
if __name__ == "__main__":
    mine, theirs = run(Session(True)), run(Session(False))
    for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        place = "the last state" if k + 1 == len(mine) else f"seen {k}"
        for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
            x, y = np.asarray(x, float), np.asarray(y, float)
            other = ~np.isclose(x, y, rtol=1e-9, atol=1e-11, equal_nan=True)
            if other.any():
                print(
                    f"{place}{jax.tree_util.keystr(path)}: {other.sum()} of {x.size} differ", x[other][:3], y[other][:3]
                )
