"""AMQP 0-9-1 conversations that are the same with RabbitMQ and both modes of dtx; see tests.support.conversation.

With dtx each runs three times: in whole writes, byte by byte, and with every frame split in two.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.broker import Mode
from tests.support.conversation import Conversation, Script, Split, at_once, byte_by_byte, inside_frames, read
from tests.support.rabbitmq import RabbitNode
from tests.support.raw import RawClient
from tests.support.service import DtxService

FOLDER = Path(__file__).parent / "conversations"
SCRIPTS = {path.stem: read(path.read_text()) for path in sorted(FOLDER.glob("*.txt"))}
SPLITS = (at_once, byte_by_byte, inside_frames)


def hold(url: str, script: Script, split: Split) -> None:
    with RawClient(url) as peer:
        peer.log_in()
        peer.open(*script.channels)
        Conversation(peer, split).hold(script.lines)


def those_at(server: str) -> list[str]:
    return [name for name, script in SCRIPTS.items() if server in script.servers]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", those_at("standalone"))
def test_dtx_without_a_broker_holds_it_so(standalone_service: DtxService, name: str, split: Split) -> None:
    hold(standalone_service.url(), SCRIPTS[name], split)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", those_at("alongside"))
def test_dtx_beside_a_broker_holds_it_so(services: Callable[[Mode], DtxService], name: str, split: Split) -> None:
    hold(services("alongside").url(), SCRIPTS[name], split)


@pytest.mark.parametrize("name", [name for name in those_at("rabbitmq") if not SCRIPTS[name].is_about_xa])
def test_rabbitmq_holds_it_so(shared_rabbitmq: RabbitNode, name: str) -> None:
    hold(shared_rabbitmq.url(), SCRIPTS[name], at_once)
