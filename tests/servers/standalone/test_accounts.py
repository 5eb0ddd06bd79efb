"""Logins and permissions on a real PostgreSQL, while operators change them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from threading import Event
from typing import Any

import psycopg
import pytest

from dtx.auth import accounts as module
from dtx.auth import passwords
from dtx.auth.accounts import Account, Accounts, LoginRefused
from dtx.auth.permissions import Patterns, Permission
from dtx.auth.users import AccountEditor, EditError
from dtx.db import migrate
from dtx.log.api import LogError, LogUnavailable
from tests.support.postgres import PostgresServer

RM = "rm"
EVERYTHING = Patterns(".*", ".*", ".*")
Open = Callable[..., Coroutine[Any, Any, Accounts]]


@pytest.fixture
def editor(migrated_postgres_url: str) -> AccountEditor:
    return AccountEditor(migrated_postgres_url, RM)


@pytest.fixture
async def open_accounts(migrated_postgres_url: str) -> AsyncIterator[Open]:
    opened: list[Accounts] = []

    async def make(url: str = migrated_postgres_url, rm: str = RM) -> Accounts:
        opened.append(Accounts(url, rm, timeout=5.0))
        await opened[-1].open()
        return opened[-1]

    yield make
    for accounts in opened:
        await accounts.close()


async def alice(accounts: Accounts, password: bytes = b"secret") -> Account:
    return await accounts.authenticate(b"alice", password, loopback=False, peer="10.0.0.1:5")


def query(url: str, sql: str) -> list[Any]:
    with psycopg.connect(url) as connection:
        return connection.execute(sql).fetchall()


async def test_the_first_start_makes_guest_with_all_permissions(open_accounts: Open) -> None:
    accounts = await open_accounts()
    guest = await accounts.authenticate(b"guest", b"guest", loopback=True)
    assert (guest.name, guest.vhosts) == ("guest", ("/",))
    assert guest.tags == {"administrator"}
    assert accounts.has_vhost("/")
    assert guest.may_enter("/")
    assert all(guest.may("/", permission, b"anything") for permission in Permission)


async def test_guest_comes_in_from_this_machine_alone(open_accounts: Open) -> None:
    """RabbitMQ: "by default, the guest user is prohibited from connecting from remote hosts"."""
    accounts = await open_accounts()
    with pytest.raises(LoginRefused, match="can only connect from"):
        await accounts.authenticate(b"guest", b"guest", loopback=False)
    with pytest.raises(LoginRefused, match="wrong password"):
        await accounts.authenticate(b"guest", b"wrong", loopback=False)


async def test_a_passwordless_user_logs_in_by_name(open_accounts: Open, editor: AccountEditor) -> None:
    accounts = await open_accounts()
    with pytest.raises(LoginRefused, match="unknown user"):
        await accounts.admit("alice", loopback=True)
    editor.add_user("alice", b"secret")
    assert (await accounts.admit("alice", loopback=False)).name == "alice"
    with pytest.raises(LoginRefused, match="can only connect from"):
        await accounts.admit("guest", loopback=False)
    assert (await accounts.admit("guest", loopback=True)).name == "guest"


async def test_guest_that_was_removed_stays_removed(open_accounts: Open, editor: AccountEditor) -> None:
    await open_accounts()
    editor.remove_user("guest")
    accounts = await open_accounts()
    with pytest.raises(LoginRefused):
        await accounts.authenticate(b"guest", b"guest", loopback=True)


async def test_an_earlier_user_does_not_prevent_guest(open_accounts: Open, editor: AccountEditor) -> None:
    editor.add_user("alice", b"secret")
    accounts = await open_accounts()
    await accounts.authenticate(b"guest", b"guest", loopback=True)
    await alice(accounts)


async def test_starts_at_once_make_one_guest(open_accounts: Open, migrated_postgres_url: str) -> None:
    await asyncio.gather(*(open_accounts() for _ in range(4)))
    assert query(migrated_postgres_url, "SELECT rm, name FROM dtx.account") == [(RM, "guest")]


@pytest.mark.parametrize(
    ("user", "password"),
    [
        (b"alice", b"wrong"),
        (b"alice", b""),
        (b"alice", b"secret\x00"),
        (b"Alice", b"secret"),
        (b"nobody", b"secret"),
        (b"\xff\x00", b"secret"),
        (b"", b""),
    ],
)
async def test_unknown_users_and_wrong_passwords_are_refused_alike(
    open_accounts: Open, editor: AccountEditor, user: bytes, password: bytes
) -> None:
    editor.add_user("alice", b"secret")
    accounts = await open_accounts()
    with pytest.raises(LoginRefused) as caught:
        await accounts.authenticate(user, password, loopback=True)
    assert str(caught.value) == "login refused: unknown user or wrong password"


async def test_a_refused_login_is_logged_without_its_password(
    open_accounts: Open, editor: AccountEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[tuple[str, dict[str, object]]] = []

    class Log:
        def warning(self, event: str, **fields: object) -> None:
            said.append((event, fields))

    editor.add_user("alice", b"secret")
    accounts = await open_accounts()
    monkeypatch.setattr(module, "log", Log())
    with pytest.raises(LoginRefused):
        await alice(accounts, b"wr0ng-w0rd")
    assert said == [("login refused", {"user": b"alice", "peer": "10.0.0.1:5", "reason": "wrong password"})]


async def test_a_changed_password_counts_from_the_next_login(open_accounts: Open, editor: AccountEditor) -> None:
    editor.add_user("alice", b"secret")
    accounts = await open_accounts()
    before = await alice(accounts)
    editor.set_password("alice", b"new")
    with pytest.raises(LoginRefused):
        await alice(accounts)
    await alice(accounts, b"new")
    assert before.exists


@pytest.mark.parametrize("change", ["renewed", "removed"])
async def test_a_password_changed_during_its_login_does_not_count(
    open_accounts: Open, editor: AccountEditor, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """With many logins at once, one may wait for some time before its verification."""
    editor.add_user("alice", b"secret")
    accounts = await open_accounts()
    verify, begun, may_go_on, loop = passwords.Verifier._verify, asyncio.Event(), Event(), asyncio.get_running_loop()

    def slow(self: passwords.Verifier, password: bytes, stored: str | None) -> bool:
        loop.call_soon_threadsafe(begun.set)
        may_go_on.wait(20)
        return verify(self, password, stored)

    monkeypatch.setattr(passwords, "PAUSE", 0.0)
    monkeypatch.setattr(passwords.Verifier, "_verify", slow)
    login = asyncio.create_task(alice(accounts))
    await begun.wait()
    editor.set_password("alice", b"new") if change == "renewed" else editor.remove_user("alice")
    await accounts.refresh()
    may_go_on.set()
    with pytest.raises(LoginRefused):
        await login


async def test_a_thousand_reconnects_cost_few_questions_and_one_verification(
    open_accounts: Open, editor: AccountEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    editor.add_user("alice", b"secret")
    accounts = await open_accounts()
    await alice(accounts)
    reads = 0
    read_once = accounts._read_once

    async def counted() -> Any:
        nonlocal reads
        reads += 1
        return await read_once()

    def never(*_: object) -> bool:
        raise AssertionError("verified again")

    monkeypatch.setattr(accounts, "_read_once", counted)
    monkeypatch.setattr(passwords.Verifier, "_verify", never)
    await asyncio.gather(*(alice(accounts) for _ in range(1000)))
    assert 1 <= reads <= 3


async def test_permissions_are_those_of_the_vhost(open_accounts: Open, editor: AccountEditor) -> None:
    """RabbitMQ: "configure", "write" and "read", each a regular expression, for each virtual host."""
    accounts = await open_accounts()
    editor.add_vhost("shop")
    editor.add_user("alice", b"secret", ["monitoring", "impersonator"])
    editor.grant("alice", "shop", write="^orders$", read=".*")
    user = await alice(accounts)
    assert user.tags == {"monitoring", "impersonator"}
    assert user.vhosts == ("shop",)
    assert (user.may_enter("shop"), user.may_enter("/"), user.may_enter("nowhere")) == (True, False, False)
    assert user.may("shop", Permission.WRITE, b"orders")
    assert not user.may("shop", Permission.WRITE, b"orders.1")
    assert user.may("shop", Permission.READ, b"\xff")
    assert not user.may("shop", Permission.CONFIGURE, b"orders")
    assert not user.may("/", Permission.READ, b"orders")
    assert "secret" not in repr(user) + repr(accounts.users)
    assert "argon2" not in repr(accounts.users)


async def test_permissions_omitted_in_grant_stay(open_accounts: Open, editor: AccountEditor) -> None:
    await open_accounts()
    editor.add_user("alice", b"secret")
    assert editor.grant("alice", "/", write="a") == Patterns("", "a", "")
    assert editor.grant("alice", "/", read="b", write="") == Patterns("", "", "b")
    assert editor.grant("alice", "/") == Patterns("", "", "b")


async def test_open_connections_notice_changes(
    open_accounts: Open, editor: AccountEditor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An Account is not a copy: the changes of operators take effect within WATCH_SECONDS."""
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.01)
    editor.add_user("alice", b"secret")
    editor.grant("alice", "/", write=".*")
    accounts = await open_accounts()
    user = await alice(accounts)
    changed = asyncio.Event()
    accounts.on_change(changed.set)
    watching = asyncio.create_task(accounts.watch())
    try:
        for change, still in (
            (lambda: editor.grant("alice", "/", write="^x$"), (True, True, False)),
            (lambda: editor.revoke("alice", "/"), (True, False, False)),
            (lambda: editor.grant("alice", "/", write=".*"), (True, True, True)),
            (lambda: editor.remove_user("alice"), (False, False, False)),
        ):
            changed.clear()
            change()
            await asyncio.wait_for(changed.wait(), 20)
            assert (user.exists, user.may_enter("/"), user.may("/", Permission.WRITE, b"orders")) == still
        assert not user.tags
        assert not user.vhosts
    finally:
        watching.cancel()


