"""The one file that knows JAX's versions and private names.

autopar supports jax 0.10 (Python 3.11) to 0.12 (Python 3.13). What differs between them, and what has no public
name, is wrapped here; the rest of the package reads the same on all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import numpy as np
from jax import export as _export
from jax._src import cache_key as _cache_key
from jax._src import compilation_cache as _compilation_cache
from jax._src import compiler as _compiler
from jax._src import config as _config
from jax._src import core as _core
from jax._src import distributed as _distributed
from jax._src import dtypes as _dtypes
from jax._src import mesh as _mesh
from jax._src import source_info_util as _source_info
from jax._src import xla_bridge as _xla_bridge
from jax._src.array import ArrayImpl as ConcreteArray
from jax._src.interpreters import batching as _batching
from jax._src.interpreters import partial_eval as _partial_eval
from jax._src.interpreters import pxla as _pxla
from jax._src.lax import lax as _lax
from jax._src.lax import slicing as _slicing
from jax.extend import core as jex_core
from jax.profiler import StepTraceAnnotation
from jax.sharding import AbstractMesh, AxisType

from autopar.jax_types import Dtype, Jaxpr, Leaf, Params, Pytree

JaxLiteral = jex_core.Literal
transpose_p = _lax.transpose_p
clamp_p = _lax.clamp_p
copy_p = _lax.copy_p
slice_p = _slicing.slice_p
Tracer = jax.core.Tracer  # pyright: ignore[reportAttributeAccessIssue]
#: A (closed) jaxpr as a function of flat arrays that returns a list.
jaxpr_as_fun = jex_core.jaxpr_as_fun

#: Call primitives: their bodies are inlined while tracing. Each maps to the parameter that holds the body.
CALLS: Mapping[str, str] = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "custom_vmap_call": "call",
    "composite": "jaxpr",
    "custom_linear_solve": "jaxprs",
    "custom_partitioning": "call",
}

#: Names under which JAX has known `jax.checkpoint`.
REMATS = frozenset({"checkpoint", "remat", "remat2"})


def open_jaxpr(jaxpr: Jaxpr) -> tuple[Jaxpr, Sequence[Jaxpr]]:
    """Returns the jaxpr and its constants; since jax 0.11 a closed jaxpr and a jaxpr are one class."""
    return getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())


def lowered(jaxpr: Jaxpr) -> Jaxpr:
    """Returns a closed jaxpr whose primitives are those that XLA is given.

    jax 0.12 traces some (`jnp.searchsorted`) as a `call_hi_primitive`, which stands for a program of such.
    """
    return _partial_eval.lower_jaxpr2(jaxpr) if getattr(jaxpr, "is_high", False) else jaxpr


def literal_value(literal: Any) -> Leaf:
    """Returns a literal's value; that of JAX is a view, without the mesh of the `shard_map` that it was traced in."""
    return literal.val.view() if isinstance(literal.val, np.ndarray) else literal.val


def is_jaxpr(value: object) -> bool:
    """Returns whether a parameter is a nested program (one class since jax 0.11)."""
    return isinstance(value, (jex_core.Jaxpr, jex_core.ClosedJaxpr))  # pyright: ignore[reportPrivateImportUsage]


def has_effect(eqn: Any) -> bool:
    """Returns whether an equation does more than compute: that it names a mesh's axis counts as an effect for JAX."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def in_backward_pass(info: Any) -> bool:
    """Returns whether an equation with this source info was made by differentiating in reverse."""
    parts = getattr(getattr(info, "name_stack", None), "stack", ())
    kind = getattr(_source_info, "Transform", object)
    return any(isinstance(part, kind) and getattr(part, "name", "") == "transpose" for part in parts)


def call_body(eqn: Any) -> Jaxpr | None:
    """Returns the body of a call that is to be inlined, or None if `eqn` is no such call."""
    name = CALLS.get(eqn.primitive.name)
    if name is None:
        return None
    body = eqn.params.get(name) or eqn.params.get("call_jaxpr") or eqn.params.get("jaxpr")
    return getattr(body, "solve", body)


def call_operands(eqn: Any, operands: Sequence[Leaf]) -> Sequence[Leaf]:
    """Returns the operands of a call that its body takes: a linear solve's come with those of its transposes."""
    lengths = eqn.params.get("const_lengths")
    if lengths is None:
        return operands
    first = lengths.matvec + lengths.vecmat
    return [*operands[first : first + lengths.solve], *operands[sum(lengths) :]]


