"""Costs of a plan: bytes and time. Knows no program."""

from autopar.cost.exchange import Term, sent_bytes, step_seconds, step_terms, transfer_bytes
from autopar.cost.rates import Rates
from autopar.ir.cluster import Device, Link
from autopar.ir.figures import RowGrowth, Sizes

__all__ = [
    "Device",
    "Link",
    "Rates",
    "RowGrowth",
    "Sizes",
    "Term",
    "sent_bytes",
    "step_seconds",
    "step_terms",
    "transfer_bytes",
]
