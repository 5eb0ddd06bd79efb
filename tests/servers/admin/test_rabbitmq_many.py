"""Many queues do not hold the event loop: RabbitMQ's management API imports, lists and exports them in slices."""

from typing import Final

from tests.servers.admin.web.test_login import ask, mark_of, sign_in
from tests.support.loop_watch import WatchedService, not_held
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.service import ADMIN

MANY: Final = 30_000
QUEUES: Final = [{"name": f"queue-{number:05}", "vhost": "/", "durable": True} for number in range(MANY)]
LAST: Final = f"queue-{MANY - 1:05}"


def test_many_queues_do_not_hold_the_event_loop(postgres: PostgresServer) -> None:
    database = postgres.create_database()
    with WatchedService(database=database, options=ADMIN) as dtx:
        boss = Operator(dtx.admin_url)
        with not_held(dtx):
            assert boss.ask("POST", "/api/definitions", {"queues": QUEUES}).status == 204
        with not_held(dtx):
            page = boss.get("/api/queues", page=300, page_size=100, sort="name", columns="name")
            assert page["items"][-1]["name"] == LAST
            assert len(boss.get("/api/queues", sort="messages", sort_reverse="true")) == MANY
            assert boss.get("/api/overview")["object_totals"]["queues"] == MANY
            assert len(boss.get("/api/bindings/%2F")) == MANY
            assert boss.get("/api/consumers") == []
            assert len(boss.get("/api/definitions")["queues"]) == MANY
            assert boss.get("/api/vhosts")[0]["messages"] == 0
        cookie = sign_in(dtx.admin_url, "guest", "guest")
        with not_held(dtx):
            for page, shown in (
                ("queues?page=600&sort=messages_ready", LAST),
                ("queues?name=29999", "1 queue of 30"),
                ("exchange?name=amq.default", "30\u202f000 bindings"),
                ("bindings?sort=destination&sort_reverse=yes", LAST),
                ("consumers", "No consumers"),
            ):
                assert shown in ask(dtx.admin_url, f"/console/{page}", Cookie=cookie).text, page
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
        properties = {"headers": arguments}
        for _ in range(50):
            message = {"routing_key": "q1", "payload": "x", "payload_encoding": "string", "properties": properties}
            assert boss.ask("POST", "/api/exchanges/%2F/amq.default/publish", message).body == {"routed": True}
        cookie = sign_in(dtx.admin_url, "guest", "guest")
        mark = mark_of(ask(dtx.admin_url, "/console/", Cookie=cookie).text)
        with not_held(dtx):
            for page in ("queues", "queue?name=q1", "exchange?name=amq.default"):
                assert "q1" in ask(dtx.admin_url, f"/console/{page}", Cookie=cookie).text
            page = "/console/queue/messages?vhost=%2F&name=q1"
            assert "Message 50" in ask(dtx.admin_url, page, {"mark": mark, "count": "50"}, Cookie=cookie).text
    postgres.drop_database(database)
