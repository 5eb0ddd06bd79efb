"""Where settings come from, and what is said when one of them is wrong."""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, TomlConfigSettingsSource

from dtx.config.values import ConfigError, redact

ENV_PREFIX: Final = "DTX_"
DEFAULT_FILE: Final = Path("dtx.toml")
_NOT_SETTINGS: Final = frozenset(
    {
        *("DTX_API", "DTX_API_CA", "DTX_CONFIG", "DTX_DEBUG", "DTX_TOKEN", "DTX_TOKEN_FILE"),
        *("DTX_PYTHON", "DTX_XA_LOG"),  # of the switch for C, in the environment of a whole domain of programs
    }
)
# Kubernetes and container links put these in for a service that is called "dtx"; nobody wrote them as settings.
_SERVICE_LINK: Final = re.compile(r"DTX_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)")


@dataclass(slots=True)
class Gathered:
    """What the sources said together, and for each key where it was said, in words for an error message."""

    values: dict[str, object] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)

    def put(self, key: str, value: object, origin: str) -> None:
        """Let *value* replace what a weaker source said."""
        self.values[key] = value
        self.origin[key] = origin


def gather(settings: type[BaseSettings], flags: Mapping[str, object], file: Path | None) -> Gathered:
    """Read file, environment and flags, the stronger after the weaker.

    Raises:
        ConfigError: the file cannot be read, or a key of the file or the environment is unknown.
    """
    known = set(settings.model_fields)
    found = Gathered()
    if path := file or _file_from_environment():
        for key, value in _read_file(settings, path).items():
            found.put(key, value, f"{key} in {path}")
    _refuse_unknown(_own_variables(), {ENV_PREFIX + key.upper() for key in known}, "environment variable")
    for key, value in EnvSettingsSource(settings, env_ignore_empty=True)().items():
        found.put(key, value, ENV_PREFIX + key.upper())
    for key, value in flags.items():
        if value is not None:
            found.put(key, value, "--" + key.replace("_", "-"))
    return found


def sentences(error: ValidationError, origin: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each thing that is wrong, naming where it was said; never the value of a secret."""
    for item in error.errors(include_url=False, include_input=False):
        message = item["msg"].removeprefix("Value error, ")
        key = str(item["loc"][0]) if item["loc"] else None
        yield redact(message if key is None else f"{origin.get(key, key)}: {message[:1].lower()}{message[1:]}")


def _file_from_environment() -> Path | None:
    if named := os.environ.get("DTX_CONFIG"):
        return Path(named)
    return DEFAULT_FILE if DEFAULT_FILE.exists() else None


def _own_variables() -> Iterator[str]:
    for name in os.environ:
        if name.startswith(ENV_PREFIX) and name not in _NOT_SETTINGS and not _SERVICE_LINK.fullmatch(name):
            yield name


def _read_file(settings: type[BaseSettings], path: Path) -> Mapping[str, object]:
    if not path.is_file():
        raise ConfigError(f"there is no configuration file {path}")
    try:
        found = TomlConfigSettingsSource(settings, path).toml_data
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from None
    _refuse_unknown(found, set(settings.model_fields), f"key in {path}:")
    return found


def _refuse_unknown(names: Iterable[str], known: set[str], what: str) -> None:
    for name in sorted(names):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "'dtx serve --help' lists all settings"
            raise ConfigError(f"unknown {what} {name}; {hint}")
