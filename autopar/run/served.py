"""`ServedRunner`: runs a worker's step on a state that servers keep (`autopar.sync.Async`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.backends.across import local
from autopar.backends.clients import Clients
from autopar.backends.served import ServedPrograms
from autopar.compile import Compiled
from autopar.errors import StateError, StepError
from autopar.jax_types import Leaf, Pytree, PyTreeDef
from autopar.run.agreement import check_same_arrays, warn_if_alone
from autopar.run.kept_placements import KeptPlacements
from autopar.run.runner import Runner
from autopar.servers.session import Session
from autopar.sync import Async
from autopar.tables.kinds import materialize
from autopar.tables.served import ServedLeaf, session_of


class ServedRunner(Runner):
    """Runs a worker's step."""

    several_programs = "with sync="

    def __init__(self, compiled: Compiled, sync: Async, clients: Clients, out_tree: PyTreeDef) -> None:
        self._analysed, self._sync = compiled.analysed, sync
        self._clients, self._out_tree = clients, out_tree
        devices = clients.devices if clients.devices.mesh.size > 1 else None
        placements = compiled.bound.placements
        copies = [0 if devices is None else 1 if along is not None else devices.mesh.size for along in placements]
        self._kept = KeptPlacements(compiled.analysed, copies)
        self.programs = ServedPrograms(compiled.program, compiled.analysed, devices, self._kept.placed)
        inputs = zip(self._analysed.inputs, self._analysed.block.inputs, strict=True)
        shapes = ", ".join(f"{input_.path} {v.type}" for input_, v in inputs if input_.role != "state")
        self._mode = f"{compiled.plan.served}, {shapes} (program {self.programs.digest})"
        states = self._analysed.new_states
        self._types = {k: self._analysed.block.outputs[out].type for k, out in states.items()}

    def __call__(self, leaves: Sequence[Leaf]) -> Pytree:
        """Runs the step on flat arguments; returns leaves that servers keep, and this worker's minibatch's results."""
        session = session_of(leaves)
        if session is None:
            session = self._begun(leaves)
        elif session.mode != self._mode:
            raise StepError(
                f"{self._analysed.name}: servers keep the state for one step, with the same figures and minibatches of "
                f"one shape: {session.mode}. This is {self._mode}. Give minibatches of one size (drop_remainder=True), "
                "or begin once more with autopar.average(state)"
            )
        else:
            self._check_whole(leaves)
        for k, leaf in enumerate(leaves):
            if k not in self._types and isinstance(leaf, np.ndarray):
                self._kept.look(k, leaf)
        results = session.step(self.programs, leaves)
        for k, out in self._analysed.new_states.items():
            results[out] = ServedLeaf(session, k, self._types[k])
        return self._out_tree.unflatten([results[k] for k in range(len(self._analysed.outputs))])

    def _check_whole(self, leaves: Sequence[Leaf]) -> None:
        """Checks that every leaf of the state is the one that servers keep; raises StateError if a leaf is another
        one."""
        for k in self._types:
            leaf = leaves[k]
            if not isinstance(leaf, ServedLeaf) or leaf.place != k:
                raise StateError(
                    f"{self._analysed.name}: servers keep the state, but {self._analysed.inputs[k].path} is another "
                    "array than the step returned there. Take autopar.average(state) on all processes, replace it in "
                    "that, and go on with the result"
                )

    def _begun(self, leaves: Sequence[Leaf]) -> Session:
        """Begins to train an ordinary state. Collective. Raises StateError if the workers' states differ."""
        warn_if_alone(self._analysed.name, self._sync, self._clients)
        states = list(self._analysed.new_states)
        made = materialize([leaves[k] for k in states], copy=False)
        arrays = {k: local(x) for k, x in zip(states, made, strict=True)}
        named = {self._analysed.inputs[k].path: arrays[k] for k in states}
        check_same_arrays(self._clients.processes, self._analysed.name, named)
        given = [arrays.get(k, x) for k, x in enumerate(leaves)]
        return Session(self.programs, given, self._sync.staleness, self._mode, self._clients)
