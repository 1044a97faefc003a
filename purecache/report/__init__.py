"""`purecache report`: a run, trace or recording as one page to look at.

Making the page needs the extra `report` (`purecache.report.page`); sampling a cache and replaying a recording do not.
"""

from purecache.report.model import Prefix, Report, ReportError, Stock, Transfer, from_json, to_json
from purecache.report.replayed import report_of_recording
from purecache.report.sampler import Sampler

__all__ = [
    "Prefix",
    "Report",
    "ReportError",
    "Sampler",
    "Stock",
    "Transfer",
    "from_json",
    "report_of_recording",
    "to_json",
]
