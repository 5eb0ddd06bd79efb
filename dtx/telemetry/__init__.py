"""What dtx tells about itself: structured logs on stderr and numbers for Prometheus."""

from dtx.telemetry.logs import configure, get_logger
from dtx.telemetry.metrics import LaneNumbers, Metrics

__all__ = ["LaneNumbers", "Metrics", "configure", "get_logger"]
