"""The servers of a soak: dtx, its database, two banks, a broker or none, and proxies between all of them.

A process that has ended is started again, as by a supervisor: the nemesis only has to kill it. The servers come from
``tests.support``; each PostgreSQL, the broker and dtx are behind separate proxies.
"""

import contextlib
import dataclasses
import itertools
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self
from unittest import mock

import psycopg
from psycopg.conninfo import conninfo_to_dict

from dtx.embedded import cluster, postgres
from tests.evidence.soak.clients import Config
from tests.evidence.soak.clock import Clock
from tests.evidence.soak.disk import SmallDisk
from tests.evidence.soak.ledger import Ledger
from tests.evidence.soak.money import ACCOUNTS, BANKS, OPENING_BALANCE
from tests.support.broker import Mode
from tests.support.postgres import PostgresServer
from tests.support.processes import end, short_directory, spawn, wait_until
from tests.support.proxy import Balancer, Proxy
from tests.support.rabbitmq import RabbitNode
from tests.support.rabbitmq_cluster import Cluster
from tests.support.service import DtxService

PROCESSES: Final = 6
TELLERS: Final = 5
"""In each process: 30 clients in all."""
_SCHEMA: Final = """
CREATE TABLE account (name text PRIMARY KEY, balance bigint NOT NULL CHECK (balance >= 0));
CREATE TABLE entry (gtrid text PRIMARY KEY, delta bigint NOT NULL);
"""
ORDERLY_EXITS: Final = frozenset({0, 3, 4, 5, 128 + signal.SIGTERM, -signal.SIGKILL, -signal.SIGTERM})
"""Allowed exit statuses: stop; loss of database, broker or lease; SIGTERM during another stop; SIGKILL; SIGTERM before
dtx has a handler.
"""


class ClientProcess:
    """One slot of clients with their transaction manager, in one process after another.

    Args:
        config: without the process's own life and seed.
        log: a file for its output.
    """

    def __init__(self, config: Config, log: Path) -> None:
        self._config = config
        self._log = log
        self._lives = itertools.count(1)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, life: str) -> None:
        """Start the next process."""
        config = dataclasses.replace(
            self._config, life=f"{life}.{next(self._lives)}", seed=self._config.seed + next(self._lives)
        )
        with self._log.open("ab") as log:
            self._process = spawn(
                [sys.executable, "-m", "tests.evidence.soak.clients", config.to_json()],
                output=log.fileno(),
                cwd=Path(__file__).parents[3],
            )

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it has been started."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill9(self) -> None:
        """Kill it, and wait for its end."""
        if self._process is not None:
            end(self._process, signal.SIGKILL)

    def stop(self, seconds: float) -> int:
        """Let it finish active transfers for at most *seconds*; return its exit status."""
        return 0 if self._process is None else end(self._process, signal.SIGTERM, seconds)


