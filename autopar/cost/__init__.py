"""What a plan costs: bytes and time. Knows no program."""

from autopar.cost.cluster import Cluster, Device, Link
from autopar.cost.exchange import Sizes, sent_bytes, step_seconds
from autopar.cost.formulas import transfer_bytes
from autopar.cost.rates import Rates

__all__ = ["Cluster", "Device", "Link", "Rates", "Sizes", "sent_bytes", "step_seconds", "transfer_bytes"]
