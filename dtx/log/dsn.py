"""Database URLs: checked once, never shown with their password."""

import psycopg
from psycopg.conninfo import conninfo_to_dict

from dtx.log.api import LogError

SCHEMES = ("postgresql://", "postgres://", "postgresql+psycopg://")


class Dsn:
    """Where the database is.

    Args:
        url: ``postgresql://user:password@host:port/name?options``, as libpq reads it.

    Raises:
        LogError: it is not a URL that libpq understands; the message does not repeat it.
    """

    __slots__ = ("_secrets", "conninfo", "first", "shown")

    def __init__(self, url: str) -> None:
        if not url.startswith(SCHEMES):
            raise LogError("the database url does not start with postgresql://")
        self.conninfo = url.replace("postgresql+psycopg://", "postgresql://", 1)
        try:
            parts = conninfo_to_dict(self.conninfo)
        except psycopg.Error:
            raise LogError("the database url is not one that PostgreSQL's client library understands") from None
        self._secrets = [str(parts[key]) for key in ("password", "sslpassword") if parts.get(key)]
        where = str(parts.get("host") or parts.get("hostaddr") or "localhost")
        if parts.get("port"):
            where = f"{where}:{parts['port']}"
        user = f"{parts['user']}@" if parts.get("user") else ""
        self.shown = f"postgresql://{user}{where}/{parts.get('dbname') or ''}"
        """The URL for people and logs."""
        self.first = 0
        """Of its hosts: the one to be tried first, see :mod:`dtx.log.connecting`."""

    def __repr__(self) -> str:
        return f"Dsn({self.shown!r})"

    def explain(self, error: BaseException) -> str:
        """The first line of a driver's error, without passwords, in the form of our own messages."""
        lines = str(error).strip().splitlines()
        text = lines[0].strip().rstrip(".") if lines else type(error).__name__
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text
