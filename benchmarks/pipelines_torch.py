"""One rank of PyTorch's `torch.distributed.pipelining`, as `benchmarks.pipelines_systems` compares it.

`mpiexec -n N python -m benchmarks.pipelines_torch ADDRESS`: the transformer of `benchmarks.pipeline_models` from the
same weights, layers in equal numbers, Adam, "1f1b". Each rank is bound to a core, as autopar's are.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.served import serve

RANK, SIZE = int(os.environ.get("PMI_RANK", "0")), int(os.environ.get("PMI_SIZE", "1"))


def main(address: str) -> None:
    """Serve `prepare` and `turn`."""
    os.sched_setaffinity(0, {RANK % (os.cpu_count() or 1)})
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{address}.torch", rank=RANK, world_size=SIZE)
    functional = nn.functional

    def norm(x: Any, scale: Any) -> Any:
        x = x - x.mean(-1, keepdim=True)
        return scale * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    class Stage(nn.Module):
        """Some layers; the first stage looks words up, the last one computes logits."""

        def __init__(self, params: Any, heads: int) -> None:
            super().__init__()
            self.heads, count = heads, len(params["layers"])
            own = params["layers"][RANK * count // SIZE : (RANK + 1) * count // SIZE]
            self.layers = nn.ModuleList(nn.ParameterDict({k: as_parameter(v) for k, v in p.items()}) for p in own)
            names = ("words", "places") if RANK == 0 else ("norm", "out") if RANK == SIZE - 1 else ()
            self.own = nn.ParameterDict({name: as_parameter(params[name]) for name in names})

        def attend(self, p: Any, x: Any) -> Any:
            b, n, d = x.shape
            q, k, v = (y.reshape(b, n, self.heads, -1).transpose(1, 2) for y in (x @ p["qkv"]).chunk(3, -1))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.transpose(1, 2).reshape(b, n, d) @ p["o"]

        def forward(self, x: Any) -> Any:
            if RANK == 0:
                x = functional.embedding(x, self.own["words"]) + self.own["places"]
            for p in self.layers:
                x = x + self.attend(p, norm(x, p["norm1"]))
                x = x + functional.gelu(norm(x, p["norm2"]) @ p["up"], approximate="tanh") @ p["down"]
            return norm(x, self.own["norm"]) @ self.own["out"] if RANK == SIZE - 1 else x

    def as_parameter(value: Any) -> Any:
        return nn.Parameter(torch.from_numpy(np.array(value)))

    def loss_of(logits: Any, labels: Any) -> Any:
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))

    made: dict[str, Any] = {}

    def prepare(layers: int, microbatches: int) -> None:
        """Makes the stage, its optimizer and the schedule."""
        import jax

        from benchmarks.pipeline_models import transformer

        _, make, batch = transformer(layers=layers)
        stage = Stage(jax.tree.map(np.asarray, make(jax.random.key(0))), heads=4)
        made["optimizer"] = torch.optim.Adam(stage.parameters(), 1e-3)
        made["batch"] = {k: torch.from_numpy(np.array(v, np.int64)) for k, v in batch.items()}
        pipelined = PipelineStage(stage, RANK, SIZE, torch.device("cpu"))
        made["schedule"] = Schedule1F1B(pipelined, microbatches, loss_of)
        turn(2)

    def turn(count: int) -> tuple[list[float], float]:
        """Seconds of the next steps, and the last loss."""
        seconds, loss = [], 0.0
        for _ in range(count):
            start = time.perf_counter()
            losses: list[Any] = []
            given = (made["batch"]["ids"],) if RANK == 0 else ()
            last = {"target": made["batch"]["labels"], "losses": losses} if RANK == SIZE - 1 else {}
            made["optimizer"].zero_grad()
            made["schedule"].step(*given, **last)
            made["optimizer"].step()
            loss = float(torch.stack(losses).mean()) if losses else 0.0
            seconds.append(time.perf_counter() - start)
        return seconds, loss

    serve(address, RANK, {"prepare": prepare, "turn": turn})


if __name__ == "__main__":
    main(sys.argv[1])
