"""Structured logs on stderr, metrics for Prometheus, and traces."""

from dtx.telemetry.logs import configure, get_logger
from dtx.telemetry.metrics import CommitConnectionNumbers, Metrics

__all__ = ["CommitConnectionNumbers", "Metrics", "configure", "get_logger"]