def scan_counts(params: Params) -> tuple[int, int]:
    """Returns the numbers of constants and of carries of a scan equation; jax 0.12 keeps them in a flat tree."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    jaxpr, _ = open_jaxpr(params["jaxpr"])
    parts = [len(list(part)) for part in params["ft_in"].update(list(range(len(jaxpr.invars)))).unpack()]
    assert sum(parts) == len(jaxpr.invars), "a scan's operands are constants, carries and sequences"
    return parts[0], parts[1]


def bind(primitive: Any, args: Sequence[Pytree], params: Params) -> list[Leaf]:
    """Applies a primitive; returns a list of results, always."""
    out = primitive.bind(*args, **primitive.get_bind_params(dict(params)))
    return list(out) if primitive.multiple_results else [out]


@contextlib.contextmanager
def equation_context(context: Any, source_info: Any) -> Iterator[None]:
    """Emits equations under another one's context (compute type, metadata) and with its source line."""
    manager = context.manager if context is not None else contextlib.nullcontext()
    if source_info is None:
        with manager:
            yield
        return
    stack = _source_info.current_name_stack() + source_info.name_stack
    with _source_info.user_context(source_info.traceback, name_stack=stack), manager:
        yield


def frames(source_info: object) -> list[tuple[str, int, str]]:
    """Lists (file, line, function) of an equation's Python stack, innermost first."""
    traceback = getattr(source_info, "traceback", None)
    if traceback is None:
        return []
    return [(f.file_name, f.line_num, f.function_name) for f in traceback.frames]


def body_file(jaxpr: Jaxpr) -> str:
    """Returns the file that defines the function a jaxpr was traced from ('' where JAX doesn't say)."""
    info = getattr(open_jaxpr(jaxpr)[0], "debug_info", None)
    return str(getattr(info, "func_src_info", "") or "")


