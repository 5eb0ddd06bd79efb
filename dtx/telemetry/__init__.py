"""Structured logs on stderr, metrics for Prometheus, and traces."""

from dtx.telemetry.logs import configure, get_logger
from dtx.telemetry.metrics import CommitConnectionNumbers, Metrics
from dtx.telemetry.rates import RateSample

__all__ = ["CommitConnectionNumbers", "Metrics", "RateSample", "configure", "get_logger"]
