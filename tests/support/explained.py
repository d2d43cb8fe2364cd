"""What `explain` says, whatever the width of its lines."""

from __future__ import annotations

from typing import Any

import autopar


def explained(step: Any, *args: Any, **kwargs: Any) -> str:
    """Returns the text with single spaces for all blanks and ends of lines."""
    return " ".join(str(autopar.explain(step, *args, **kwargs)).split())
