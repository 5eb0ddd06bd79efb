"""Clients of AMQP 1.0 as operators see them, and branches of other users."""

from dtx.wire.amqp10.endpoint import Closed
from dtx.wire.amqp10.performatives import Declare
from tests.servers.amqp10.raw import Raw
from tests.support.client import connected, new_xid
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.processes import wait_until
from tests.support.service import ADMIN, DtxService
from tests.support.users import StandaloneUsers


def test_operators_see_and_close_a_connection_with_transactions(postgres: PostgresServer) -> None:
    database, xid = postgres.create_database(), new_xid()
    with DtxService(database=database, options=ADMIN) as service:
        StandaloneUsers(service).add("root", "administrator")
        operator = Operator(service.admin_url, "root", "root")
        with Raw(service) as raw:
            session = raw.opened().begin()
            control = raw.control(session)
            raw.declare(session, control, xid.to_wire())
            raw.declare(session, control)
            (shown,) = operator.ask("GET", "/dtx/v1/connections").body["connections"]
            assert (shown["protocol"], shown["user"], shown["vhost"]) == ("AMQP 1.0", "guest", "/")
            assert (shown["associated"], shown["state"]) == (2, "running")
            found = operator.ask("GET", f"/dtx/v1/connections/{shown['id']}").body["channels"][0]["branches"]
            assert str(xid) in {branch["xid"] for branch in found}
            answer = operator.ask("POST", f"/dtx/v1/connections/{shown['id']}/close", {"reason": "test"})
            assert answer.status == 202
            raw.until(lambda: any(isinstance(event, Closed) for event in raw.events))
        wait_until(lambda: operator.ask("GET", "/dtx/v1/connections").body["connections"] == [])
    postgres.drop_database(database)


def test_the_branch_of_another_user_is_not_joined(postgres: PostgresServer) -> None:
    database, xid = postgres.create_database(), new_xid()
    with DtxService(database=database) as service, connected(service.url()):
        users = StandaloneUsers(service)
        users.add("alice")
        users.permit("alice")
        with Raw(service) as mine, Raw(service, user="alice", password="alice") as theirs:
            session = mine.opened().begin()
            mine.declare(session, mine.control(session), xid.to_wire())
            far = theirs.opened().begin()
            outcome = theirs.ask(far, theirs.control(far), Declare(global_id=xid.to_wire()))
            assert "unauthorized-access" in str(outcome)
    postgres.drop_database(database)
