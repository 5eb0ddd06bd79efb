"""Settings: flags over environment (``DTX_*``) over a TOML file over defaults.

``Settings(...)`` itself reads nothing but its arguments; :meth:`Settings.load` is what looks at the environment and
at the file. Unknown keys are refused everywhere, because a misspelt limit that is silently ignored is no limit.
"""

from typing import TYPE_CHECKING, Any

from dtx.config.values import Address, ConfigError, broker_vhost, parse_duration, parse_size, redact

if TYPE_CHECKING:
    from dtx.config.settings import Settings

__all__ = ["Address", "ConfigError", "Settings", "broker_vhost", "parse_duration", "parse_size", "redact"]


def __getattr__(name: str) -> Any:
    """Load the settings, and pydantic with them, when they are first asked for: ``dtx --help`` needs neither."""
    if name != "Settings":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from dtx.config.settings import Settings

    return Settings
