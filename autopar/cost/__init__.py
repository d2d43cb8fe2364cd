"""Costs of a plan: bytes and time. Knows no program. `Device` and `Link` describe a user's own cluster."""

from autopar.ir.cluster import Device as Device
from autopar.ir.cluster import Link as Link
