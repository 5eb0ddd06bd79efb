"""The report: one HTML page that needs no other file, and the same figures as CSV."""

from dtx.pipeline.report.figures import Figures, collect
from dtx.pipeline.report.page import write_report

__all__ = ["Figures", "collect", "write_report"]
