"""Settings: from flags, then the environment (``DTX_*``), then a TOML file, then defaults.

``Settings(...)`` reads only its arguments; :meth:`Settings.load` reads environment and file as well. Unknown keys are
refused everywhere: a misspelt limit must not be ignored.
"""

from typing import TYPE_CHECKING, Any

from dtx.config.values import Address, ConfigError, broker_vhost, parse_duration, parse_size, redact

if TYPE_CHECKING:
    from dtx.config.settings import Settings

__all__ = ["Address", "ConfigError", "Settings", "broker_vhost", "parse_duration", "parse_size", "redact"]


def __getattr__(name: str) -> Any:
    """Import the settings, and pydantic with them, at the first access: ``dtx --help`` needs neither."""
    if name != "Settings":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dtx.config.settings import Settings

    return Settings