async def test_a_change_by_hand_in_psql_is_noticed_too(
    open_accounts: Open, editor: AccountEditor, migrated_postgres_url: str
) -> None:
    """Triggers count all changes of this resource manager; changes of another one are not read."""
    accounts = await open_accounts()
    editor.add_user("alice", b"secret")
    await accounts.refresh()
    before = accounts.users
    AccountEditor(migrated_postgres_url, "other").add_user("bob", b"secret")
    await accounts.refresh()
    assert accounts.users is before
    with psycopg.connect(migrated_postgres_url) as connection:
        connection.execute("DELETE FROM dtx.account WHERE name = 'alice' AND rm = %s", [RM])
    await accounts.refresh()
    assert list(accounts.users.users) == ["guest"]


async def test_without_the_database_logins_fail_and_permissions_stay(
    open_accounts: Open, own_postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = own_postgres.create_migrated_database()
    accounts = await open_accounts(url)
    guest = await accounts.authenticate(b"guest", b"guest", loopback=True)
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.01)
    said = asyncio.Event()

    class Log:
        def warning(self, *_: object, **__: object) -> None:
            said.set()

    monkeypatch.setattr(module, "log", Log())
    watching = asyncio.create_task(accounts.watch())
    try:
        await asyncio.to_thread(own_postgres.stop)
        await asyncio.wait_for(said.wait(), 30)
        with pytest.raises(LogUnavailable):
            await accounts.authenticate(b"guest", b"guest", loopback=True)
        assert guest.may("/", Permission.WRITE, b"x")
    finally:
        await asyncio.to_thread(own_postgres.start)
        watching.cancel()


