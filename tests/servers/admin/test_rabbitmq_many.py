"""Many queues do not hold the event loop: RabbitMQ's management API imports, lists and exports them in slices."""

from typing import Final

from tests.support.loop_watch import WatchedService, not_held
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN

MANY: Final = 30_000
QUEUES: Final = [{"name": f"queue-{number:05}", "vhost": "/", "durable": True} for number in range(MANY)]


def test_many_queues_do_not_hold_the_event_loop(postgres: PostgresServer) -> None:
    database = postgres.create_database()
    with WatchedService(database=database, options=ADMIN) as dtx:
        boss = Operator(dtx.admin_url)
        with not_held(dtx):
            assert boss.ask("POST", "/api/definitions", {"queues": QUEUES}).status == 204
        with not_held(dtx):
            page = boss.get("/api/queues", page=300, page_size=100, sort="name", columns="name")
            assert page["items"][-1]["name"] == QUEUES[-1]["name"]
            assert len(boss.get("/api/queues", sort="messages", sort_reverse="true")) == MANY
            assert boss.get("/api/overview")["object_totals"]["queues"] == MANY
            assert len(boss.get("/api/bindings/%2F")) == MANY
            assert boss.get("/api/consumers") == []
            assert len(boss.get("/api/definitions")["queues"]) == MANY
            assert boss.get("/api/vhosts")[0]["messages"] == 0
    postgres.drop_database(database)


def test_large_arguments_do_not_hold_the_event_loop(postgres: PostgresServer) -> None:
    arguments = {str(number): 1 for number in range(4000)}
    queues = [{"name": f"q{number}", "vhost": "/", "arguments": arguments} for number in range(80)]
    database = postgres.create_database()
    with WatchedService(database=database, options=ADMIN) as dtx:
        boss = Operator(dtx.admin_url)
        with not_held(dtx):
            assert boss.ask("POST", "/api/definitions", {"queues": queues}).status == 204
        with not_held(dtx):
            body = {"arguments": {"many": [{"a": 1}] * 80_000}}
            assert boss.ask("PUT", "/api/queues/%2F/more", body).status == 400
        assert boss.get("/api/overview")["object_totals"]["queues"] == 80
    postgres.drop_database(database)
