"""Structured logs on stderr, metrics for Prometheus, and traces."""

from dtx.telemetry.logs import configure, get_logger
from dtx.telemetry.metrics import LaneNumbers, Metrics

__all__ = ["LaneNumbers", "Metrics", "configure", "get_logger"]
