"""Settings: flags over environment (``DTX_*``) over a TOML file over defaults.

``Settings(...)`` itself reads nothing but its arguments; :meth:`Settings.load` is what looks at the environment and
at the file. Unknown keys are refused everywhere, because a misspelt limit that is silently ignored is no limit.
"""

from dtx.config.settings import Settings
from dtx.config.values import Address, ConfigError, broker_vhost, parse_duration, parse_size, redact

__all__ = ["Address", "ConfigError", "Settings", "broker_vhost", "parse_duration", "parse_size", "redact"]
