"""Every optimizer and transformation of the installed Optax, with arguments that make sense for it.

The public names of `optax`, `optax.contrib` and `optax.transforms` are walked, so that a new one can't be forgotten:
whatever makes a GradientTransformation is in `RECIPES`, or makes one without arguments or of a learning rate, or is in
`NOT_MADE` with the reason.
"""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import optax.transforms

from tests.zoo.case import Case, Tree, concrete, zipf_ids

Make = Callable[[], optax.GradientTransformation]

MODULES: tuple[types.ModuleType, ...] = (optax, optax.contrib, optax.transforms)
_RATE = 0.1


def _everything(params: Tree) -> Tree:
    return jax.tree.map(lambda _: True, params)


def _nothing(params: Tree) -> Tree:
    return jax.tree.map(lambda _: False, params)


def _labels(params: Tree) -> Tree:
    return {name: "table" if name == "emb" else "rest" for name in params}


def _matrices(params: Tree) -> Tree:
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(), params)


def _before(optimizer: optax.GradientTransformation, *others: Any) -> optax.GradientTransformation:
    """What changes gradients, in front of what uses them."""
    return optax.chain(*others, optimizer)


def _every_second(step: jax.Array, **_: Any) -> jax.Array:
    return step % 2 == 0


def _largest(updates: Tree, *_: Any, **__: Any) -> jax.Array:
    return jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in jax.tree.leaves(updates)]))


