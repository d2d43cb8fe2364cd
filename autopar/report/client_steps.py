"""Draws a step of clients by way of training: gradients, update, and communication, hidden or waited for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.ir.ring import Ring
from autopar.planning.client_exchanges import sent_bytes
from autopar.report.data import TableRow
from autopar.report.modes import Stragglers
from autopar.report.style import (
    BLUE,
    ORANGE,
    PALE,
    PURPLE,
    SKY,
    ReportFigure,
    blank,
    fit_size,
    format_seconds,
    lay_bars,
    legend_above,
    write,
)

#: What a step is made of, one after the other: column -> label, colour.
_PARTS = {
    "gradients, ms": ("gradients", BLUE),
    "update, ms": ("update", SKY),
    "communication waited for, ms": ("communication", ORANGE),
    "slower clients, ms": ("slower clients", PALE),
}
_HIDDEN = "communication hidden, ms"


def step_rows(found: Stragglers) -> Sequence[TableRow]:
    """Returns a row for each way, of `ADPSGD` one for active and one for passive clients: what a step takes on average
    where no client is slower."""
    rows: list[TableRow] = []
    own = found.found[found.own][0]
    update_s = own.update_s or 0.0
    for way, (simulated, *_) in found.found.items():
        plan, clients = found.plans[way], simulated.times[0].clients
        sent, groups = sent_bytes(plan, len(clients)), {"all": clients}
        if plan.sync is not None and plan.sync.partners == "neighbors":
            ring = Ring(len(clients))
            groups = {
                kind: [client for c, client in enumerate(clients) if ring.is_active(c) == (kind == "active")]
                for kind in ("active", "passive")
            }
        for kind, some in groups.items():
            each = 1e3 / sum(client.minibatches for client in some)
            rows.append(
                {
                    "mode": way,
                    "clients": kind,
                    "gradients, ms": 1e3 * (own.step_s - update_s),
                    "update, ms": 1e3 * update_s,
                    "communication waited for, ms": each * sum(client.exchange_s for client in some),
                    "slower clients, ms": each * sum(client.slowest_s for client in some),
                    _HIDDEN: each * sum(client.hidden_s for client in some),
                    "sent in a step, bytes": sent,
                    "bandwidth to break even, bytes/s": sent / own.step_s,
                }
            )
    return rows


def step_figure(found: Stragglers, rows: Sequence[TableRow]) -> ReportFigure:
    """Draws a bar for each row, by parts of the step; a thin one above it is what is hidden beside them."""
    figure, (axes,) = blank(height=1.1 + 0.3 * len(rows))
    values: list[dict[str, Any]] = [dict(row) for row in rows]
    left = [0.0] * len(rows)
    for part, (label, colour) in _PARTS.items():
        wide = [row[part] for row in values]
        if any(wide):
            axes.barh(range(len(rows)), wide, left=left, color=colour, height=0.5, label=label)
        left = [a + b for a, b in zip(left, wide, strict=True)]
    hidden = [row[_HIDDEN] for row in values]
    if any(hidden):
        above = [k - 0.34 for k in range(len(rows))]
        axes.barh(above, hidden, color=PURPLE, height=0.14, label="hidden")
    for k, total in enumerate(left):
        write(axes, format_seconds(total / 1e3), (total, k), (3, 0), up="center")
    axes.set_yticks(range(len(rows)), [_name(found, row) for row in values])
    lay_bars(axes, "simulated time of a step (ms)")
    legend_above(axes, columns=2)
    return fit_size(figure)


def _name(found: Stragglers, row: TableRow) -> str:
    way = "this plan" if row["mode"] == found.own else str(row["mode"])
    return way if row["clients"] == "all" else f"{way}, {row['clients']}"
