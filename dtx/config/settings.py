"""All settings of dtx, with default, limits and description.

:meth:`Settings.load` reads them from flags, environment and file. Errors name the source of a setting.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit, urlunsplit

from pydantic import BeforeValidator, Field, PrivateAttr, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from dtx.config.rules import QUOTA_LIMITS, Policy, Quota, parse_policies, parse_quotas
from dtx.config.values import (
    DAY,
    KIB,
    MIB,
    RM_NAME,
    Address,
    ConfigError,
    parse_duration,
    parse_listen,
    parse_size,
    redact,
    single_hosts,
    split_list,
    url_of,
)

_ENV_PREFIX: Final = "DTX_"
_DEFAULT_FILE: Final = Path("dtx.toml")
_NOT_SETTINGS: Final = frozenset(
    {
        *("DTX_API", "DTX_API_CA", "DTX_CONFIG", "DTX_DEBUG", "DTX_TOKEN", "DTX_TOKEN_FILE"),
        *("DTX_PYTHON", "DTX_XA_LOG"),  # of the XA switch for C, set for all programs of a domain
    }
)
FORMER_NAMES: Final = {"lanes": "commit_channels"}
"""Deprecated names of settings, which work for one more version, with their present names."""
# Kubernetes and container links set these for a service that is called "dtx". They are not settings.
_SERVICE_LINK: Final = re.compile(r"DTX_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)(_(PROTO|PORT|ADDR))?)?)")


def default_data_dir() -> Path:
    """``/var/lib/dtx`` for root, else ``$XDG_STATE_HOME/dtx``; ``~/.local/state/dtx`` if that is not an absolute path.

    For root, PostgreSQL runs as another account, which cannot enter root's home.
    """
    if os.geteuid() == 0:
        return Path("/var/lib/dtx")
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    return (state if state.is_absolute() else Path.home() / ".local" / "state") / "dtx"


Size = Annotated[int, BeforeValidator(parse_size)]
Duration = Annotated[float, BeforeValidator(parse_duration)]
WholeSeconds = Annotated[int, BeforeValidator(parse_duration)]
BrokerUrl = Annotated[
    SecretStr, BeforeValidator(url_of(("amqp", "amqps"), "amqp://user:password@127.0.0.1:5672/", hosts=True))
]
ManagementUrl = Annotated[SecretStr, BeforeValidator(url_of(("http", "https"), "http://127.0.0.1:15672"))]
DatabaseUrl = Annotated[
    SecretStr, BeforeValidator(url_of(("postgresql", "postgres"), "postgresql://user:password@127.0.0.1:5432/dtx"))
]


class _Group:
    """Headings under which ``dtx serve --help`` shows the settings."""

    CLIENTS: Final = "Clients"
    BROKER: Final = "Broker"
    OPERATORS: Final = "Operators"
    DATABASE: Final = "Database"
    TRANSACTIONS: Final = "Transactions"
    POLICIES: Final = "Policies"
    LIMITS: Final = "Limits"
    TIMING: Final = "Timing"
    LOGGING: Final = "Logging"


def _setting(default: Any, group: str, description: str, **more: Any) -> Any:
    return Field(default, description=description, json_schema_extra={"group": group}, **more)


class Settings(BaseSettings):
    """All settings, immutable. Durations are in seconds, sizes in bytes. URLs are secrets."""

    model_config = SettingsConfigDict(env_prefix=_ENV_PREFIX, extra="forbid", frozen=True, hide_input_in_errors=True)
    _deprecated: Mapping[str, str] = PrivateAttr(default_factory=dict)

    # -- clients
    listen: Annotated[tuple[Address, ...], NoDecode, BeforeValidator(parse_listen)] = _setting(
        (Address("127.0.0.1", 5673),),
        _Group.CLIENTS,
        "Where clients connect: host:port or [ipv6]:port; several separated by commas. Port 0 lets the system choose.",
    )
    tls_cert: Path | None = _setting(
        None, _Group.CLIENTS, "Certificate chain (PEM) to offer to clients; makes every listener TLS. Needs tls_key."
    )
    tls_key: Path | None = _setting(None, _Group.CLIENTS, "Private key (PEM) of tls_cert.")
    tls_ca: Path | None = _setting(
        None, _Group.CLIENTS, "Demand client certificates that this authority (PEM) has signed."
    )
    tls_login: bool = _setting(
        False,
        _Group.CLIENTS,
        "AMQP 1.0 without a broker: offer SASL EXTERNAL. The common name (CN) of the client certificate's subject is "
        "the user, and no password is required. Needs tls_ca.",
    )
    anonymous_user: str | None = _setting(
        None,
        _Group.CLIENTS,
        "AMQP 1.0 without a broker: offer SASL ANONYMOUS. Clients that use it log in as this user.",
    )
    control_errors: Literal["strict", "lenient", "always"] = _setting(
        "lenient",
        _Group.CLIENTS,
        "AMQP 1.0: control links that get the outcome rejected for a failed declare or discharge; dtx detaches the "
        "others. 'strict': links whose source lists that outcome. 'lenient': also links that list none. 'always': all.",
    )
    require_tickets: bool = _setting(
        False,
        _Group.CLIENTS,
        "Without a broker: refuse (403) dtx methods without the ticket of an access.request. By default ticket 0 is "
        "accepted.",
    )

    # -- broker
    broker: BrokerUrl | None = _setting(
        None,
        _Group.BROKER,
        "The broker behind dtx, amqp:// or amqps://, with the credentials of dtx itself (clients use their own "
        "credentials and vhosts). It may name several nodes of a cluster: amqp://user:password@one:5672,two:5672/. "
        "Without it dtx is the broker, and the messages are in the database. "
        "That user needs the tag 'impersonator' to republish messages whose user-id is set. "
        "Give a password in the environment or the file rather than in a flag.",
    )
    broker_ca: Path | None = _setting(
        None, _Group.BROKER, "Authority (PEM) that signed the broker's certificate, for amqps://; default the system's."
    )
    management: ManagementUrl | None = _setting(
        None,
        _Group.BROKER,
        "RabbitMQ management API, http(s)://host:port; default http://<broker host>:15672. Credentials are the broker "
        "URL's unless this URL has its own. dtx needs it to check whether receipts can be trusted.",
    )
    replay: Literal["auto", "receipts", "always"] = _setting(
        "auto",
        _Group.BROKER,
        "After a crash, what to do with units whose outcome the log does not have. 'receipts': trust the receipts in "
        "the broker. 'always': apply the units again; messages may repeat, none is lost. 'auto': trust receipts only "
        "if the broker is a single node whose queues refuse nothing.",
    )
    duplicates: Literal["suppress", "pass"] = _setting(
        "suppress",
        _Group.BROKER,
        "Whether consumers that read through dtx get a second copy of a message that dtx had to send again: 'suppress' "
        "keeps it in the database, 'pass' delivers it.",
    )
    commit_channels: int = _setting(
        16, _Group.BROKER, "Channels of dtx's own broker connection that run commits at the same time.", ge=1, le=256
    )

    # -- operators
    admin_listen: Annotated[tuple[Address, ...], NoDecode, BeforeValidator(parse_listen)] = _setting(
        (Address("127.0.0.1", 15673),),
        _Group.OPERATORS,
        "Where the operators' HTTP API listens: one host:port or [ipv6]:port. Port 0 lets the system choose.",
    )
    admin_host: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)] = _setting(
        (),
        _Group.OPERATORS,
        "Further host name of the API, in addition to addresses, localhost and the name of the machine; requests to "
        "others are refused (421). Repeat the flag, or separate by commas.",
    )
    no_admin: bool = _setting(False, _Group.OPERATORS, "Serve no HTTP API.")
    admin_tls_cert: Path | None = _setting(
        None, _Group.OPERATORS, "Certificate chain (PEM) that makes the API HTTPS. Needs admin_tls_key."
    )
    admin_tls_key: Path | None = _setting(None, _Group.OPERATORS, "Private key (PEM) of admin_tls_cert.")

    admin_proxy: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)] = _setting(
        (),
        _Group.OPERATORS,
        "Address or network of a proxy before the API. Its X-Forwarded-Proto and X-Forwarded-For are trusted: cookies "
        "are Secure behind TLS, and logs and limits use the addresses of clients. Repeat the flag, or separate by "
        "commas.",
    )

    # -- database
    database: DatabaseUrl | None = _setting(
        None,
        _Group.DATABASE,
        "PostgreSQL 13 or later for the transaction log, postgresql://user:password@host:port/name. "
        "Without it dtx runs an embedded PostgreSQL in data_dir.",
    )
    data_dir: Path = _setting(
        None,
        _Group.DATABASE,
        "Directory of the embedded PostgreSQL; default $XDG_STATE_HOME/dtx or ~/.local/state/dtx, "
        "for root /var/lib/dtx.",
        validate_default=True,
    )
    rm: str = _setting(
        "dtx",
        _Group.DATABASE,
        "Name of this resource manager (a-z 0-9 . _ -). Of all dtx with the same name and database, one is active and "
        "the others are standbys.",
    )
    advertise: str | None = _setting(
        None,
        _Group.DATABASE,
        "amqp://host:port or amqps://host:port of this dtx for other dtx. With it, all dtx of the same rm and database "
        "are active together; without a port, it is that of the first listener. Needs --broker and --database.",
    )
    member_ca: Path | None = _setting(
        None,
        _Group.DATABASE,
        "Authority (PEM) that has signed the certificates of the other dtx at amqps://; default: that of tls_ca, else "
        "those of the system. With tls_ca, certificates that it has signed are also accepted. Needs --advertise.",
    )
    processes: int = _setting(
        1,
        _Group.DATABASE,
        "Members that this machine runs under one supervisor, to use several cores. They share the listeners. Member i "
        "has the API at the port of admin_listen + i - 1. With a port in --advertise, it uses that port + i - 1; "
        "without --advertise, only dtx on this machine are members. Needs --broker and --database.",
        ge=1,
        le=64,
    )
    journal_retention: Duration = _setting(
        90.0 * DAY,
        _Group.DATABASE,
        "How long the journal keeps the history of each branch, in whole days; "
        "of several rm in one database the longest counts.",
        ge=DAY,
    )
    archive_retention: Duration = _setting(
        90.0 * DAY,
        _Group.DATABASE,
        "How long undelivered messages of forgotten branches are kept; 0: no limit.",
    )
    duplicate_window: Duration = _setting(
        7.0 * DAY,
        _Group.DATABASE,
        "How long copies of a message that dtx had to send again are recognised, and suppressed ones are kept; "
        "0: no limit.",
    )
    audit_retention: Duration = _setting(
        400.0 * DAY, _Group.DATABASE, "How long the audit log of operators' orders is kept; 0: no limit."
    )
    unsafe: bool = _setting(
        False,
        _Group.DATABASE,
        "Start even if PostgreSQL has fsync, full_page_writes or synchronous_commit off. A power failure then loses "
        "votes.",
    )

    # -- transactions
    default_timeout: WholeSeconds = _setting(
        60,
        _Group.TRANSACTIONS,
        "Time a branch has from start to prepare before it is rolled back; 0 for no limit. "
        "A prepared branch never times out.",
        le=0xFFFFFFFF,
    )
    max_timeout: WholeSeconds = _setting(
        DAY,
        _Group.TRANSACTIONS,
        "The longest time-out of a branch. A longer one in set-timeout is reduced to it; see get-timeout.",
        ge=1,
        le=0xFFFFFFFF,
    )
    coordinator: Annotated[tuple[str, ...], NoDecode, BeforeValidator(split_list)] = _setting(
        (),
        _Group.TRANSACTIONS,
        "User that may recover and complete the branches of all users. Repeat the flag, or separate by commas.",
    )
    tombstone_ttl: Duration = _setting(
        600.0,
        _Group.TRANSACTIONS,
        "How long a branch that was rolled back without its transaction manager still answers one rollback with the "
        "reason instead of 'unknown xid'.",
    )

    # -- policies
    alert_after: Duration = _setting(
        0.0,
        _Group.POLICIES,
        "Log a warning about branches that have been prepared for longer, and count them in "
        "dtx_policy_overdue_branches; 0 for never.",
    )
    policy: Annotated[tuple[Policy, ...], NoDecode, BeforeValidator(parse_policies)] = _setting(
        (),
        _Group.POLICIES,
        "Complete prepared branches heuristically: 'NAME rollback|commit format=ID[,ID] vhost=NAME after=DURATION'. "
        "Repeat the flag, or separate by semicolons. A policy gives up atomicity for those branches.",
    )

    # -- limits
    max_connections: int = _setting(
        2000,
        _Group.LIMITS,
        "Client connections, including those in a TLS handshake, and closed ones whose branch is not complete. "
        "A few more are reserved for coordinators.",
        ge=1,
    )
    max_handshakes: int = _setting(
        500,
        _Group.LIMITS,
        "Client connections from one address (for IPv6: one /64 network) that are not open yet.",
        ge=1,
    )
    max_channels: int = _setting(
        2047,
        _Group.LIMITS,
        "Channels of one client connection; alongside a broker at most half of the broker's limit.",
        ge=1,
        le=65535,
    )
    frame_max: Size = _setting(
        128 * KIB,
        _Group.LIMITS,
        "Largest frame offered to clients, 4KiB to 2MiB; "
        "0 for what the broker offers (16MiB at most), 2MiB without one.",
    )
    max_branch_bytes: Size = _setting(
        64 * MIB, _Group.LIMITS, "Messages that one branch may hold; beyond it the branch is rolled back.", ge=1
    )
    max_branch_messages: int = _setting(10_000, _Group.LIMITS, "The same limit as a number of messages.", ge=1)
    max_branches: int = _setting(
        100_000,
        _Group.LIMITS,
        "Branches of all clients, including prepared and heuristic ones; a start beyond it is refused (506).",
        ge=1,
    )
    quota: Annotated[tuple[Quota, ...], NoDecode, BeforeValidator(parse_quotas)] = _setting(
        (),
        _Group.LIMITS,
        f"Limits of one user or virtual host: 'user=NAME {QUOTA_LIMITS}', with any of these limits. vhost=NAME is for "
        "a virtual host. NAME * is each user or virtual host. A session of AMQP 1.0 counts as a channel. Repeat the "
        "flag, or separate by semicolons.",
    )
    max_held_bytes: Size = _setting(
        1024 * MIB,
        _Group.LIMITS,
        "Memory for messages of all branches that are not prepared, and for unacknowledged deliveries of selected "
        "channels.",
        ge=1,
    )
    max_kept_bytes: Size = _setting(
        128 * MIB,
        _Group.LIMITS,
        "Contents of unacknowledged deliveries kept for one selected channel; a delivery beyond it cannot be "
        "consumed within a branch (506), so consume with a prefetch.",
        ge=1,
    )
    max_message_bytes: Size = _setting(
        0,
        _Group.LIMITS,
        "Largest message in a branch; 0 for what the broker takes. RabbitMQ 4 announces that over AMQP 1.0. Without an "
        "announcement it is 16MiB with RabbitMQ 4 and 128MiB with 3.x: set it to the broker's max_message_size if that "
        "is another one. 128MiB without a broker.",
    )
    work_cache_bytes: Size = _setting(
        64 * MIB, _Group.LIMITS, "Memory for messages of prepared branches; commits read others from the database."
    )
    message_cache_bytes: Size = _setting(
        128 * MIB,
        _Group.LIMITS,
        "Without a broker: memory for messages in queues; others are read from the database when they are delivered.",
    )

    disk_free_bytes: Size = _setting(
        128 * MIB,
        _Group.LIMITS,
        "Least free space on the disk of data_dir; 0 for none. Below it, clients that publish wait "
        "(connection.blocked), and /readyz returns 503. Alongside a broker, no branch is started. dtx cannot see the "
        "disk of --database. There clients wait for some seconds after PostgreSQL has refused a write because its disk "
        "is full.",
    )

    # -- timing
    header_timeout: Duration = _setting(
        10.0, _Group.TIMING, "A client that sends no protocol header for this long is closed.", gt=0
    )
    handshake_timeout: Duration = _setting(
        30.0, _Group.TIMING, "Time from the header to connection.open-ok, after which the client is closed.", gt=0
    )
    unit_deadline: Duration = _setting(
        30.0,
        _Group.TIMING,
        "When the broker does not answer for this long, the transaction manager gets 541 and may repeat the request. "
        "The operation continues.",
        gt=0,
    )
    upstream_heartbeat: WholeSeconds = _setting(
        10,
        _Group.TIMING,
        "Heartbeat between dtx and the broker; at most 4s if --broker names several nodes.",
        ge=1,
        le=65535,
    )
    lease_ttl: Duration = _setting(
        15.0, _Group.TIMING, "A standby takes over this long after the last renewal of the lease.", ge=1
    )
    drain_timeout: Duration = _setting(
        30.0, _Group.TIMING, "How long a graceful stop (SIGTERM) waits for pending commits."
    )

    # -- logging
    traces: bool = _setting(
        False,
        _Group.LOGGING,
        "Make OpenTelemetry spans of XA calls (needs dtx[otel]). Its own variables configure the export "
        "(OTEL_EXPORTER_OTLP_ENDPOINT…).",
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", _Group.LOGGING, "Lowest level to log.")
    log_format: Literal["auto", "json", "console"] = _setting(
        "auto", _Group.LOGGING, "One JSON object a line, or text for people; 'auto' is text on a terminal, else JSON."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use arguments only: :meth:`load` reads the environment."""
        return (init_settings,)

    @field_validator("data_dir", mode="before")
    @classmethod
    def _data_dir(cls, value: object) -> Path:
        return default_data_dir() if value is None else Path(str(value))

    @field_validator(
        "tls_cert", "tls_key", "tls_ca", "member_ca", "broker_ca", "admin_tls_cert", "admin_tls_key", "data_dir"
    )
    @classmethod
    def _home(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser()

    @field_validator("listen")
    @classmethod
    def _listens(cls, value: tuple[Address, ...]) -> tuple[Address, ...]:
        if not value:
            raise ValueError("at least one host:port is needed")
        return value

    @field_validator("admin_listen")
    @classmethod
    def _admin_listens(cls, value: tuple[Address, ...]) -> tuple[Address, ...]:
        if len(value) != 1:
            raise ValueError("exactly one host:port is needed")
        return value

    @field_validator("admin_proxy")
    @classmethod
    def _admin_proxies(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(str(ip_network(proxy)) for proxy in value)

    @field_validator("rm")
    @classmethod
    def _rm_name(cls, value: str) -> str:
        if not RM_NAME.fullmatch(value):
            raise ValueError(f"{value!r} is not a name of 1 to 64 of the characters a-z 0-9 . _ -")
        return value

    @field_validator("frame_max")
    @classmethod
    def _frame_max_range(cls, value: int) -> int:
        if value and not 4 * KIB <= value <= 2 * MIB:
            raise ValueError(f"{value} bytes is neither 0 nor between 4KiB and 2MiB")
        return value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together, only one of them is given")
        if (self.admin_tls_cert is None) != (self.admin_tls_key is None):
            raise ValueError("admin_tls_cert and admin_tls_key go together, only one of them is given")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("tls_ca needs tls_cert and tls_key")
        if self.tls_login and self.tls_ca is None:
            raise ValueError("tls_login needs tls_ca: without it, client certificates are not verified")
        if self.broker_ca is not None and self.broker is not None and not _is_amqps(self.broker):
            raise ValueError("broker_ca is given, but the broker URL begins with amqp:// and not with amqps://")
        if self.member_ca is not None and self.advertise is None:
            raise ValueError("member_ca needs advertise: without it, there are no other members")
        if self.advertise is not None:
            _check_address(self.advertise)
        if self.default_timeout > self.max_timeout:
            raise ValueError(
                f"default_timeout ({self.default_timeout} s) is longer than max_timeout ({self.max_timeout} s): "
                "raise --max-timeout, or lower --default-timeout"
            )
        return self

    @classmethod
    def load(cls, flags: Mapping[str, object] | None = None, file: Path | None = None) -> Self:
        """Read settings from flags, then the environment, then a file, then defaults; the first source of a key counts.

        Args:
            flags: values of the command line, by setting name; ``None`` counts as not given.
            file: the TOML file; else ``DTX_CONFIG``, else ``dtx.toml`` in the working directory if it exists.

        Raises:
            ConfigError: a setting is unknown or invalid, or the file is not readable; the message names the source.
        """
        found = _gather(cls, flags or {}, file)
        try:
            settings = cls.model_validate(found.values)
        except ValidationError as error:
            raise ConfigError("; ".join(_sentences(error, found.origin))) from None
        settings._deprecated = found.deprecated  # noqa: SLF001 - of this class
        return settings

    def redacted(self) -> dict[str, object]:
        """All settings as plain values for logs; passwords are replaced by ``***``."""
        return {name: _plain(getattr(self, name)) for name in type(self).model_fields}

    def deprecated(self) -> Mapping[str, str]:
        """By setting, a warning that it was given under a former name, with the present one."""
        return self._deprecated

    def unencrypted(self) -> dict[str, str]:
        """By setting, a warning about connections to other machines without TLS, with the remedy."""
        found = {}
        clients = [str(address) for address in self.listen if not address.is_loopback]
        if clients and self.tls_cert is None:
            found["listen"] = (
                f"passwords and messages are readable on the way to {', '.join(clients)}: give --tls-cert and --tls-key"
            )
        operators = [str(address) for address in self.admin_listen if not address.is_loopback]
        if operators and not self.no_admin and self.admin_tls_cert is None and not self.admin_proxy:
            found["admin_listen"] = (
                f"passwords and tokens are readable on the way to {', '.join(operators)}: "
                "give --admin-tls-cert and --admin-tls-key, or name the proxy with TLS as --admin-proxy"
            )
        if self.advertise is not None and self.advertise.startswith("amqp://"):
            parts = urlsplit(self.advertise)
            if not Address(parts.hostname or "", 0).is_loopback:
                found["advertise"] = "requests between members are readable and can be changed on the way: use amqps://"
        if self.broker is not None and not _is_amqps(self.broker):
            hosts = [urlsplit(url) for url in single_hosts(self.broker.get_secret_value())]
            addresses = [Address(host.hostname or "localhost", host.port or 5672) for host in hosts]
            far = ", ".join(str(address) for address in addresses if not address.is_loopback)
            if far:
                found["broker"] = (
                    f"passwords and messages are readable on the way to {far}: give --broker an amqps:// URL"
                )
        management = urlsplit(self.management_url or "")
        if management.scheme == "http":
            address = Address(management.hostname or "localhost", management.port or 80)
            if not address.is_loopback:
                found["management"] = (
                    f"passwords are readable on the way to {address}: give --management an https:// URL"
                )
        return found

    @property
    def management_url(self) -> str | None:
        """The management API's base URL with credentials, or ``None`` without a broker."""
        if self.broker is None:
            return None
        broker = urlsplit(single_hosts(self.broker.get_secret_value())[0])
        user = broker.netloc.rpartition("@")[0] or "guest:guest"
        if self.management is None:
            host = f"[{broker.hostname}]" if ":" in (broker.hostname or "") else broker.hostname
            return f"http://{user}@{host}:15672"
        parts = urlsplit(self.management.get_secret_value())
        if "@" in parts.netloc:
            return parts.geturl()
        return urlunsplit(parts._replace(netloc=f"{user}@{parts.netloc}"))


def _is_amqps(url: SecretStr) -> bool:
    return urlsplit(url.get_secret_value()).scheme == "amqps"


def _check_address(member: str) -> None:
    """Raises ValueError: *member* is not the address of one."""
    parts = urlsplit(member)
    if parts.scheme not in {"amqp", "amqps"} or not parts.hostname or parts.path.strip("/") or parts.username:
        raise ValueError("advertise is amqp://host:port or amqps://host:port, without user and path")


def group_of(name: str) -> str:
    """The help heading of the setting *name*."""
    extra = Settings.model_fields[name].json_schema_extra
    return str(extra["group"]) if isinstance(extra, dict) else ""


def _plain(value: object) -> object:
    if isinstance(value, SecretStr):
        return redact(value.get_secret_value())
    if isinstance(value, tuple):
        # An Address is a tuple too, but one value.
        return str(value) if isinstance(value, Address) else [_plain(element) for element in value]
    return str(value) if isinstance(value, Path | Policy | Quota) else value


@dataclass(slots=True)
class _Gathered:
    """The values of all sources, and for each key its source, as text for an error message."""

    values: dict[str, object] = field(default_factory=dict)
    origin: dict[str, str] = field(default_factory=dict)
    deprecated: dict[str, str] = field(default_factory=dict)

    def put_all(self, values: Mapping[str, object], named: Callable[[str], str]) -> None:
        """Set the *values* of one source, which replace those of weaker sources.

        A present name replaces a former one of the same source. *named* returns the name of a key in this source.
        """
        for key, value in sorted(values.items(), key=lambda item: item[0] not in FORMER_NAMES):
            present = FORMER_NAMES.get(key, key)
            if present != key:
                self.deprecated[present] = f"{named(key)} is deprecated: its name is now {named(present)}"
            self.values[present] = value
            self.origin[present] = named(key)


def _gather(settings: type[BaseSettings], flags: Mapping[str, object], file: Path | None) -> _Gathered:
    """Read file, environment and flags, from the weakest source to the strongest.

    Raises:
        ConfigError: the file cannot be read, or a key of the file or the environment is unknown.
    """
    found = _Gathered()
    if path := file or _file_from_environment():
        found.put_all(_read_file(settings, path), lambda key: f"{key} in {path}")
    variables = {_variable(key) for key in (*settings.model_fields, *FORMER_NAMES)}
    _refuse_unknown(_own_variables(), variables, "environment variable")
    former = {key: value for key in FORMER_NAMES if (value := os.environ.get(_variable(key)))}
    found.put_all(former | EnvSettingsSource(settings, env_ignore_empty=True)(), _variable)
    given = {key: value for key, value in flags.items() if value is not None}
    found.put_all(given, lambda key: "--" + key.replace("_", "-"))
    return found


def _variable(key: str) -> str:
    return _ENV_PREFIX + key.upper()


def _sentences(error: ValidationError, origin: Mapping[str, str]) -> Iterator[str]:
    """One sentence for each error, with its source and without secrets."""
    for item in error.errors(include_url=False, include_input=False):
        message = item["msg"].removeprefix("Value error, ")
        key = str(item["loc"][0]) if item["loc"] else None
        yield redact(message if key is None else f"{origin.get(key, key)}: {message[:1].lower()}{message[1:]}")


def _file_from_environment() -> Path | None:
    if named := os.environ.get("DTX_CONFIG"):
        return Path(named)
    return _DEFAULT_FILE if _DEFAULT_FILE.exists() else None


def _own_variables() -> Iterator[str]:
    for name in os.environ:
        if name.startswith(_ENV_PREFIX) and name not in _NOT_SETTINGS and not _SERVICE_LINK.fullmatch(name):
            yield name


def _read_file(settings: type[BaseSettings], path: Path) -> Mapping[str, object]:
    if not path.is_file():
        raise ConfigError(f"there is no configuration file {path}")
    try:
        found = TomlConfigSettingsSource(settings, path).toml_data
    except (OSError, ValueError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from None
    _refuse_unknown(found, {*settings.model_fields, *FORMER_NAMES}, f"key in {path}:")
    return found


def _refuse_unknown(names: Iterable[str], known: set[str], what: str) -> None:
    for name in sorted(names):
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "'dtx serve --help' lists all settings"
            raise ConfigError(f"unknown {what} {name}; {hint}")