class World:
    """All servers and clients. Use as a context manager.

    Args:
        mode: alongside or standalone.
        seed: of the clients' random choices.
        processes: number of processes of clients.
        members: number of dtx.
    """

    def __init__(self, mode: Mode, seed: int, processes: int = PROCESSES, members: int = 1) -> None:
        self.mode = mode
        self._seed = seed
        self._stack = contextlib.ExitStack()
        self.exits: Counter[int] = Counter()
        """Number of ends of dtx by exit status."""
        self._clients_lock = threading.RLock()
        self._wanted = threading.Event()
        """Set while clients should run."""
        self._closing = threading.Event()
        self._life = ""
        self._processes = processes
        self._members = members
        self.node: RabbitNode | Cluster | None = None
        self._broker: str | None = None

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # -- setting up

    def _set_up(self) -> None:
        self.directory = self._stack.enter_context(short_directory("soak"))
        self.clocks = {name: Clock(self.directory / f"{name}.clock") for name in ("dtx", "log")}
        place = self.directory / "disk"
        place.mkdir(mode=0o711)
        self.disk = self._stack.enter_context(SmallDisk(place))
        self.servers = {"log": self._start_log_server(place)}
        self.servers |= {name: self._start_bank(name) for name in BANKS}
        self.links: dict[str, Proxy] = {}
        if self.mode == "alongside":
            self._start_broker()
        for name, server in self.servers.items():
            self.links[name] = self._stack.enter_context(Proxy(*_address(server.url)))
        self.database = self.servers["log"].create_migrated_database()
        self.services = [self._stack.enter_context(self._make_service()) for _ in range(self._members)]
        self.service = self.services[0]
        self._service_locks = {service: threading.Lock() for service in self.services}
        ports = [service.port for service in self.services]
        self.links["clients"] = self._stack.enter_context(Balancer(*ports))
        self.banks = {name: self._make_bank(name) for name in BANKS}
        self.ledger = Ledger(self.directory / "ledger", make=True)
        self._stack.callback(self.ledger.close)
        self.clients = [self._make_client(number) for number in range(self._processes)]
        self._stack.callback(self._end_clients)
        threads = [threading.Thread(target=watch) for watch in (self._watch_dtx, self._watch_clients)]
        for thread in threads:
            thread.start()
            self._stack.callback(thread.join)
        self._stack.callback(self._closing.set)

    def _start_broker(self) -> None:
        """Start the broker, and a proxy between dtx and it."""
        self.node = node = self._stack.enter_context(RabbitNode())
        self.links["broker"] = link = self._stack.enter_context(Proxy("127.0.0.1", node.port))
        self._broker = f"amqp://guest:guest@127.0.0.1:{link.port}/"

    def _start_log_server(self, place: Path) -> PostgresServer:
        """Start the server of dtx's log on the small disk, with the skewed clock."""
        server = PostgresServer("log", place=place)
        words = [f"{name}={value}" for name, value in self.clocks["log"].environment.items()]

        def launch(command: list[str], *, data_dir: Path, **arguments: Any) -> subprocess.Popen[bytes]:
            # PostgreSQL does not inherit the environment; only this server has a wrong clock
            prefix = ["/usr/bin/env", *words] if data_dir.is_relative_to(place) else []
            return cluster.launch([*prefix, *command], data_dir=data_dir, **arguments)

        self._stack.enter_context(mock.patch.object(postgres, "launch", launch))
        self._stack.enter_context(server)
        server.configure(max_wal_size="96MB", min_wal_size="64MB")
        return server

    def _start_bank(self, name: str) -> PostgresServer:
        server = self._stack.enter_context(PostgresServer(name))
        server.configure(max_prepared_transactions=200, max_connections=200)
        return server

    def _make_service(self) -> DtxService:
        options = ["--lease-ttl", "2", "--default-timeout", "8"]
        if self.node is not None:
            options += ["--management", self.node.management_url]
        database = self._through("log", self.database)
        environment = self.clocks["dtx"].environment
        return DtxService(broker=self._broker, database=database, options=tuple(options), env=environment)

    def _through(self, link: str, url: str) -> str:
        """Return the URL of a database through a proxy."""
        parts = conninfo_to_dict(url)
        place = f"127.0.0.1:{self.links[link].port}/{parts['dbname']}"
        return f"postgresql://{parts['user']}:{parts['password']}@{place}?sslmode=disable&gssencmode=disable"

    def _make_bank(self, name: str) -> str:
        url = self.servers[name].create_database()
        with psycopg.connect(url) as connection:
            connection.execute(_SCHEMA)
            for number in range(ACCOUNTS):
                connection.execute("INSERT INTO account VALUES (%s, %s)", [f"account{number}", OPENING_BALANCE])
        return url

    def _make_client(self, number: int) -> ClientProcess:
        config = Config(
            slot=f"s{number}.",
            life="",
            dtx=f"amqp://guest:guest@127.0.0.1:{self.links['clients'].port}/%2F",
            banks={name: self._through(name, url) for name, url in self.banks.items()},
            ledger=str(self.directory / "ledger"),
            threads=TELLERS,
            apart=self._members > 1,
            seed=self._seed * 100 + number,
        )
        return ClientProcess(config, self.directory / f"client{number}.log")

    # -- life

    def begin(self, life: str) -> None:
        """Start the clients of a round."""
        self._life = life
        self._wanted.set()

    def stop_clients(self, seconds: float) -> None:
        """End the round: clients finish their active transfers, or are killed after *seconds*."""
        with self._clients_lock:
            self._wanted.clear()
        stoppers = [threading.Thread(target=client.stop, args=(seconds,)) for client in self.clients]
        for stopper in stoppers:
            stopper.start()
        for stopper in stoppers:
            stopper.join()

    def heal(self) -> None:
        """End all faults, and return when everything runs."""
        for link in self.links.values():
            link.resume()
        for clock in self.clocks.values():
            clock.skew(0)
        self.disk.free()
        for server in self.servers.values():
            server.wait_ready(seconds=180)
        if self.node is not None:
            self.node.mend()
        wait_until(self.dtx_answers, seconds=240, what="the restart of dtx")

    def dtx_answers(self) -> bool:
        """Whether every dtx is ready for clients."""
        return all(service.running and service.ready_line for service in self.services)

    @contextlib.contextmanager
    def hold(self, service: DtxService) -> Iterator[DtxService]:
        """Do not start this dtx again before the end of the block."""
        with self._service_locks[service]:
            yield service

    def kill_dtx(self) -> None:
        """Kill dtx; it is started again."""
        with self.hold(self.service):
            if self.service.running:
                self.service.kill9()

    def stop_dtx(self) -> None:
        """Stop dtx with SIGTERM; it is started again."""
        with self.hold(self.service):
            self.stop(self.service)

    def stop(self, service: DtxService) -> None:
        """Stop a dtx that is held with SIGTERM."""
        if service.running:
            service.signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(60)

    def restart(self, service: DtxService) -> None:
        """Start a dtx that is held, if it has ended."""
        if not service.running and not self._closing.is_set():
            self.exits[service.wait()] += 1
            service.ready_line = ""
            service.start(wait=False)

    def branches(self) -> int:
        """Return the number of branches in the log; -1 if the database does not answer."""
        try:
            with psycopg.connect(self.database, connect_timeout=2) as connection:
                row = connection.execute("SELECT count(*) FROM dtx.branch").fetchone()
        except psycopg.Error:
            return -1
        return -1 if row is None else int(row[0])

    def _watch_dtx(self) -> None:
        """Start each dtx whenever it does not run."""
        while not self._closing.wait(0.05):
            for service, lock in self._service_locks.items():
                if lock.acquire(blocking=False):
                    try:
                        self.restart(service)
                    finally:
                        lock.release()

    def _watch_clients(self) -> None:
        while not self._closing.wait(0.05):
            for client in self.clients:
                with self._clients_lock:
                    if self._wanted.is_set() and not client.running:
                        client.start(self._life)

    def _end_clients(self) -> None:
        for client in self.clients:
            client.kill9()

    def left_out(self) -> Iterator[str]:
        """Yield the faults that are not possible on this machine."""
        if not self.disk.real:
            yield "the disk of PostgreSQL is never full in the soak: only root can make a small file system"
        if self.clocks["dtx"].library is None:
            yield "no clock is wrong in the soak: install libfaketime"

    def doubts(self) -> list[str]:
        """Return log lines about units whose outcome dtx could not determine, of all rounds."""
        said = [service.log_path.read_text(errors="replace").splitlines() for service in self.services]
        return [line for lines in said for line in lines if "cannot be found out" in line]

    def trouble(self) -> Iterator[str]:
        """Yield unexpected exit statuses, and tracebacks of clients."""
        for status, count in self.exits.items():
            if status not in ORDERLY_EXITS:
                yield f"dtx ended {count} times with status {status}"
        for number in range(self._processes):
            said = (self.directory / f"client{number}.log").read_text(errors="replace")
            if "Traceback" in said:
                yield f"client {number}: {said[-1500:]}"


def _address(url: str) -> tuple[str, int]:
    """Return the directory of the socket of a server of ``tests.support``, and the port."""
    parts = conninfo_to_dict(url)
    return str(parts["host"]), int(str(parts["port"]))