#: Names that take more than a learning rate.
RECIPES: Mapping[str, Make] = {
    "optax.MultiSteps": lambda: optax.MultiSteps(optax.adam(_RATE), 3).gradient_transformation(),
    "optax.adaptive_grad_clip": lambda: _before(optax.sgd(_RATE), optax.adaptive_grad_clip(0.01)),
    "optax.add_decayed_weights": lambda: _before(optax.sgd(_RATE), optax.add_decayed_weights(1e-2)),
    "optax.add_noise": lambda: _before(optax.sgd(_RATE), optax.add_noise(0.01, 0.5, key=0)),
    "optax.apply_if_finite": lambda: optax.apply_if_finite(optax.adam(_RATE), 3),
    "optax.chain": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(_RATE)),
    "optax.clip": lambda: _before(optax.sgd(_RATE), optax.clip(0.01)),
    "optax.clip_by_block_rms": lambda: _before(optax.sgd(_RATE), optax.clip_by_block_rms(0.01)),
    "optax.clip_by_global_norm": lambda: _before(optax.sgd(_RATE), optax.clip_by_global_norm(0.1)),
    "optax.conditionally_mask": lambda: optax.conditionally_mask(optax.adam(_RATE), _every_second),
    "optax.conditionally_transform": lambda: optax.conditionally_transform(optax.adam(_RATE), _every_second),
    "optax.ema": lambda: _before(optax.sgd(_RATE), optax.ema(0.9)),
    "optax.flatten": lambda: optax.flatten(optax.adam(_RATE)),
    "optax.freeze": lambda: _before(optax.adam(_RATE), optax.freeze(_nothing)),
    "optax.inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=_RATE),
    "optax.inject_stateful_hyperparams": lambda: optax.inject_stateful_hyperparams(optax.adam)(learning_rate=_RATE),
    "optax.keep_params_nonnegative": lambda: optax.chain(optax.adam(_RATE), optax.keep_params_nonnegative()),
    "optax.masked": lambda: optax.masked(optax.adam(_RATE), _everything),
    "optax.measure_with_ema": lambda: optax.chain(
        optax.adam(_RATE), optax.monitor({"largest": optax.measure_with_ema(_largest, 0.9)})
    ),
    "optax.monitor": lambda: optax.chain(optax.adam(_RATE), optax.monitor({"largest": _largest})),
    "optax.multi_transform": lambda: optax.multi_transform(
        {"table": optax.adam(_RATE), "rest": optax.sgd(_RATE)}, _labels
    ),
    "optax.named_chain": lambda: optax.named_chain(("clip", optax.clip(0.1)), ("adam", optax.adam(_RATE))),
    "optax.noisy_sgd": lambda: optax.noisy_sgd(_RATE, key=0),
    "optax.partition": lambda: optax.partition({"table": optax.adam(_RATE), "rest": optax.sgd(_RATE)}, _labels),
    "optax.scale": lambda: optax.scale(-_RATE),
    "optax.scale_by_backtracking_linesearch": lambda: _before(
        optax.scale_by_backtracking_linesearch(4), optax.sgd(_RATE)
    ),
    "optax.scale_by_schedule": lambda: optax.scale_by_schedule(optax.linear_schedule(-0.1, -0.02, 10)),
    "optax.scale_by_zoom_linesearch": lambda: _before(optax.scale_by_zoom_linesearch(4), optax.sgd(_RATE)),
    "optax.selective_transform": lambda: optax.selective_transform(
        optax.adam(_RATE), freeze_mask={"emb": False, "w": True}
    ),
    "optax.sgd": lambda: optax.sgd(_RATE, momentum=0.9),
    "optax.snapshot": lambda: optax.chain(optax.adam(_RATE), optax.snapshot("largest", _largest)),
    "optax.stateless": lambda: optax.stateless(lambda g, p: jax.tree.map(lambda g, p: -_RATE * (g + 1e-2 * p), g, p)),
    "optax.stateless_with_tree_map": lambda: optax.stateless_with_tree_map(lambda g, p: -_RATE * (g + 1e-2 * p)),
    "optax.trace": lambda: _before(optax.scale(-_RATE), optax.trace(0.9)),
    "optax.with_extra_args_support": lambda: optax.with_extra_args_support(optax.adam(_RATE)),
    "optax.zero_nans": lambda: _before(optax.adam(_RATE), optax.zero_nans()),
    "optax.lookahead": lambda: optax.lookahead(optax.adam(_RATE), 5, 0.5),  # of pairs of parameters
    "optax.adafactor": lambda: optax.adafactor(_RATE, min_dim_size_to_factor=4),
    "optax.scale_by_factored_rms": lambda: _before(
        optax.sgd(_RATE), optax.scale_by_factored_rms(min_dim_size_to_factor=4)
    ),
    "optax.contrib.differentially_private_aggregate": lambda: optax.contrib.differentially_private_aggregate(
        0.1, 0.1, key=0
    ),
    "optax.contrib.dpsgd": lambda: optax.contrib.dpsgd(_RATE, 0.1, 0.1, key=0),
    "optax.contrib.mechanize": lambda: optax.contrib.mechanize(optax.adam(_RATE)),
    "optax.contrib.reduce_on_plateau": lambda: optax.chain(optax.adam(_RATE), optax.contrib.reduce_on_plateau()),
    "optax.contrib.sam": lambda: optax.contrib.sam(optax.adam(_RATE), optax.sgd(0.01)),
    "optax.contrib.schedule_free": lambda: optax.contrib.schedule_free(optax.adam(_RATE, b1=0.0), _RATE),
    "optax.contrib.scale_by_muon": lambda: optax.chain(
        optax.contrib.scale_by_muon(weight_dimension_numbers=_matrices), optax.scale(-_RATE)
    ),
    # At a larger rate rounding errors grow a hundredfold in each hundred steps, in plain JAX, too.
    "optax.contrib.simplified_ademamix": lambda: optax.contrib.simplified_ademamix(1e-4),
    "optax.contrib.scale_by_simplified_ademamix": lambda: optax.chain(
        optax.contrib.scale_by_simplified_ademamix(), optax.scale(-1e-4)
    ),
    "optax.contrib.split_real_and_imaginary": lambda: optax.contrib.split_real_and_imaginary(optax.adam(_RATE)),
}

#: Of these, what the update takes besides gradients and parameters.
EXTRAS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("optax.lbfgs", "optax.scale_by_zoom_linesearch", "optax.scale_by_backtracking_linesearch"),
        ("value", "grad", "value_fn"),
    ),
    **dict.fromkeys(
        (
            "optax.polyak_sgd",
            "optax.scale_by_polyak",
            "optax.contrib.momo",
            "optax.contrib.momo_adam",
            "optax.contrib.reduce_on_plateau",
        ),
        ("value",),
    ),
    **dict.fromkeys(("optax.contrib.sophia", "optax.contrib.hutchinson_estimator_diag_hessian"), ("obj_fn",)),
}

