"""Reports on a plan: what each method sends, what a step takes and why, as figures, tables and a page."""

from autopar.report.build import report
from autopar.report.page import Report

__all__ = ["Report", "report"]
