"""Settings: flags override ``DTX_*``, which override the TOML file; unknown keys and variables are refused."""

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from dtx.config import Address, ConfigError, Settings, broker_vhost, parse_duration, parse_size, redact

SECRET = "s3cret-word"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("DTX_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def refusal(flags: dict[str, object] | None = None, file: Path | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Settings.load(flags, file)
    return str(caught.value)


def test_defaults_are_those_of_the_documentation() -> None:
    settings = Settings.load()
    assert settings.listen == (Address("127.0.0.1", 5673),)
    assert (settings.default_timeout, settings.max_timeout) == (60, 86400)
    assert (settings.frame_max, settings.max_branch_bytes) == (131072, 67108864)
    assert settings.replay == "auto"
    assert settings.journal_retention == 90 * 86400
    assert settings.broker is None
    assert not settings.unsafe


def test_flags_override_the_environment_which_overrides_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = write(tmp_path / "some.toml", 'rm = "file"\ncommit_channels = 3\nmax_channels = 7\n')
    monkeypatch.setenv("DTX_RM", "environment")
    monkeypatch.setenv("DTX_COMMIT_CHANNELS", "4")
    settings = Settings.load({"rm": "flag"}, file)
    assert (settings.rm, settings.commit_channels, settings.max_channels) == ("flag", 4, 7)


def test_a_former_name_of_a_setting_is_deprecated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write(tmp_path / "some.toml", "lanes = 3\n")
    settings = Settings.load(None, file)
    assert settings.commit_channels == 3
    sentence = f"lanes in {file} is deprecated: its name is now commit_channels in {file}"
    assert settings.deprecated() == {"commit_channels": sentence}
    monkeypatch.setenv("DTX_LANES", "4")
    assert Settings.load(None, file).commit_channels == 4
    settings = Settings.load({"lanes": "5"}, file)
    assert settings.commit_channels == 5
    assert settings.deprecated() == {"commit_channels": "--lanes is deprecated: its name is now --commit-channels"}
    assert Settings.load({"lanes": "5", "commit_channels": "6"}).commit_channels == 6
    assert refusal({"lanes": "0"}) == "--lanes: input should be greater than or equal to 1"


def test_the_file_is_dtx_config_or_a_local_dtx_toml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write(tmp_path / "dtx.toml", 'rm = "here"\n')
    assert Settings.load().rm == "here"
    monkeypatch.setenv("DTX_CONFIG", str(write(tmp_path / "other.toml", 'rm = "named"\n')))
    assert Settings.load().rm == "named"
    assert Settings.load(None, write(tmp_path / "flag.toml", 'rm = "flag"\n')).rm == "flag"


def test_constructing_settings_reads_neither_environment_nor_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DTX_RM", "environment")
    write(tmp_path / "dtx.toml", 'rm = "file"\n')
    assert Settings().rm == "dtx"


def test_an_unknown_key_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    file = write(tmp_path / "x.toml", "max_branch_byte = 1\n")
    assert refusal(file=file) == f"unknown key in {file}: max_branch_byte; did you mean max_branch_bytes?"


def test_an_unknown_table_of_the_file_is_refused(tmp_path: Path) -> None:
    assert "unknown key" in refusal(file=write(tmp_path / "x.toml", "[zzz]\nq = 1\n"))


def test_an_unknown_variable_is_refused_with_the_nearest_known_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTX_LISEN", "x")
    assert refusal() == "unknown environment variable DTX_LISEN; did you mean DTX_LISTEN?"


def test_an_unknown_variable_without_a_near_one_names_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTX_QQQQQQQQQQQQQQ", "x")
    assert "'dtx serve --help' lists all settings" in refusal()


def test_variables_of_a_container_platform_are_no_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_AMQP", "PORT", "PORT_5673_TCP", "PORT_5673_TCP_ADDR"):
        monkeypatch.setenv(f"DTX_{name}", "tcp://10.0.0.1:5673")
    for name in ("DTX_DEBUG", "DTX_PYTHON", "DTX_XA_LOG"):
        monkeypatch.setenv(name, "1")
    assert Settings.load() == Settings()


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTX_BROKER", "")
    assert Settings.load().broker is None


def test_a_missing_or_broken_file_is_one_sentence(tmp_path: Path) -> None:
    assert "there is no configuration file" in refusal(file=tmp_path / "absent.toml")
    assert "cannot be read" in refusal(file=write(tmp_path / "x.toml", "listen = = 1"))
    (tmp_path / "latin.toml").write_bytes(b'rm = "\xff"\n')
    assert "cannot be read" in refusal(file=tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"commit_channels": "x"}, "--commit-channels: input should be a valid integer"),
        ({"commit_channels": "0"}, "--commit-channels: input should be greater than or equal to 1"),
        ({"frame_max": "4095"}, "--frame-max: 4095 bytes is neither 0 nor between 4KiB and 2MiB"),
        ({"frame_max": "3MiB"}, "--frame-max: 3145728 bytes is neither"),
        ({"max_timeout": "5q"}, "--max-timeout: '5q' is not a duration"),
        ({"max_timeout": "1500ms"}, "--max-timeout: input should be a valid integer"),
        ({"default_timeout": "2d"}, "longer than max_timeout (86400 s): raise --max-timeout"),
        ({"listen": "127.0.0.1"}, "--listen: '127.0.0.1' is not host:port"),
        ({"listen": "::1:5673"}, "--listen: '::1:5673' is not host:port"),
        ({"listen": "h:65536"}, "is not host:port"),
        ({"listen": "h:\u0661"}, "is not host:port"),
        ({"listen": " , "}, "--listen: at least one host:port is needed"),
        ({"rm": "Dtx"}, "--rm: 'Dtx' is not a name"),
        ({"rm": "a" * 65}, "is not a name"),
        ({"replay": "maybe"}, "--replay: input should be 'auto', 'receipts' or 'always'"),
        ({"journal_retention": "1h"}, "--journal-retention: input should be greater than or equal to 86400"),
        ({"tls_cert": "/c"}, "tls_cert and tls_key go together"),
        ({"tls_ca": "/c"}, "tls_ca needs tls_cert and tls_key"),
        ({"member_ca": "/c"}, "member_ca needs advertise"),
        ({"tls_login": True, "tls_cert": "/c", "tls_key": "/k"}, "tls_login needs tls_ca"),
        ({"broker": "amqp://h", "broker_ca": "/c"}, "begins with amqp:// and not with amqps://"),
        ({"management": "amqp://h"}, "must begin with http:// or https://"),
        ({"database": "mysql://h"}, "must begin with postgresql:// or postgres://"),
        ({"broker": "amqp:///x"}, "names no host"),
        ({"max_branch_bytes": "1.0005KiB"}, "is not a whole number of bytes"),
    ],
)
def test_a_wrong_value_is_refused_and_names_the_flag(flags: dict[str, object], expected: str) -> None:
    assert expected in refusal(flags)


