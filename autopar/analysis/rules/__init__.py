"""The table of primitives: what each means along the rows and off the rows. Importing it fills it."""

from autopar.analysis.rules import elementwise, indexing, reduction, shape
from autopar.analysis.rules.table import ALIGNED, RESIZE, RULES, Analysis, Mixes, resized, row_operand

__all__ = [
    "ALIGNED",
    "RESIZE",
    "RULES",
    "Analysis",
    "Mixes",
    "elementwise",
    "indexing",
    "reduction",
    "resized",
    "row_operand",
    "shape",
]
