"""RabbitMQ's ``rabbitmqadmin`` in use with a dtx without a broker, and its transcript in the documentation."""

import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.crash import StandaloneStage
from tests.support.operator import Operator
from tests.support.postgres import PostgresServer
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmqadmin import Admin
from tests.support.results import commit
from tests.support.service import ADMIN

_FILE = "definitions.json"
_STEPS = (
    """declare queue name=orders durable=true 'arguments={"x-max-length": 1000}'""",
    "declare queue name=payments queue_type=quorum",
    "declare exchange name=events type=topic",
    "declare binding source=events destination=orders routing_key=order.#",
    """publish exchange=events routing_key=order.new payload=hello 'properties={"delivery_mode": 2}'""",
    "list queues name type durable messages",
    "get queue=orders ackmode=ack_requeue_false",
    "get queue=orders",
    "show overview product_name product_version rabbitmq_version cluster_name",
    f"export {_FILE}",
    "delete queue name=orders",
    "delete exchange name=events",
    "list bindings source destination routing_key",
    f"import {_FILE}",
    "list bindings source destination routing_key",
)
_REFUSED = (
    """declare policy name=short pattern=.* 'definition={"max-length": 10}'""",
    "delete queue name=nothing",
)
_PAGE = """# rabbitmqadmin

`make evidence PARTS=walkthrough` wrote this transcript on {date} at commit {commit}. The program is
`rabbitmqadmin` of RabbitMQ {version}. Its options for host, port, user and password are left out.
[Tools of RabbitMQ](../how-to/rabbitmq-tools.md) has the differences.

```text
{transcript}
```
"""


def test_the_transcript_of_rabbitmqadmin_is_written(
    postgres: PostgresServer,
    shared_rabbitmq: RabbitNode,
    pytestconfig: pytest.Config,
    tmp_path: Path,
    figures: Callable[..., None],
) -> None:
    lines: list[str] = []
    with StandaloneStage(postgres, options=ADMIN) as stage:
        admin = Admin(shared_rabbitmq, Operator(stage.service.admin_url))
        for step in (*_STEPS, *_REFUSED):
            words = [str(tmp_path / _FILE) if word == _FILE else word for word in shlex.split(step)]
            done = admin.run(*words)
            assert (done.returncode == 0) == (step in _STEPS), done
            said = (done.stdout + done.stderr).replace(f"{tmp_path}/", "").strip()
            lines += [f"$ rabbitmqadmin {step}", *filter(None, [said])]
    transcript = "\n".join(lines)
    assert transcript.count("| events | orders      | order.#     |") == 1
    assert "*** dtx has no policies: give each queue and exchange its arguments" in transcript
    results: Path = pytestconfig.rootpath / pytestconfig.getoption("--results")
    page = _PAGE.format(
        date=datetime.now(UTC).date(),
        commit=commit(pytestconfig.rootpath, results),
        version=shared_rabbitmq.api("GET", "/api/overview")["rabbitmq_version"],
        transcript=transcript,
    )
    (results / "rabbitmqadmin.md").write_text(page)
    figures(commands_of_rabbitmqadmin=len(_STEPS) + len(_REFUSED))