def enable_x64(enabled: bool = True) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which 64-bit types exist (or don't), whatever the process's own setting."""
    return _config.enable_x64(enabled)


def contexts() -> Callable[[], None]:
    """Returns what gives another thread the contexts of this one, on which a compilation may depend."""
    settings = [*_config.config_states.values(), *vars(_config).values(), *vars(_mesh).values()]
    kept = [(s, s.get_local()) for s in settings if isinstance(s, _config.config_ext.Config)]

    def enter() -> None:
        for setting, value in kept:
            setting.set_local(value)

    return enter


def exported(function: Callable[..., Pytree], like: Sequence[Leaf]) -> _export.Exported:
    """Compiles a function of flat arrays for CPUs, so that other processes with this version of JAX can call it.

    It can be pickled; `Exported.serialize` would need another package.

    `function`: it isn't differentiated. `like`: anything with the shapes and dtypes of its arguments.
    """
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like]
    made = _export.export(jax.jit(function, keep_unused=True), platforms=["cpu"])(*types)
    return replace(made, _get_vjp=None)


class ProgramOf(Protocol):
    """Returns a compiled program, made here or loaded; see `Compilations.program`."""

    def __call__(
        self,
        key: bytes,
        compile_here: Callable[[], Any],
        save: Callable[[Any], bytes],
        load: Callable[[bytes], Any],
        *,
        compiles: bool = False,
    ) -> Any: ...


def share_compilations(program_of: ProgramOf) -> None:
    """Has XLA compile programs for CPUs, from now on, only if `program_of` says so. Programs with callbacks are left
    alone. A key knows no device numbers: each process loads a program for devices of its own.

    JAX's persistent cache comes before that. XLA can't save again what was loaded (functions of it are lost, without an
    error): that isn't written there, and its writer, process 0, compiles always.
    """
    compile_and_load, write, last = _compiler.backend_compile_and_load, _compiler._cache_write, threading.local()

    def compile_or_load(backend: Any, module: Any, devices: Any, options: Any, callbacks: Any) -> Any:
        def compile_here() -> Any:
            return compile_and_load(backend, module, devices, options, callbacks)

        if callbacks or backend.platform != "cpu":
            return compile_here()
        kinds = getattr(_cache_key, "IgnoreCallbacks", None)  # until jax 0.11
        known = hashlib.sha256(_cache_key._canonicalize_ir(module, kinds.NO if kinds else False))
        known.update(os.environ.get("XLA_FLAGS", "").encode())
        _cache_key._hash_serialized_compile_options(known, options, strip_device_assignment=True)
        has_cache = _compilation_cache.is_persistent_cache_enabled()

        def load(saved: bytes) -> Any:
            program = backend.deserialize_executable(saved, devices, options)
            last.loaded = program if has_cache else None
            return program

        writes = has_cache and _distributed.global_state.process_id == 0
        return program_of(known.digest(), compile_here, lambda made: made.serialize(), load, compiles=writes)

    def write_compiled(*args: Any) -> None:
        loaded = vars(last).pop("loaded", None)
        if loaded is None or all(arg is not loaded for arg in args):  # its place differs between versions of JAX
            write(*args)

    _compiler.backend_compile_and_load, _compiler._cache_write = compile_or_load, write_compiled


def is_of_auto_mesh(sharding: Any) -> bool:
    """Returns whether a sharding in an aval names a mesh without Explicit axes: JAX adds these by itself, and they
    don't say where the array is."""
    mesh = getattr(sharding, "mesh", None)
    return isinstance(mesh, AbstractMesh) and AxisType.Explicit not in mesh.axis_types


def is_manual(eqn: Any) -> bool:
    """Returns whether an equation was traced in a `shard_map`'s body, by which its arrays' types are of a mesh."""
    return any(kind == AxisType.Manual for kind in getattr(eqn.ctx.cur_abstract_mesh, "axis_types", ()))


def is_key(dtype: Dtype) -> bool:
    """Returns whether a dtype is that of typed PRNG keys."""
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)


def is_ready(array: Leaf) -> bool:
    """Returns whether an array is computed; also of typed PRNG keys."""
    data: Leaf = jax.random.key_data(array) if is_key(array.dtype) else array
    return data.is_ready()


def wrap_keys(data: Leaf, dtype: Dtype) -> Leaf:
    """Makes typed PRNG keys of their data."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(jax.numpy.zeros((), dtype)))


def is_float(dtype: Dtype) -> bool:
    """Returns whether a dtype is a real floating-point one, the small ones (bfloat16, float8) included."""
    return not is_key(dtype) and bool(jax.numpy.issubdtype(dtype, np.floating))


def sum_dtype(dtype: Dtype) -> Dtype:
    """Returns the dtype in which sums of a dtype are kept: float32 for floats of 8 and 16 bits."""
    return np.dtype(np.float32) if is_float(dtype) and np.dtype(dtype).itemsize < 4 else dtype


def names_algorithm(precision: object) -> bool:
    """Returns whether a product's precision says by itself in which dtype it is added up."""
    return isinstance(precision, jax.lax.DotAlgorithm | jax.lax.DotAlgorithmPreset)


def is_rounded(dtype: Dtype) -> bool:
    """Returns whether results of a dtype are rounded: real and complex floating-point ones."""
    return not is_key(dtype) and bool(jax.numpy.issubdtype(dtype, np.inexact))