def test_the_error_names_the_source_of_the_wrong_value(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write(tmp_path / "x.toml", "commit_channels = 0\n")
    assert refusal(file=file).startswith(f"commit_channels in {file}: ")
    monkeypatch.setenv("DTX_COMMIT_CHANNELS", "-1")
    assert refusal(file=file).startswith("DTX_COMMIT_CHANNELS: ")


@pytest.mark.parametrize(
    "url",
    [
        f"amqp://u:{SECRET}/x@host/",
        f"amqp://u:1#{SECRET}@host/",
        f"amqp://u:1?{SECRET}@host/",
        f"ftp://u:{SECRET}@host/",
        f"amqp://u:{SECRET}@host:port/",
        f"amqp://u:{SECRET}@[::1/",
        SECRET,
    ],
)
@pytest.mark.parametrize("name", ["broker", "database", "management"])
def test_a_refused_url_is_never_repeated(name: str, url: str) -> None:
    assert SECRET not in refusal({name: url})


def test_sizes_and_durations_take_human_units() -> None:
    assert [parse_size(text) for text in ("1", 7, "64KiB", "2 MiB", "1GB", "1.5kib")] == [
        1, 7, 65536, 2097152, 10**9, 1536,
    ]  # fmt: skip
    assert [parse_duration(text) for text in ("10", 3, 0.5, "500ms", "10s", "5m", "2h", "90d")] == [
        10, 3, 0.5, 0.5, 10, 300, 7200, 7776000,
    ]  # fmt: skip


@pytest.mark.parametrize("value", ["", "-1", -1, "1e3", "64M", "1 TiB", True, None, float("nan"), float("inf"), [1]])
def test_an_invalid_size_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(value)


def test_several_addresses_may_be_listened_on(tmp_path: Path) -> None:
    expected = (Address("127.0.0.1", 1), Address("::1", 2))
    assert Settings.load({"listen": "127.0.0.1:1, [::1]:2"}).listen == expected
    assert Settings.load(None, write(tmp_path / "x", 'listen = ["127.0.0.1:1", "[::1]:2"]')).listen == expected
    assert Settings(listen=expected[1]).listen == expected[1:]
    assert ",".join(str(address) for address in expected) == "127.0.0.1:1,[::1]:2"


def test_coordinators_come_repeated_or_separated_by_commas(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert Settings.load({"coordinator": ("a,b", "c")}).coordinator == ("a", "b", "c")
    assert Settings.load(None, write(tmp_path / "x", 'coordinator = ["a", "b"]')).coordinator == ("a", "b")
    monkeypatch.setenv("DTX_COORDINATOR", "tm , other")
    assert Settings.load().coordinator == ("tm", "other")


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        Settings().rm = "other"  # type: ignore[misc]


def test_the_data_directory_follows_xdg_and_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert Settings.load().data_dir == Path("/home/someone/.local/state/dtx")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert Settings.load().data_dir == Path("/home/someone/.local/state/dtx")
    monkeypatch.setenv("XDG_STATE_HOME", "/var/state")
    assert Settings.load().data_dir == Path("/var/state/dtx")
    assert Settings.load({"data_dir": "~/x"}).data_dir == Path("/home/someone/x")


def test_postgresql_can_enter_the_data_directory_of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert Settings.load().data_dir == Path("/var/lib/dtx")


def test_the_management_api_defaults_to_the_brokers_host_and_credentials() -> None:
    broker = "amqp://u:p%40@host:5999/v"
    assert Settings().management_url is None
    assert Settings(broker=broker).management_url == "http://u:p%40@host:15672"
    assert Settings(broker="amqp://[::1]").management_url == "http://guest:guest@[::1]:15672"
    assert Settings(broker=broker, management="https://m:1/x").management_url == "https://u:p%40@m:1/x"
    assert Settings(broker=broker, management="http://a:b@m:1").management_url == "http://a:b@m:1"


@pytest.mark.parametrize(
    ("url", "vhost"),
    [("amqp://h", "/"), ("amqp://h/", "/"), ("amqp://h/%2f", "/"), ("amqp://h/a%20b", "a b"), ("amqp://h//", "/")],
)
def test_the_vhost_of_a_broker_url_is_its_decoded_path(url: str, vhost: str) -> None:
    assert broker_vhost(url) == vhost


def test_redacted_settings_hold_no_password_and_are_plain() -> None:
    settings = Settings(
        broker=f"amqp://u:{SECRET}@h/",
        database=f"postgresql://u:{SECRET}@h/db?sslpassword={SECRET}",
        management=f"http://u:{SECRET}@h",
        coordinator="a,b",
    )
    shown = settings.redacted()
    assert SECRET not in str(shown)
    assert SECRET not in repr(settings)
    assert shown["broker"] == "amqp://u:***@h/"
    assert shown["listen"] == ["127.0.0.1:5673"]
    assert shown["coordinator"] == ["a", "b"]
    assert isinstance(shown["data_dir"], str)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("connect to amqp://u:p@h:1/v failed", "connect to amqp://u:***@h:1/v failed"),
        ("amqp://u:p/@w@h", "amqp://u:***@h"),
        ("postgresql://u@h/db", "postgresql://u@h/db"),
        ("http://h/path", "http://h/path"),
        ("host=h password=secret user=u", "host=h password=*** user=u"),
        ("password='a \\' b' user=u", "password=*** user=u"),
        ("x?user=u&password=p&y=1", "x?user=u&password=***&y=1"),
        ('two "amqp://u:p@h" and "amqp://u:q@h"', 'two "amqp://u:***@h" and "amqp://u:***@h"'),
    ],
)
def test_passwords_are_taken_out_of_any_text(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, []),
        ({"listen": "localhost:1,[::1]:2,127.0.0.2:3", "admin_listen": "[::1]:4"}, []),
        ({"listen": "0.0.0.0:5673"}, ["listen"]),
        ({"listen": "127.0.0.1:1,[::]:2", "admin_listen": "dtx.example:15673"}, ["listen", "admin_listen"]),
        ({"listen": "0.0.0.0:5673", "tls_cert": "c", "tls_key": "k"}, []),
        ({"admin_listen": "0.0.0.0:15673", "no_admin": True}, []),
        ({"admin_listen": "0.0.0.0:15673", "admin_tls_cert": "c", "admin_tls_key": "k"}, []),
        ({"admin_listen": "0.0.0.0:15673", "admin_proxy": "10.0.0.1"}, []),
        ({"broker": "amqp://user:password@[::1]:5672/"}, []),
        ({"broker": "amqp://user:password@broker.example"}, ["broker", "management"]),
        ({"broker": "amqps://user:password@broker.example"}, ["management"]),
        ({"broker": "amqps://user:password@broker.example", "management": "http://[::1]:15672"}, []),
        ({"broker": "amqps://user:password@broker.example", "management": "https://broker.example:15671"}, []),
    ],
)
def test_addresses_that_others_reach_without_tls_are_named(given: dict[str, object], named: list[str]) -> None:
    found = Settings.load(given).unencrypted()
    assert list(found) == named
    assert all("are readable on the way to " in sentence for sentence in found.values())


