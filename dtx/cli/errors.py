"""Exit codes, and the translation of exceptions to an exit code and one sentence on stderr."""

import errno
import os
import sys
from enum import IntEnum
from typing import Final

import click

from dtx.config import ConfigError, redact


class Exit(IntEnum):
    """Exit codes of the commands."""

    OK = 0
    FAILED = 1
    USAGE = 2
    DATABASE = 3
    BROKER = 4
    LEASE_LOST = 5
    ADDRESS_IN_USE = 6
    INTERRUPTED = 130
    TERMINATED = 143


EXIT_CODES: Final = """\b
Exit codes:
  0    done
  1    a check failed, nothing was found, or an unexpected error
  2    wrong usage or wrong settings
  3    the database cannot be used
  4    the broker cannot be used
  5    another dtx took over (the lease was lost)
  6    the address to listen on is in use
  130  stopped at once by SIGINT (Ctrl-C), 143 by SIGTERM; for serve: by a second one, the first stops in order with 0
"""


class CommandError(Exception):
    """A command cannot go on.

    Args:
        code: exit code of the process.
        sentence: the fault and its remedy, for people.
    """

    def __init__(self, code: Exit, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


def explain(error: BaseException) -> tuple[Exit, str]:
    """The exit code of *error* and its one sentence, without secrets."""
    return _code_of(error), redact(" ".join(_words(error).split()))


def fail(error: BaseException) -> int:
    """Print the error on stderr, with its traceback where ``DTX_DEBUG`` is set, and return the exit code."""
    code, sentence = explain(error)
    if os.environ.get("DTX_DEBUG"):
        import traceback

        click.echo(redact("".join(traceback.format_exception(error))), err=True)
    if code == Exit.FAILED and not isinstance(error, CommandError):
        sentence += " (DTX_DEBUG=1 shows where)"
    click.echo(f"{click.style('dtx', bold=True) if sys.stderr.isatty() else 'dtx'}: {sentence}", err=True)
    return code


def _words(error: BaseException) -> str:
    match error:
        case BaseExceptionGroup() if len(error.exceptions) > 0:
            return _words(error.exceptions[0])
        case click.ClickException():
            return error.format_message()
        case OSError() if error.strerror:
            return error.strerror.lower() + (f": {error.filename}" if error.filename else "")
        case _:
            return str(error) or type(error).__name__


_CODES: Final = (
    ("dtx.log.api", "LeaseLost", Exit.LEASE_LOST),
    ("dtx.log.api", "LogError", Exit.DATABASE),
    ("dtx.embedded.postgres", "EmbeddedPostgresError", Exit.DATABASE),
    ("psycopg", "Error", Exit.DATABASE),
    ("sqlalchemy.exc", "SQLAlchemyError", Exit.DATABASE),
    ("pika.exceptions", "AMQPError", Exit.BROKER),
    ("dtx.server.alongside.mode", "BrokerUnusable", Exit.BROKER),
)
"""Module and class of errors of the layers below, and their codes; the first match counts."""


def _code_of(error: BaseException) -> Exit:
    match error:
        case BaseExceptionGroup() if len(error.exceptions) > 0:
            return _code_of(error.exceptions[0])
        case CommandError():
            return error.code
        case ConfigError() | click.ClickException():
            return Exit.USAGE
        case KeyboardInterrupt():
            return Exit.INTERRUPTED
        case OSError() if error.errno == errno.EADDRINUSE:
            return Exit.ADDRESS_IN_USE
    for module, name, code in _CODES:
        # A module that is not loaded cannot have raised the error, so it is not imported here: commands stay fast.
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return code
    return Exit.FAILED
