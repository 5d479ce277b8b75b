"""The report of one loop: a single HTML file without scripts or outside assets."""

from pipelines.report.html import render_report, write_report

__all__ = ["render_report", "write_report"]
