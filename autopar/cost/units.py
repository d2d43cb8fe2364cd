"""Formats figures for people."""

from __future__ import annotations


def format_bytes(size: float) -> str:
    """Writes 1536 as '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