#: Public names that make a GradientTransformation and are no row of the table, and why.
NOT_MADE: Mapping[str, str] = {
    "optax.GradientTransformation": "the type of what is made",
    "optax.GradientTransformationExtraArgs": "the type of what is made",
    "optax.contrib.differentially_private_aggregate": "takes the gradient of each example, [B, V, D]: the loss is "
    "differentiated under vmap, and there is no gradient of a table to be had row by row",
    "optax.contrib.dpsgd": "the same",
}

#: Change gradients, and are followed by a learning rate here.
_PARTS = ("scale_by_", "centralize", "normalize", "apply_every")

ROWS, WIDTH, IDS = 300, 4, (6, 5)


def names(modules: Sequence[ModuleType] = MODULES) -> dict[str, Make]:
    """Every public name that makes a GradientTransformation, with what makes it: `optax.adam`, ..."""
    found: dict[str, Make] = {}
    known: set[int] = set()
    for module in modules:
        for name, member in sorted(vars(module).items()):
            full = f"{module.__name__}.{name}"
            if name.startswith("_") or not callable(member) or id(member) in known or full in NOT_MADE:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # an old optimizer is one, too
                make = RECIPES.get(full) or _guess(name, member)
            if make is not None:
                known.add(id(member))
                found[full] = make
    return found


def _guess(name: str, member: Callable[..., Any]) -> Make | None:
    """The name called without arguments, or with a learning rate, if it makes a GradientTransformation then."""
    if inspect.isclass(member):
        return None
    for arguments in ((), (_RATE,)):
        try:
            made = member(*arguments)
        except Exception:
            continue
        if not isinstance(made, optax.GradientTransformation):
            continue
        if name.startswith(_PARTS):
            return lambda: optax.chain(member(*arguments), optax.scale(-_RATE))
        return lambda: member(*arguments)
    annotation = str(getattr(member, "__annotations__", {}).get("return", ""))
    assert "GradientTransformation" not in annotation, f"{name} needs a recipe"
    return None


def optimizer_case(name: str, dtype: Any = np.float32) -> Case:
    """A lookup of Zipf ids in `emb` [ROWS, WIDTH], `w` beside it, trained by one of `names()`."""
    kind = {"pairs": name == "optax.lookahead", "filled": name in ("optax.monitor", "optax.measure_with_ema")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        tx = names()[name]()
    return lookup_case(tx, dtype, EXTRAS.get(name, ()), **kind)


def lookup_case(
    tx: Any, dtype: Any = np.float32, extras: tuple[str, ...] = (), *, pairs: bool = False, filled: bool = False
) -> Case:
    """The same with any GradientTransformation.

    Args:
      tx: What trains it.
      dtype: Of the parameters and the whole step.
      extras: What its update takes besides gradients and parameters.
      pairs: Whether it trains `optax.LookaheadParams`.
      filled: Whether its state has its final structure after the first step only, which is then taken beforehand.
    """
    rng = np.random.default_rng(0)
    params = {"emb": rng.normal(size=(ROWS, WIDTH)), "w": rng.normal(size=(WIDTH, WIDTH))}
    params = jax.tree.map(lambda x: jnp.asarray(x, dtype), params)
    start: Tree = optax.LookaheadParams.init_synced(params) if pairs else params

    def step(state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        def loss_fn(p: Tree) -> jax.Array:
            out = jnp.tanh(p["emb"][batch["ids"]] @ p["w"])
            return jnp.mean((out - batch["target"].astype(out.dtype)) ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(state["params"].fast if pairs else state["params"])
        given = {"value": loss, "grad": grads, "value_fn": loss_fn, "obj_fn": loss_fn}
        updates, opt = tx.update(grads, state["opt"], state["params"], **{k: given[k] for k in extras})
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, {"loss": loss}

    def batches(i: int) -> Tree:
        rng = np.random.default_rng(i)
        ids = zipf_ids(rng, IDS, ROWS)
        return {"ids": ids, "target": rng.normal(size=(*IDS, WIDTH)).astype(np.float32)}

    opt = tx.init(start)
    if filled:
        _, opt = tx.update(jax.tree.map(jnp.zeros_like, start), opt, start)
    return Case(step, concrete({"params": start, "opt": opt}), batches, ("params/emb",))