def trace(
    fun: Callable[..., Pytree], args: tuple[Pytree, ...], kwargs: Mapping[str, Pytree], **jit_options: Any
) -> jax.stages.Traced:
    """Traces a function by `jax.jit(fun).trace`: has `.jaxpr`, `.out_info` (a tree of shapes), `.out_tree`."""
    return jax.jit(fun, **jit_options).trace(*args, **kwargs)


def set_mesh_here() -> Any:
    """Returns the mesh of the user's `jax.set_mesh`, while JAX traces, too; an empty one where there is none."""
    return _mesh.get_concrete_mesh()


def jit_arguments(fun: Callable[..., Pytree], kind: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the positions and names that a function's `jax.jit` was given; none if `jax.jit` hasn't wrapped it.
    `fun`: the function. `kind`: "static" or "donate"."""
    info = getattr(fun, "_jit_info", None) if isinstance(fun, jax.stages.Wrapped) else None
    return tuple(getattr(info, f"{kind}_argnums", ())), tuple(getattr(info, f"{kind}_argnames", ()))


def vmap_inferred(
    fun: Callable[..., Sequence[Pytree]], in_axes: Sequence[int | None], axis_name: str, axis_size: int
) -> Callable[..., tuple[Sequence[Leaf], Sequence[int | None]]]:
    """Wraps a function of flat arrays in a `jax.vmap` that returns (results, the batch axis of each, or None)."""
    inferring: Any = jax.vmap(fun, tuple(in_axes), _batching.infer, axis_name=axis_name, axis_size=axis_size)
    return inferring


def widens_bfloat16() -> bool:
    """Returns whether XLA widens a scatter's bfloat16 operand to float32 (measured on CPUs: 0.10 does, 0.12
    doesn't)."""
    return jax.__version_info__ < (0, 11) and jax.default_backend() == "cpu"


def rounds_by_shape() -> bool:
    """Returns whether XLA may round an element otherwise in an array of another shape, or fused with other operations.

    On CPUs, since jax 0.11, a loop's last elements and its others are rounded by different code (erf_inv, exp), so that
    a share of an initializer isn't the initializer's share. Measured: 0.12 does it, 0.10 doesn't.
    """
    return jax.__version_info__ >= (0, 11) and jax.default_backend() == "cpu"


def repeats_bits() -> bool:
    """Returns whether a program gives the same bits each time it runs.

    On GPUs scatters add by atomics, in any order, unless XLA is told otherwise.
    """
    is_flag_set = "--xla_gpu_deterministic_ops=true" in os.environ.get("XLA_FLAGS", "")
    return is_flag_set or jax.default_backend() not in ("gpu", "cuda", "rocm")


def holds_floats(wide: Dtype, narrow: Dtype) -> bool:
    """Returns whether every value of the narrow float dtype is a value of the wide one."""
    a, b = jax.numpy.finfo(narrow), jax.numpy.finfo(wide)
    return bool(a.nmant <= b.nmant and a.nexp <= b.nexp)


def is_weak(value: Leaf) -> bool:
    """Returns whether JAX lets this value's dtype yield to others."""
    return bool(getattr(jax.typeof(value), "weak_type", False))


def weak(value: Leaf) -> Leaf:
    """Returns the value with a dtype that yields to others, as a Python number's does."""
    return _lax._convert_element_type(value, value.dtype, weak_type=True)


def strong(value: Leaf) -> Leaf:
    """Returns the value with a dtype that doesn't yield to others."""
    return jax.lax.convert_element_type(value, value.dtype) if is_weak(value) else value


def register_array_like(kind: type, array_of: Callable[[Any], Any]) -> None:
    """Has JAX's functions take objects of a class, which have `shape` and `dtype`, in place of arrays. `array_of`:
    makes an array of one, when a program is to run on it."""
    _core.pytype_aval_mappings[kind] = lambda x: _core.ShapedArray(x.shape, x.dtype, bool(getattr(x, "is_weak", False)))
    _dtypes.register_canonicalize_value_handler(kind, array_of)
    _pxla.shard_arg_handlers[kind] = lambda xs, *rest: _pxla.shard_args(*rest, [array_of(x) for x in xs])


def backend_is_up() -> bool:
    """Returns whether JAX has been used, so that its processes can't be connected any more."""
    return _xla_bridge.backends_are_initialized()


def process() -> tuple[int, int]:
    """Returns this process's number, and the number of processes, of `jax.distributed.initialize`; starts no
    backend."""
    return _distributed.global_state.process_id, _distributed.global_state.num_processes


def type_keys(leaves: Sequence[Leaf], other: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Returns a hashable key of arrays, numbers and tracers: a step is planned once for each.

    `other`: returns the key of a leaf of another kind, or None, which raises a TypeError.
    """
    return tuple([leaf.aval if type(leaf) is ConcreteArray else _type_key(leaf, other) for leaf in leaves])


def shardings(leaves: Sequence[Leaf]) -> tuple[Any, ...]:
    """Returns the shardings of concrete arrays; None for anything else."""
    return tuple([leaf.sharding if type(leaf) is ConcreteArray else None for leaf in leaves])


def _type_key(leaf: Leaf, other: Callable[[Any], Any]) -> Any:
    if isinstance(leaf, Tracer):
        return Tracer, leaf.aval
    if isinstance(leaf, (np.ndarray, np.generic)):
        return leaf.shape, leaf.dtype
    if isinstance(leaf, (bool, int, float, complex)):
        return type(leaf)
    key = leaf.aval if isinstance(leaf, jax.Array) else other(leaf)  # typed PRNG keys are arrays, too
    if key is None:
        raise TypeError(f"no array: {type(leaf).__name__}")
    return key


def is_tracing() -> bool:
    """Returns whether JAX traces something here, so that what is computed becomes a part of it."""
    return _core.trace_ctx.trace is not _core.eval_trace


@contextlib.contextmanager
def outside_traces() -> Iterator[None]:
    """Has what is computed of arrays computed at once, also while JAX traces something around it."""
    with _core.eval_context() if is_tracing() else contextlib.nullcontext():
        yield


def is_profiling() -> bool:
    """Returns whether a profile is being made."""
    return StepTraceAnnotation.is_enabled()  # pyright: ignore[reportAttributeAccessIssue]


def uses_x64() -> bool:
    """Returns whether numbers of 64 bits are kept as they are, here and now."""
    return _config.enable_x64.value


def is_tracer(value: object) -> bool:
    """Returns whether a value is a tracer: it has no number yet."""
    return isinstance(value, Tracer)


class KeyValueStore(Protocol):
    """The part that autopar uses of the store that `jax.distributed` keeps for its processes."""

    def key_value_set_bytes(self, key: str, value: bytes) -> None:
        """Sets a key, once."""
        ...

    def blocking_key_value_get_bytes(self, key: str, timeout_in_ms: int) -> bytes:
        """Waits for the key; JaxRuntimeError with DEADLINE_EXCEEDED if it doesn't come in time."""
        ...

    def key_value_delete(self, key: str) -> None:
        """Forgets it."""
        ...


def key_value_store() -> KeyValueStore | None:
    """Returns the store of `jax.distributed`; None where that isn't initialised."""
    return _distributed.global_state.client


def listens_for_preemption() -> bool:
    """Returns whether JAX's preemption service listens to SIGTERM."""
    return _distributed.global_state.preemption_sync_manager is not None


def reached_preemption(step: int) -> bool:
    """Returns whether this is the step at which all processes leave, as one of them is to be preempted."""
    manager = _distributed.global_state.preemption_sync_manager
    return manager is not None and manager.reached_sync_point(step)
