"""The settings as flags: one flag for each, taken from :class:`dtx.config.Settings`, so that they cannot disagree."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args, get_origin

import click

from dtx.admin.safe_text import human_duration, human_size
from dtx.config import Address, Settings, parse_duration, parse_size
from dtx.config.settings import group_of

_Function = TypeVar("_Function", bound=Callable[..., Any])

DATABASE_SETTINGS: Final = ("database", "data_dir", "rm")
ADMIN_SETTINGS: Final = ("admin_listen", "admin_tls_cert", "admin_tls_key")
BROKER_SETTINGS: Final = ("broker", "broker_ca", "management")
_PREFIX: Final = "setting_"
_METAVARS: Final = {
    "admin_host": "NAME",
    "admin_listen": "ADDRESS",
    "admin_proxy": "ADDRESS",
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


def duration(_ctx: click.Context, _param: click.Parameter, value: str | None) -> float | None:
    """Callback of an option that takes a time span in the words that settings take."""
    try:
        return None if value is None else parse_duration(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


class SettingOption(click.Option):
    """A flag that stands for a setting; its value stays text, which the setting itself parses."""

    def __init__(self, name: str) -> None:
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
            [_PREFIX + name, "--" + name.replace("_", "-")], default=None, help=_help(name), show_default=False, **more
        )


class SettingsCommand(click.Command):
    """A command whose settings are listed under the headings of their groups, its own options before them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, grouped."""
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
        names: settings that become flags; the others come from the environment and the file all the same.
    """

    def decorate(function: _Function) -> _Function:
        @wraps(function)
        def run(*args: Any, config: Path | None, **kwargs: Any) -> Any:
            flags = {name: kwargs.pop(_PREFIX + name) or None for name in names}
            return function(Settings.load(flags, config), *args, **kwargs)

        command: Any = run
        for name in reversed(names):
            command = _add(command, SettingOption(name))
        decorated: _Function = click.option(
            "--config",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="TOML file with settings; default $DTX_CONFIG, else ./dtx.toml where it exists.",
        )(command)
        return decorated

    return decorate


def _add(function: Any, option: click.Option) -> Any:
    if not hasattr(function, "__click_params__"):
        function.__click_params__ = []
    function.__click_params__.append(option)
    return function


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
