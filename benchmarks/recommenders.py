"""What `benchmarks.torchrec` compares: recommenders, and a rank that trains them by JAX or by PyTorch.

Models are written once, in what both libraries have; each rank imports its own library alone, so that the other one
takes none of its time or memory.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.ranks import RANK, SIZE, bind, serve

RATE, FIRST_ACCUMULATOR, EPS = 0.01, 0.1, 1e-10


class Task(NamedTuple):
    """A model and its batches: rows of each table, their width, the shapes of dense parameters, how many examples a
    rank has, with so many ids of each table, and the exponent of these ids' Zipf distribution."""

    rows: tuple[int, ...]
    width: int
    dense: Mapping[str, tuple[int, ...]]
    examples: int
    ids: int = 1
    zipf: float = 1.2

    def batch(self, k: int, ranks: int) -> dict[str, np.ndarray]:
        """Makes the k-th batch of all ranks; frequent ids are all over a table."""
        random, count = np.random.default_rng(k), self.examples * ranks
        ids = [random.zipf(self.zipf, (count, self.ids)) * 7919 % rows for rows in self.rows]
        numbers = random.standard_normal((count, 13), np.float32)
        labels = (numbers.sum(1) > 0).astype(np.float32)
        return {"ids": np.concatenate(ids, 1).astype(np.int32), "numbers": numbers, "labels": labels}

    def layers(self) -> dict[str, np.ndarray]:
        """Makes the initial values of dense parameters; biases are zeros."""
        random = np.random.default_rng(0)
        return {
            name: ((1 / shape[0]) ** 0.5 if shape[1:] else 0) * random.standard_normal(shape, np.float32)
            for name, shape in self.dense.items()
        }

    def table(self, xp: Any, k: int, first: Sequence[int] = (0, 0), shape: Sequence[int] | None = None) -> Any:
        """Makes the initial values of a table, or of a part of it: mixed bits of the places.

        Args:
          xp: numpy or jax.numpy; both make the same.
          first, shape: Row and column where the part begins, and its shape; the whole table if left out.
        """
        rows, columns = shape or (self.rows[k], self.width)
        places = (xp.arange(rows, dtype=np.uint32) + np.uint32(first[0]))[:, None] * np.uint32(self.width)
        bits = places + xp.arange(columns, dtype=np.uint32) + np.uint32(first[1])
        for factor in (2654435761, 2246822519):
            bits = (bits + np.uint32(k)) * np.uint32(factor)
            bits = bits ^ (bits >> np.uint32(15))
        return (bits >> np.uint32(8)).astype(np.float32) * np.float32(2**-23 / 10) - np.float32(0.1)


def _dlrm(rows: Sequence[float], width: int, examples: int, hidden: tuple[int, int] = (512, 256)) -> Task:
    products = (len(rows) + 1) * len(rows) // 2
    widths = {"bottom": (13, *hidden, width), "top": (width + products, *hidden, 1)}
    dense = {f"{name}{k}w": shape for name, each in widths.items() for k, shape in enumerate(itertools.pairwise(each))}
    dense |= {f"{name[:-1]}b": shape[1:] for name, shape in dense.items()}
    return Task(tuple(map(int, rows)), width, dense, examples)


TASKS = {
    "DLRM": _dlrm(np.geomspace(1e3, 1e6, 26).round().tolist(), 64, 512),
    "one table": Task((800_000,), 256, {"w1": (256, 512), "w2": (512, 256)}, 32, 20, 1.3),
    "tiny": _dlrm((40, 60, 90), 8, 16, (16, 8)),
}


class Operations(NamedTuple):
    """A library's names for what the models are written in."""

    layer: Callable[[Any, Any, Any], Any]
    relu: Callable[[Any], Any]
    softplus: Callable[[Any], Any]
    concatenate: Callable[[Any, int], Any]


def _dlrm_loss(ops: Operations, way: str, looked_up: Any, dense: Any, numbers: Any, labels: Any) -> Any:
    """Of rows [B, 26, D]: an MLP of the numbers, products of all pairs, and an MLP of these."""

    def mlp(name: str, x: Any) -> Any:
        for k in range(3):
            x = ops.layer(x, dense[f"{name}{k}w"], dense[f"{name}{k}b"])
            x = x if (name, k) == ("top", 2) else ops.relu(x)
        return x

    x = mlp("bottom", numbers)
    every = ops.concatenate([x[:, None], looked_up], 1)
    dots, count = every @ every.swapaxes(1, 2), every.shape[1]
    if way == "slices":
        pairs = ops.concatenate([dots[:, k, :k] for k in range(1, count)], 1)
    else:
        lower, upper = np.tril_indices(count, -1)
        pairs = dots[:, lower, upper]
    logits = mlp("top", ops.concatenate([x, pairs], 1))[:, 0]
    return (ops.softplus(logits) - labels * logits).mean()


