"""The report: one page of HTML that says how a run went, and needs nothing else to be looked at."""

from swath.insight.report.page import report_page
from swath.insight.report.run import EpisodeSeries, Run

__all__ = ["EpisodeSeries", "Run", "report_page"]
