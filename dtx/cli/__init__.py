"""The command ``dtx``: the list of its commands, and the exit code of a run."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from dtx import __version__
from dtx.cli.errors import EXIT_CODES, Exit, fail

_COMMANDS = {
    "serve": ("dtx.cli.serve", "serve", "Run dtx, in front of a broker or as one."),
    "migrate": ("dtx.cli.database", "migrate", "Bring the tables of the log to a version."),
    "backup": ("dtx.cli.backup", "backup", "Write the embedded PostgreSQL to a file, while dtx runs."),
    "restore": ("dtx.cli.backup", "restore", "Make the embedded PostgreSQL from a file of `dtx backup`."),
    "user": ("dtx.cli.accounts", "user", "Users of a dtx without a broker: passwords and permissions."),
    "vhost": ("dtx.cli.accounts", "vhost", "Virtual hosts of a dtx without a broker."),
    "queue": ("dtx.cli.management", "queue", "Queues of a dtx without a broker, and their messages."),
    "exchange": ("dtx.cli.management", "exchange", "Exchanges and bindings of a dtx without a broker."),
    "connection": ("dtx.cli.management", "connection", "Connections of clients to a dtx without a broker."),
    "definitions": ("dtx.cli.management", "definitions", "Export and import users, queues, exchanges and bindings."),
    "branches": ("dtx.cli.branches", "branches", "List the branches whose outcome is open."),
    "show": ("dtx.cli.branches", "show", "Show all that is known about one xid."),
    "commit": ("dtx.cli.orders", "commit", "Commit a prepared branch instead of its transaction manager."),
    "rollback": ("dtx.cli.orders", "rollback", "Roll back a prepared branch instead of its transaction manager."),
    "forget": ("dtx.cli.orders", "forget", "Forget a heuristic outcome."),
    "retry": ("dtx.cli.orders", "retry", "Retry phase two of a branch that is stuck."),
    "redirect": ("dtx.cli.orders", "redirect", "Send a message of a stuck branch to another exchange or queue."),
    "discard": ("dtx.cli.orders", "discard", "Give up messages of a stuck branch."),
    "export": ("dtx.cli.export", "export", "Write the messages of a branch to files or stdout."),
    "duplicates": ("dtx.cli.duplicates", "duplicates", "Second copies that dtx did not deliver: list, restore."),
    "members": ("dtx.cli.members", "members", "Active dtx that share the branches: list, unvoted, rotate-secret."),
    "bulk": ("dtx.cli.orders", "bulk", "Decide about all branches that a filter finds, after a dry run."),
    "audit": ("dtx.cli.audit", "audit", "List the actions of operators and their reasons."),
    "token": ("dtx.cli.accounts", "token", "Tokens for the operators' API."),
    "tm": ("dtx.cli.tm", "tm", "Recover transactions that programs with dtx's transaction manager left open."),
    "pipeline": (
        "dtx.cli.pipeline",
        "pipeline",
        "Archive, reconcile and report over the journals of a fleet, on Spark.",
    ),
    "doctor": (
        "dtx.cli.doctor.command",
        "doctor",
        "Check the database, the broker or users, and the settings.",
    ),
    "completion": ("dtx.cli.completion", "completion", "Print a script with which a shell completes commands."),
}

_FORMER_NAMES = {"in-doubt": "branches", "users": "user", "vhosts": "vhost", "tokens": "token"}
"""Names that still work, but are not shown."""


class _Commands(click.Group):
    """Loads the module of a command when the command is used, so that `dtx --help` and completion stay fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """The names, in the order of ``_COMMANDS``."""
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """The command, or ``None``, which click turns into a usage error."""
        cmd_name = _FORMER_NAMES.get(cmd_name, cmd_name)
        if cmd_name not in _COMMANDS:
            return None
        from importlib import import_module

        module, name, _ = _COMMANDS[cmd_name]
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a pipe that its reader closes early is no error: ``dtx branches --json | head``."""
        if ctx.obj is not None:
            ctx.obj()
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # Python would complain again when it closes stdout at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return Exit.OK
        return result

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """The list of commands, without loading them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, _, summary) in _COMMANDS.items()])


@click.group(
    cls=_Commands, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(__version__, "--version", message="dtx %(version)s")
def dtx() -> None:
    """The XA resource manager for AMQP 0-9: two-phase commit for queues, in front of RabbitMQ or without a broker.

    'dtx serve --help' explains every setting. Errors are one sentence on stderr; DTX_DEBUG=1 adds the traceback.
    """


def run(arguments: Sequence[str] | None = None, *, before: Callable[[], None] | None = None) -> int:
    """Run one command, print its error on stderr, and return the exit code.

    Args:
        arguments: of the command line; ``None`` for those of this process.
        before: called before a command runs, but not for help or the version.
    """
    try:
        result: Any = dtx.main(args=arguments, prog_name="dtx", standalone_mode=False, obj=before)
    except click.Abort:
        return Exit.INTERRUPTED
    except click.UsageError as error:
        error.show()
        return Exit.USAGE
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the edge: every error becomes a sentence and a code
        return fail(error)
    return result if isinstance(result, int) else Exit.OK


def main() -> NoReturn:
    """The entry point of the command ``dtx``."""
    sys.exit(run(before=_configure_logs))


def _configure_logs() -> None:
    """Show warnings of the layers below while a command runs; `serve` configures the logs again from its settings."""
    from dtx.telemetry import configure

    configure("warning")
