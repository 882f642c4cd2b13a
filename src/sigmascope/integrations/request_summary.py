"""Requests in a few figures."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from sigmascope.analysis.percentiles import percentile
from sigmascope.records.requests import RequestRecord


def request_summary(records: Sequence[RequestRecord], in_flight: int) -> dict[str, Any]:
    """Counts, errors, bytes and percentiles of seconds; None where there was no request.

    Args:
        records: Requests that are over.
        in_flight: Requests being served now.
    """
    seconds = [record.seconds for record in records]
    statuses = [record.status for record in records]
    return {
        "total_requests": len(records),
        "in_flight": in_flight,
        "errors": sum(record.failed for record in records),
        "disconnected": sum(record.disconnected for record in records),
        "status_counts": {
            str(status or "none"): statuses.count(status) for status in dict.fromkeys(statuses)
        },
        "request_bytes": sum(record.request_bytes for record in records),
        "response_bytes": sum(record.response_bytes for record in records),
        "generations": sum(len(record.generations) for record in records),
        "seconds": {
            "mean": fmean(seconds) if seconds else None,
            **{f"p{share}": percentile(seconds, share) if seconds else None for share in (50, 90, 99)},
        },
    }
