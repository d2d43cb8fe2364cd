"""Stand-in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Task:
    kind: str
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Schedule:
    orders: tuple[tuple[Task, ...], ...]

    def issue_order(self):
        done = set()
        pos = [0] * len(self.orders)
        S = len(self.orders)
        out = []
        while any(p < len(o) for p, o in zip(pos, self.orders)):
            for d, o in enumerate(self.orders):
                if pos[d] < len(o):
                    t = o[pos[d]]
                    need = (
                        ("F", t.stage - 1, t.microbatch)
                        if t.kind == "F"
                        else (("B", t.stage + 1, t.microbatch) if t.stage < S - 1 else ("F", t.stage, t.microbatch))
                    )
                    if (t.kind == "F" and t.stage == 0) or need in done:
                        out.append(t)
                        done.add((t.kind, t.stage, t.microbatch))
                        pos[d] += 1
        return out


def one_f_one_b(S, M):
    orders = []
    for s in range(S):
        warm = min(S - s, M)
        q = [Task("F", s, m) for m in range(warm)]
        f = warm
        for b in range(M):
            q.append(Task("B", s, b))
            if f < M:
                q.append(Task("F", s, f))
                f += 1
        orders.append(tuple(q))
    return Schedule(tuple(orders))
