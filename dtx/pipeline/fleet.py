"""``pipeline.toml``: the databases, participants and decision logs of a fleet, and the places of lake and results."""

import os
import re
import tomllib
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import quote

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from dtx.config import ConfigError, parse_duration, redact
from dtx.pipeline.verdicts import SourceKind

_VARIABLE: Final = re.compile(r"\$\{(\w+)\}")
_POSTGRESQL: Final = ("postgresql://", "postgres://")
_MYSQL: Final = ("mysql://", "mariadb://")
_LONGEST: Final = timedelta(days=36_500)
_LONGEST_NAME: Final = 255 - len(".json..tmp") - 32
"""Characters that a name may have in the name of its checkpoint, where file systems allow 255 bytes."""


def _span(value: object) -> timedelta:
    seconds = parse_duration(value)
    if seconds > _LONGEST.total_seconds():
        raise ValueError(f"{value} is longer than a hundred years")
    return timedelta(seconds=seconds)


def _url(schemes: tuple[str, ...], shown: str) -> AfterValidator:
    def check(url: str) -> str:
        if not url.startswith(schemes):
            raise ValueError(f"does not start with {shown}")
        return url

    return AfterValidator(check)


Span = Annotated[timedelta, BeforeValidator(_span)]
"""A time span, written as in settings: ``10m``, ``90d``."""

EXAMPLE: Final = Path(__file__).with_name("example.toml")


_Name = Annotated[str, Field(min_length=1, max_length=100)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Database(_Table):
    """A database with tables of dtx.

    Args:
        name: its name in the results. Never change it: another name is another source.
        url: ``postgresql://…``; its user needs only the right to read ``dtx.*``.
        options: further options of ``format("dtx")``.
    """

    name: _Name
    url: Annotated[str, _url(_POSTGRESQL, "postgresql://")]
    options: dict[str, str] = {}

    @field_validator("name")
    @classmethod
    def _fits(cls, name: str) -> str:
        if len(quote(name, safe="").replace(".", "%2E")) > _LONGEST_NAME:
            raise ValueError(f"{name!r} is too long for the name of a file: choose a shorter one")
        return name

    def source(self) -> dict[str, str]:
        """Return the options of ``format("dtx")`` for this database."""
        return {**self.options, "url": self.url, "name": self.name}


class Participant(_Table):
    """Another resource manager, which may have branches in doubt.

    Args:
        name: its name in the results, and the name of the resource manager.
        url: ``postgresql://…``, ``mysql://user:password@host:3306`` or ``mariadb://…`` (``?unix_socket=/path``; for TLS
            ``?ssl_ca=/path`` and, if the server requires them, ``&ssl_cert=…&ssl_key=…``).
    """

    name: _Name
    url: Annotated[str, _url(_POSTGRESQL + _MYSQL, "postgresql:// or mysql://")]

    @property
    def kind(self) -> SourceKind:
        """MYSQL is MariaDB, too."""
        return SourceKind.MYSQL if self.url.startswith(_MYSQL) else SourceKind.POSTGRESQL


class Decisions(_Table):
    """The log of a transaction manager.

    Args:
        name: of the transaction manager, in the results.
        format: of the log.
        path: of its files; may have wildcards.
        url: of its database, for format ``dtx``.
    """

    name: _Name
    format: Literal["dtx", "atomikos", "csv", "json", "parquet"]
    path: str | None = None
    url: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "Decisions":
        if (self.path is None) == (self.url is None):
            raise ValueError(f"decisions {self.name!r} need a path or a url, one of the two")
        if self.url is not None and (self.format != "dtx" or not self.url.startswith(_POSTGRESQL)):
            raise ValueError(f'decisions {self.name!r}: a url is for format "dtx", and starts with postgresql://')
        return self

    @property
    def place(self) -> str:
        """The path or the url."""
        return self.url or self.path or ""


class Fleet(_Table):
    """The whole file; ``example.toml`` shows it."""

    lake: str
    results: str
    publish: Annotated[str, _url((*_POSTGRESQL, "postgresql+psycopg://"), "postgresql://")] | None = None
    orphan_after: Span = timedelta(hours=1)
    skew: Span = timedelta(minutes=5)
    database: tuple[Database, ...] = ()
    participant: tuple[Participant, ...] = ()
    decisions: tuple[Decisions, ...] = ()

    @model_validator(mode="after")
    def _names(self) -> "Fleet":
        for kind, names in (
            (
                "databases and participants",
                [table.name for table in self.database] + [table.name for table in self.participant],
            ),
            ("decision logs", [table.name for table in self.decisions]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{twice[0]!r} is the name of two {kind}: results could not tell them apart")
        return self

    def sources(self, names: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
        """Return the options of ``format("dtx")`` by source: of all databases, or of *names*."""
        there = {database.name: database.source() for database in self.database}
        for name in names:
            if name not in there:
                raise ConfigError(f"there is no database {name!r}: there are {', '.join(there) or 'none'}")
        if not there:
            raise ConfigError("there are no databases: add a [[database]] with name and url")
        return {name: there[name] for name in names} if names else there


def load(path: Path, environment: Mapping[str, str] = os.environ) -> Fleet:
    """Read the file; relative paths in it are relative to its directory, and errors have no secrets."""
    try:
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no {path}: dtx pipeline example > {path} writes one, --fleet names another file"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    try:
        fleet = Fleet.model_validate(_filled(found, environment))
    except ValidationError as error:
        item = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        raise ConfigError(redact(f"{path}: {f'{where}: ' if where else ''}{message}")) from None
    here = path.absolute().parent
    places = [Path(_placed(place, here)).resolve() for place in (fleet.lake, fleet.results) if "://" not in place]
    if len(places) == 2 and (places[0].is_relative_to(places[1]) or places[1].is_relative_to(places[0])):
        raise ConfigError(f"{path}: lake and results are one inside the other: one would remove files of the other")
    return fleet.model_copy(
        update={
            "lake": _placed(fleet.lake, here),
            "results": _placed(fleet.results, here),
            "decisions": tuple(
                log if log.path is None else log.model_copy(update={"path": _placed(log.path, here)})
                for log in fleet.decisions
            ),
        }
    )


def _placed(path: str, here: Path) -> str:
    return path if "://" in path else str(here / path)


def _filled(value: object, environment: Mapping[str, str]) -> object:
    """Return *value* with each ``${NAME}`` replaced by that variable of the environment."""
    if isinstance(value, dict):
        return {key: _filled(part, environment) for key, part in value.items()}
    if isinstance(value, list):
        return [_filled(part, environment) for part in value]
    if not isinstance(value, str):
        return value
    missing = [name for name in _VARIABLE.findall(value) if name not in environment]
    if missing:
        raise ConfigError(f"the environment variable {missing[0]} is not set, and pipeline.toml needs it")
    return _VARIABLE.sub(lambda match: environment[match[1]], value)
