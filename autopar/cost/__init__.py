"""What a plan costs: bytes and time. Knows no program."""

from autopar.cost.formulas import sent_bytes, transfer_bytes

__all__ = ["sent_bytes", "transfer_bytes"]