def _rows_loss(ops: Operations, way: str, looked_up: Any, dense: Any, numbers: Any, labels: Any) -> Any:
    """Of rows [B, 20, D] of the one table."""
    hidden = ops.relu(looked_up @ dense["w1"]) @ dense["w2"]
    return ((hidden - looked_up) ** 2).mean() + (hidden**2).mean()


# --- one rank of each side ---


class Side:
    """A step with a state of its own; `prepare` makes both."""

    task: Task

    def prepare(self, task: str, way: str, parts: int = SIZE) -> None:
        """Makes the state and the step of a task.

        Args:
          task: Its name.
          way: How the step is written, or a sharding of TorchRec.
          parts: How many times a batch has the task's examples, for all ranks or devices together.
        """
        self.task, self.loss = TASKS[task], _rows_loss if task == "one table" else _dlrm_loss
        self.parts, self.done = parts, 0
        vars(self).pop("step", None)  # the last task is gone before there are two
        self.step = self.make(way)

    def make(self, way: str) -> Callable[[Any], float]:
        """Makes the step: of a batch of `given`, the loss, once all work is done."""
        raise NotImplementedError

    def given(self, batch: dict[str, np.ndarray]) -> Any:
        """Returns this side's form of a batch; it isn't timed."""
        return batch

    def turn(self, count: int) -> tuple[list[float], list[float], list[float]]:
        """Takes some steps: seconds, seconds of processor time, and loss of each."""
        batches = [self.given(self.task.batch(self.done + k, self.parts)) for k in range(count)]
        self.done += count
        found: list[tuple[float, float, float]] = []
        for batch in batches:
            start, before = time.perf_counter(), time.process_time()
            loss = self.step(batch)
            found.append((time.perf_counter() - start, time.process_time() - before, loss))
        seconds, busy, losses = (list(x) for x in zip(*found, strict=True))
        return seconds, busy, losses

    def resident_mib(self) -> float:
        """Returns this process's memory; of pages that several have, its share."""
        with open("/proc/self/smaps_rollup") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Pss:")) / 1024


