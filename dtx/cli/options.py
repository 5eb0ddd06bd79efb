"""Options that several commands take: settings as flags, the filter for branches, and the xid.

The flag of a setting is made from its field in :class:`dtx.config.Settings`.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import click

from dtx.admin.safe_text import human_duration, human_size, safe
from dtx.config import Address, Settings, parse_duration, parse_size
from dtx.config.settings import FORMER_NAMES, group_of
from dtx.xa.codes import XaError
from dtx.xa.xid import Xid

_Function = TypeVar("_Function", bound=Callable[..., Any])

DATABASE_SETTINGS: Final = ("database", "data_dir", "rm")
ADMIN_SETTINGS: Final = ("admin_listen", "admin_tls_cert", "admin_tls_key")
BROKER_SETTINGS: Final = ("broker", "broker_ca", "management")
_PREFIX: Final = "setting_"
_METAVARS: Final = {
    "admin_host": "NAME",
    "admin_listen": "ADDRESS",
    "admin_proxy": "ADDRESS",
    "advertise": "URL",
    "anonymous_user": "USER",
    "broker": "URL",
    "coordinator": "USER",
    "data_dir": "DIR",
    "database": "URL",
    "listen": "ADDRESS[,...]",
    "management": "URL",
    "policy": "POLICY",
    "quota": "QUOTA",
    "rm": "NAME",
}


STATES: Final = (
    "taking", "prepared", "committing", "rolling-back", "heuristic-committing", "heuristic-rolling-back", "heuristic",
)  # fmt: skip
"""States of branches in the log. They are repeated here because parsing a command line must not import the log."""
_FILTER: Final = ("state", "vhost", "owner", "older_than", "format_id", "gtrid", "queue", "exchange", "stuck")
ABOUT_FILTER: Final = """\b
States: taking (consumed messages are being taken over, not yet a vote), prepared (waits for its transaction manager),
committing and rolling-back (decided, under way), heuristic-committing and heuristic-rolling-back (the same, decided by
an operator), heuristic (completed without its transaction manager, until forget).
--queue finds branches that publish to a queue where the log knows the queue: always without a broker, and only through
the default exchange with one. A gtrid is text, or bytes as hex:6f72646572; * matches any number of bytes: 'order-*',
'hex:6f72*'.
"""


def with_options(*options: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Give a command these options and arguments of click; its help lists them in this order."""

    def decorate(function: Any) -> Any:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def duration(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """Callback of an option whose value is a duration in the format of the settings; the result is in seconds."""
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


class SettingOption(click.Option):
    """The flag of a setting; its value stays text, which :class:`dtx.config.Settings` parses.

    Args:
        flag: name of the setting, or a former name, which the help does not show.
    """

    def __init__(self, flag: str) -> None:
        name = FORMER_NAMES.get(flag, flag)
        self.group: Final = group_of(name)
        field = Settings.model_fields[name]
        more: dict[str, Any] = {}
        if field.annotation is bool:
            more |= {"is_flag": True, "flag_value": "true"}
        elif get_origin(field.annotation) is Literal:
            more["type"] = click.Choice(get_args(field.annotation))
        else:
            more |= {"metavar": _metavar(name), "multiple": get_origin(field.annotation) is tuple, "type": str}
        super().__init__(
            [_PREFIX + flag, "--" + flag.replace("_", "-")],
            default=None,
            help=_help(name),
            show_default=False,
            hidden=flag != name,
            **more,
        )


FORMER_COMMANDS: Final = {"rm": "remove", "delete": "remove"}
"""Names of commands that also work, but are not shown: former ones, and those of RabbitMQ's tools."""


class Subcommands(click.Group):
    """A group that lists its commands in the order in which they are defined.

    The help of a command without examples has those of the group.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order of definition."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, also by a former name."""
        found = super().get_command(ctx, FORMER_COMMANDS.get(cmd_name, cmd_name))
        if found is not None and found.epilog is None:
            begin = f"  dtx {self.name} {found.name}"
            lines = [line for line in (self.epilog or "").splitlines() if f"{line} ".startswith(f"{begin} ")]
            found.epilog = "\n".join(["\b", "Examples:", *lines]) if lines else None
        return found


class SettingsCommand(click.Command):
    """A command whose help lists its own options first, then the settings under the headings of their groups."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group."""
        groups: dict[str, list[tuple[str, str]]] = {"Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                group = parameter.group if isinstance(parameter, SettingOption) else "Options"
                groups.setdefault(group, []).append(record)
        for group, records in groups.items():
            with formatter.section(group):
                formatter.write_dl(records)


def with_settings(*names: str) -> Callable[[_Function], _Function]:
    """Give a command ``--config`` and the flags of these settings; it is called with ``settings: Settings`` first.

    Args:
        names: settings that become flags; the others can still come from the environment and the file.
    """
    given = [*names, *(former for former, name in FORMER_NAMES.items() if name in names)]

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def run(*args: Any, config: Path | None, **kwargs: Any) -> Any:
            flags = {name: kwargs.pop(_PREFIX + name) or None for name in given}
            return function(Settings.load(flags, config), *args, **kwargs)

        config = click.option(
            "--config",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="TOML file with settings; default $DTX_CONFIG, else ./dtx.toml where it exists.",
        )
        command: _Function = with_options(config, *(_setting(name) for name in given))(run)
        return command

    return decorate


def _setting(name: str) -> Callable[[Any], Any]:
    """Like ``click.option``, which cannot build a ``SettingOption`` from the name of a setting alone."""

    def decorate(function: Any) -> Any:
        if not hasattr(function, "__click_params__"):
            function.__click_params__ = []
        function.__click_params__.append(SettingOption(name))
        return function

    return decorate


def _metavar(name: str) -> str:
    if name in _METAVARS:
        return _METAVARS[name]
    if _parsed_by(name, parse_size):
        return "SIZE"
    if _parsed_by(name, parse_duration):
        return "DURATION"
    return "NUMBER" if Settings.model_fields[name].annotation is int else "FILE"


def _parsed_by(name: str, parser: Callable[[object], object]) -> bool:
    return any(getattr(item, "func", None) is parser for item in Settings.model_fields[name].metadata)


def _help(name: str) -> str:
    field = Settings.model_fields[name]
    default = _shown_default(name, field.default)
    variable = f"DTX_{name.upper()}"
    return f"{field.description}  [{variable}{f'; default: {default}' if default else ''}]"


def _shown_default(name: str, value: object) -> str | None:
    match value:
        case None | False | ():
            return None
        case (Address(), *_):
            return ",".join(str(address) for address in value)
        case int() | float() if _parsed_by(name, parse_duration):
            return human_duration(value).replace(" ", "")
        case int() if _parsed_by(name, parse_size):
            return human_size(value).replace(" ", "")
        case _:
            return str(value)


def _gtrid(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value is None:
        return None
    from dtx.log.pages import gtrid_pattern

    try:
        gtrid_pattern(value)
    except ValueError as error:
        raise click.BadParameter(f"hexadecimal digits and * must follow hex: ({error})") from None
    return value


_FILTER_OPTIONS: Final = (
    click.option(
        "--state", multiple=True, type=click.Choice(STATES),
        help="Only branches in this state; can be repeated.",
    ),
    click.option("--vhost", metavar="VHOST", help="Only branches in this virtual host."),
    click.option("--owner", metavar="USER", help="Only branches that this user started."),
    click.option("--older-than", callback=duration, metavar="DURATION", help="Only branches at least this old."),
    click.option("--format-id", type=click.IntRange(0, 0xFFFFFFFF), metavar="NUMBER", help="Only this format id."),
    click.option("--gtrid", callback=_gtrid, metavar="PATTERN", help="Only these global transactions: 'order-*'."),
    click.option("--queue", metavar="QUEUE", help="Only branches that consumed from this queue or publish to it."),
    click.option("--exchange", metavar="EXCHANGE", help="Only branches that publish to it; '' is the default one."),
    click.option("--stuck/--not-stuck", default=None, help="Only branches whose phase two is stuck, or is not."),
)  # fmt: skip


def with_filter(function: _Function) -> _Function:
    """Give a command these flags; it is called with ``wanted``, a dictionary of those that were given."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        given = {name: kwargs.pop(name) for name in _FILTER}
        wanted = {
            name: list(value) if name == "state" else value for name, value in given.items() if value not in (None, ())
        }
        return function(*args, wanted=wanted, **kwargs)

    command: _Function = with_options(*_FILTER_OPTIONS)(run)
    return command


def with_xid(function: _Function) -> _Function:
    """Give a command the argument XID, checked, and ``--vhost``."""

    @wraps(function)
    def run(*args: Any, xid: str, **kwargs: Any) -> Any:
        try:
            return function(*args, xid=str(Xid.parse(xid)), **kwargs)
        except XaError as error:
            raise click.BadParameter(safe(error.reason), param_hint="XID") from None

    command: _Function = with_options(
        click.argument("xid"),
        click.option(
            "--vhost", default="/", show_default=True, metavar="VHOST", help="The virtual host of the branch."
        ),
    )(run)
    return command