async def test_a_connection_that_died_in_the_meantime_is_replaced(
    open_accounts: Open, migrated_postgres_url: str
) -> None:
    accounts = await open_accounts()
    query(
        migrated_postgres_url,
        "SELECT pg_terminate_backend(pid, 20000) FROM pg_stat_activity "
        "WHERE application_name LIKE 'dtx accounts%' AND datname = current_database()",
    )
    await accounts.authenticate(b"guest", b"guest", loopback=True)


async def test_a_login_that_is_given_up_disturbs_no_other(open_accounts: Open) -> None:
    accounts = await open_accounts()
    for _ in range(5):
        logins = [
            asyncio.create_task(accounts.authenticate(b"guest", b"guest", loopback=True, peer=str(number)))
            for number in range(4)
        ]
        await asyncio.sleep(0)
        logins[0].cancel()
        results = await asyncio.gather(*logins, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert all(isinstance(result, Account) for result in results[1:])


async def test_missing_tables_are_reported(postgres_url: str, migrated_postgres_url: str) -> None:
    migrate.downgrade(migrated_postgres_url, "0002")
    for url in (postgres_url, migrated_postgres_url):
        with pytest.raises(LogError, match="run dtx migrate"):
            await Accounts(url, RM).open()
    migrate.upgrade(migrated_postgres_url)
    assert AccountEditor(migrated_postgres_url, RM).provision()


def test_an_unreachable_database_is_one_sentence_without_its_password() -> None:
    with pytest.raises(LogUnavailable) as caught:
        AccountEditor("postgresql://me:s3cret@127.0.0.1:1/nowhere", RM).read()
    assert "s3cret" not in str(caught.value)


def test_an_impossible_change_is_refused_with_a_reason(editor: AccountEditor) -> None:
    editor.add_user("alice", b"secret")
    for call, words in (
        (lambda: editor.add_user("alice", b"x"), "exists already"),
        (lambda: editor.add_user("", b"x"), "must have 1 to 255 bytes"),
        (lambda: editor.add_user("ä" * 128, b"x"), "must have 1 to 255 bytes"),
        (lambda: editor.add_user("\udc00", b"x"), "must be UTF-8"),
        (lambda: editor.add_user("bob", b""), "a password must have 1 to"),
        (lambda: editor.set_password("alice", b"x" * 1025), "a password must have 1 to"),
        (lambda: editor.set_password("bob", b"x"), "there is no user 'bob'"),
        (lambda: editor.remove_user("bob"), "there is no user 'bob'"),
        (lambda: editor.grant("bob", "/", read=""), "there is no user 'bob'"),
        (lambda: editor.grant("alice", "shop", read=""), "there is no virtual host 'shop'"),
        (lambda: editor.grant("alice", "/", read="("), "the pattern '\\(' of --read cannot be used"),
        (lambda: editor.grant("alice", "/", write="a\0"), "NUL"),
        (lambda: editor.revoke("alice", "/"), "has no permissions in virtual host '/'"),
        (lambda: editor.add_vhost("/"), "exists already"),
        (lambda: editor.remove_vhost("shop"), "there is no virtual host 'shop'"),
    ):
        with pytest.raises(EditError, match=words):
            call()
    assert editor.read().users.keys() == {"alice", "guest"}


def test_a_vhost_with_branches_or_queues_is_not_removed(editor: AccountEditor, migrated_postgres_url: str) -> None:
    """Removing a virtual host must never lose a message or a prepared branch."""
    editor.add_vhost("shop")
    editor.add_user("alice", b"secret")
    editor.grant("alice", "shop", read="")
    rows = {
        "branch": """(id, rm, vhost, format_id, gtrid, bqual, state, owner, version, timeout, started_at, one_phase,
            publishes, consumes, bytes) VALUES (gen_random_uuid(), 'rm', 'shop', 1, 'g', '', 'prepared', 'alice', 1, 0,
            now(), false, 1, 0, 1)""",
        "queue": """(id, rm, vhost, name, auto_delete, arguments, delivered)
            VALUES (1, 'rm', 'shop', 'q', false, '', 0)""",
        "exchange": """(rm, vhost, name, type, auto_delete, internal, arguments)
            VALUES ('rm', 'shop', 'x', 'direct', false, false, '')""",
    }
    for table, row in rows.items():
        with psycopg.connect(migrated_postgres_url, autocommit=True) as connection:
            connection.execute(f"INSERT INTO dtx.{table} {row}")
            with pytest.raises(EditError, match="virtual host 'shop' still has"):
                editor.remove_vhost("shop")
            if table == "branch":
                assert editor.remove_user("alice") == 1
            connection.execute(f"DELETE FROM dtx.{table}")
    editor.remove_vhost("shop")
    assert editor.read().vhosts == {"/"}
    assert query(migrated_postgres_url, "SELECT account FROM dtx.permission WHERE vhost = 'shop'") == []