class Jax(Side):
    """The step as its user writes it; `place`: "hosts", "devices" (one is a case of them), or "plain" for jax.jit."""

    def __init__(self, place: str) -> None:
        import autopar  # noqa: F401  # first: under a launcher it makes the ranks JAX's processes

        self.place = place

    def make(self, way: str) -> Callable[[Any], float]:
        """Returns the step."""
        import jax
        import jax.numpy as jnp
        import optax

        import autopar

        task, tx = self.task, optax.adagrad(RATE, FIRST_ACCUMULATOR, EPS)
        dense = {name: jnp.asarray(x) for name, x in task.layers().items()}
        ops = Operations(lambda x, w, b: x @ w + b, jax.nn.relu, jax.nn.softplus, jnp.concatenate)

        def make_state() -> Any:
            params = {f"t{k:02}": task.table(jnp, k) for k in range(len(task.rows))} | dense
            return {"params": params, "opt": tx.init(params)}

        def loss_of(params: Any, batch: Any) -> jax.Array:
            if len(task.rows) == 1:
                looked_up = params["t00"][batch["ids"]]
            else:
                looked_up = jnp.stack([params[f"t{k:02}"][batch["ids"][:, k]] for k in range(len(task.rows))], 1)
            return self.loss(ops, way, looked_up, params, batch["numbers"], batch["labels"])

        def train_step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
            loss, gradients = jax.value_and_grad(loss_of)(state["params"], batch)
            updates, opt = tx.update(gradients, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

        if self.place == "plain":
            step, state = jax.jit(train_step, donate_argnums=0), jax.jit(make_state)()
        else:
            step = autopar.parallelize(train_step, strategy=("ps", "hosts") if self.place == "hosts" else "auto")
            state = autopar.init(make_state, step=step, batch=task.batch(0, self.parts))

        def run(batch: Any) -> float:
            nonlocal state
            state, loss = step(state, batch)
            jax.block_until_ready(state)
            return float(loss)

        self.planned = step
        return run


class Torch(Side):
    """TorchRec by a sharding, PyTorch's DistributedDataParallel ("DDP"), or one process ("EmbeddingBag")."""

    def __init__(self, folder: str) -> None:
        import torch

        if SIZE > 1:
            bind()
            torch.set_num_threads(1)
            address = f"file://{folder}/torch"
            torch.distributed.init_process_group("gloo", init_method=address, rank=RANK, world_size=SIZE)

    def make(self, way: str) -> Callable[[Any], float]:
        """Returns the step."""
        import torch
        from torch import nn

        task, loss_of = self.task, self.loss
        functions = nn.functional
        ops = Operations(lambda x, w, b: torch.addmm(b, x, w), torch.relu, functions.softplus, torch.concatenate)

        class Model(nn.Module):
            def __init__(self, tables: Any) -> None:
                super().__init__()
                self.tables = tables
                dense = task.layers().values()
                self.dense = nn.ParameterList(nn.Parameter(torch.from_numpy(x)) for x in dense)

            def forward(self, ids: Any, numbers: Any, labels: Any) -> Any:
                rows = self.tables(ids)
                if is_sharded:  # their order is that of the shards; this is how TorchRec's own DLRM has it
                    rows = torch.cat([rows[f"f{k}"] for k in range(len(task.rows))], 1)
                dense = dict(zip(task.dense, self.dense, strict=True))
                return loss_of(ops, "pairs", rows.reshape(len(labels), -1, task.width), dense, numbers, labels)

        is_sharded = self.is_sharded = way not in ("DDP", "EmbeddingBag")
        if is_sharded:
            model = _sharded(Model, task, way)
            parameters = model.module.dense.parameters()
        else:
            model = Model(_bags(task))
            parameters = model.parameters()
            model = nn.parallel.DistributedDataParallel(model) if way == "DDP" else model
        optimizer = torch.optim.Adagrad(parameters, lr=RATE, initial_accumulator_value=FIRST_ACCUMULATOR, eps=EPS)

        def step(batch: Any) -> float:
            optimizer.zero_grad(set_to_none=True)
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            return float(loss)

        return step

    def given(self, batch: dict[str, np.ndarray]) -> Any:
        """Returns this rank's examples; its ids by table, each a bag of its own."""
        import torch

        ids, numbers, labels = (torch.from_numpy(np.split(x, SIZE)[RANK].copy()) for x in batch.values())
        ids = ids.reshape(-1, len(self.task.rows), self.task.ids).swapaxes(0, 1).reshape(len(self.task.rows), -1)
        if self.is_sharded:
            from torchrec import KeyedJaggedTensor

            names = [f"f{k}" for k in range(len(ids))]
            lengths = torch.ones(ids.numel(), dtype=torch.int32)
            ids = KeyedJaggedTensor(names, values=ids.ravel().long(), lengths=lengths)
        return ids, numbers, labels


def _bags(task: Task) -> Any:
    """Makes a `torch.nn.EmbeddingBag` of each table, with sparse gradients."""
    import torch
    from torch import nn

    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            arrays = (torch.from_numpy(task.table(np, k)) for k in range(len(task.rows)))
            self.bags = nn.ModuleList(nn.EmbeddingBag(*x.shape, mode="sum", sparse=True, _weight=x) for x in arrays)

        def forward(self, ids: Any) -> Any:
            starts = torch.arange(ids.shape[1], dtype=ids.dtype)
            return torch.stack([bag(each, starts) for bag, each in zip(self.bags, ids, strict=True)], 1)

    return Bags()


def _sharded(model_of: Callable[[Any], Any], task: Task, way: str) -> Any:
    """Makes a model with TorchRec's tables in shards, which are updated in the backward pass."""
    import torch
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed import sharding_plan as plans
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.types import ShardingPlan

    configs = [
        EmbeddingBagConfig(name=f"t{k}", embedding_dim=task.width, num_embeddings=rows, feature_names=[f"f{k}"])
        for k, rows in enumerate(task.rows)
    ]
    bags = EmbeddingBagCollection(device=torch.device("meta"), tables=configs)
    _apply_optimizer_in_backward(torch.optim.Adagrad, bags.parameters(), {"lr": RATE, "eps": EPS})
    model, sharder = model_of(bags), EmbeddingBagCollectionSharder()
    if way == "planner":
        topology = Topology(world_size=SIZE, local_world_size=SIZE, compute_device="cpu")
        planner = EmbeddingShardingPlanner(topology=topology, batch_size=task.examples * task.ids)
        plan = planner.collective_plan(model, [sharder], torch.distributed.GroupMember.WORLD)
    else:
        everyone = list(range(SIZE))
        to_and_fro = everyone + everyone[::-1]  # tables are in the order of their sizes
        given = {
            f"t{k}": {
                "row-wise": plans.row_wise(),
                "table-wise": plans.table_wise(rank=to_and_fro[k % len(to_and_fro)]),
                "column-wise": plans.column_wise(ranks=everyone),
            }[way]
            for k in range(len(task.rows))
        }
        sizes = {"local_size": SIZE, "world_size": SIZE, "device_type": "cpu"}
        plan = ShardingPlan({"tables": plans.construct_module_sharding_plan(bags, given, sharder, **sizes)})
    found = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    for name, array in found.state_dict().items():
        for shard in array.local_shards() if "tables." in name else ():
            k, first = int(name.split(".")[-2].removeprefix("t")), shard.metadata.shard_offsets
            shard.tensor.copy_(torch.from_numpy(task.table(np, k, first, shard.tensor.shape)))
    for slots in found.fused_optimizer.state_dict()["state"].values():
        for slot in slots.values():
            for shard in slot.local_shards():
                shard.tensor.fill_(FIRST_ACCUMULATOR)
    return found


def main(address: str, library: str, place: str) -> None:
    """Serves a side of a rank; `place`: of `Jax`, or a folder for `Torch`."""
    side = {"jax": Jax, "torch": Torch}[library](place)
    serve(address, RANK, {name: getattr(side, name) for name in ("prepare", "turn", "resident_mib")})


if __name__ == "__main__":
    main(*sys.argv[1:])