def test_a_broker_without_tls_is_named_without_its_password() -> None:
    found = Settings.load({"broker": "amqp://user:secret@[fd00::1]"}).unencrypted()
    assert found == {
        "broker": "passwords and messages are readable on the way to [fd00::1]:5672: give --broker an amqps:// URL",
        "management": "passwords are readable on the way to [fd00::1]:15672: give --management an https:// URL",
    }


@pytest.mark.parametrize(
    ("given", "trusted"),
    [("10.0.0.1, fd00::/8", ("10.0.0.1/32", "fd00::/8")), (["127.0.0.0/8"], ("127.0.0.0/8",)), ("", ())],
)
def test_a_trusted_proxy_is_an_address_or_a_network(given: object, trusted: tuple[str, ...]) -> None:
    assert Settings.load({"admin_proxy": given}).admin_proxy == trusted


@pytest.mark.parametrize("given", ["*", "proxy.example", "10.0.0.1/8", "10.0.0.0/33"])
def test_other_words_for_a_proxy_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="admin-proxy"):
        Settings.load({"admin_proxy": given})


def test_other_commands_read_the_settings_of_members() -> None:
    """Only ``dtx serve`` needs a broker and a database for them."""
    loaded = Settings.load({"processes": 2, "advertise": "amqp://dtx.example"})
    assert (loaded.processes, loaded.advertise, loaded.broker) == (2, "amqp://dtx.example", None)


@pytest.mark.parametrize("address", ["dtx.example", "http://dtx.example", "amqp://", "amqp://a@b", "amqp://a/vhost"])
def test_the_address_of_a_member_is_checked(address: str) -> None:
    with pytest.raises(ConfigError, match="advertise is amqp"):
        Settings.load({"advertise": address})
