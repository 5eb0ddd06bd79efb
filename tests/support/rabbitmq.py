"""Private RabbitMQ nodes for tests. They do not use node, files, cookie or epmd of the machine's RabbitMQ."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import pika

from tests.support.network import LOCAL, Place
from tests.support.processes import end, forget_log, free_port, short_directory, show_on_failure, spawn, wait_until
from tests.support.queues import QueueAccess
from tests.support.rabbitmq_install import Kind, chosen, chosen_khepri, find_rabbitmq

START_SECONDS = 180.0
started: set[str] = set()
"""The versions of all nodes that this process has started, for results."""
DEFAULTS = {
    "loopback_users": "none",
    # guest is dtx's own user in most tests: the documentation requires the tag impersonator
    "default_user_tags.administrator": "true",
    "default_user_tags.impersonator": "true",
    "max_message_size": "536870912",  # the maximum of the broker: messages of 200 MB are tested
    "disk_free_limit.absolute": "50MB",
    "log.console": "false",
    "log.file.level": "info",
}


class NodeEnded(RuntimeError):
    """A node ended while it started; the message has its output."""


class RabbitNode(QueueAccess):
    """One broker node. Use as a context manager; its files are removed afterwards.

    Args:
        config: further lines of ``rabbitmq.conf``, e.g. ``{"consumer_timeout": "10000"}``.
        advanced: terms of ``advanced.config``, e.g. ``{kernel, [{net_setuptime, 2}]}``.
        tls: directory with ``server.pem``, ``server.key`` and ``ca.pem``; the node then accepts amqps as well.
        in_memory: whether its files are in memory, if there is room.
        version: the major version; ``None``: that of the option ``--rabbitmq``.
        joins: a running node, whose cluster this one joins.
        plugins: in addition to the management API.
        place: its host; all nodes of a cluster are in the same network.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, str] | None = None,
        advanced: str = "",
        tls: Path | None = None,
        in_memory: bool = False,
        version: str | None = None,
        joins: "RabbitNode | None" = None,
        plugins: Sequence[str] = (),
        place: Place = LOCAL,
    ) -> None:
        self._plugins = ("rabbitmq_management", *plugins)
        self.place = place
        self._joins = joins
        self._cookie: str = secrets.token_hex(20) if joins is None else joins._cookie
        self.version = version or chosen()
        self.name = f"dtx-{secrets.token_hex(4)}"
        self.full_name = f"{self.name}@{'localhost' if place is LOCAL else place.address}"
        """Its name in a cluster."""
        self.port = free_port()
        self.management_port = free_port()
        self.tls_port = free_port() if tls is not None else 0
        self._distribution_port = free_port()
        self._epmd_port: int = free_port() if joins is None else joins._epmd_port
        self._config = {**DEFAULTS, **(config or {})}
        self._advanced = advanced
        self._tls = tls
        self._in_memory = in_memory
        self._stack = contextlib.ExitStack()
        self._directory: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._passwords = {"guest": "guest"}
        self._alarm: Callable[..., None] | None = None
        """Clears the raised alarm."""
        self._paused = False

    def __enter__(self) -> Self:
        self._installation = find_rabbitmq(self.version)
        self._kind = self._installation.kind
        self._directory = self._stack.enter_context(short_directory("mq", in_memory=self._in_memory))
        self._write_files()
        show_on_failure(f"RabbitMQ {self.name}", self.log_path)
        self._stack.callback(forget_log, f"RabbitMQ {self.name}")
        if self._kind is Kind.DOCKER:
            self._create_container()
            self._stack.callback(_docker, "rm", "--force", "--volumes", self.name)
        else:
            epmd = self._start_epmd() if self._joins is None or self._joins.place != self.place else None
            if epmd is not None:
                self._stack.callback(end, epmd)
            self._stack.callback(self._kill)
        try:
            self.start()
            if chosen_khepri() and self.version == "4":
                self.ctl("enable_feature_flag", "--experimental", "khepri_db")
            if self._joins is not None:
                for words in (("stop_app",), ("join_cluster", self._joins.full_name), ("start_app",)):
                    self.ctl(*words)
                wait_until(self._serves, seconds=START_SECONDS, what=f"{self.name} in its cluster")
            started.add(self.api("GET", "/api/overview")["rabbitmq_version"])
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def directory(self) -> Path:
        """The directory of all files of the node."""
        assert self._directory is not None, "use the node as a context manager"
        return self._directory

    @property
    def log_path(self) -> Path:
        """The node's log."""
        return self.directory / "node.log"

    @property
    def management_url(self) -> str:
        """The root URL of the management API."""
        return f"http://{self.place.address}:{self.management_port}"

    def url(self, user: str = "guest", password: str | None = None, vhost: str = "/", *, tls: bool = False) -> str:
        """The URL for *user*; the passwords of users added by ``add_user`` are known."""
        secret = quote(self._passwords.get(user, user) if password is None else password, safe="")
        scheme, port = ("amqps", self.tls_port) if tls else ("amqp", self.port)
        return f"{scheme}://{quote(user, safe='')}:{secret}@{self.place.address}:{port}/{quote(vhost, safe='')}"

    # -- start and stop -----------------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether the process of the node runs."""
        if self._kind is Kind.DOCKER:
            return _docker("inspect", "--format", "{{.State.Running}}", self.name, check=False).strip() == "true"
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process id of the running node."""
        if self._kind is Kind.DOCKER:
            return int(_docker("inspect", "--format", "{{.State.Pid}}", self.name))
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it with its former data, and wait until it serves AMQP and its management API."""
        assert not self.running, "it runs already"
        if self._kind is Kind.DOCKER:
            _docker("start", self.name)
        else:
            self._spawn()
        self._alarm, self._paused = None, False
        try:
            wait_until(self._serves, seconds=START_SECONDS, what=f"the start of {self.name}")
        except NodeEnded:
            # The ports were free when they were chosen; another process may have used one of them meanwhile.
            self._spawn()
            wait_until(self._serves, seconds=START_SECONDS, what=f"the second start of {self.name}")

    def _spawn(self) -> None:
        with (self.directory / "console.log").open("ab") as console:
            self._process = spawn(
                self._command("rabbitmq-server"), output=console.fileno(), env=self._env(), cwd=self.directory
            )

    def _serves(self) -> bool:
        if not self.running:
            said = (self.directory / "console.log").read_text(errors="replace")[-2000:]
            raise NodeEnded(f"the node {self.name} ended while it started:\n{said}")
        try:
            # answers only after the boot: the listeners start last
            self.api("GET", "/api/overview")
            pika.BlockingConnection(pika.URLParameters(self.url())).close()
        except (OSError, RabbitApiError, pika.exceptions.AMQPError):
            return False
        return True

    def stop(self) -> None:
        """Shut it down. Idempotent."""
        if self._kind is Kind.DOCKER:
            _docker("stop", self.name, check=False)
        elif self._process is not None:
            end(self._process)

    def keep_definitions(self) -> None:
        """Write declarations to the disk: an answered declaration may still be only in memory."""
        self.ctl("eval", "mnesia:sync_log().")

    def kill9(self) -> None:
        """Kill it and wait for its end."""
        if self._kind is Kind.DOCKER:
            _docker("kill", self.name)
        else:
            assert self._process is not None
            self._process.kill()
            self._process.wait(30)

    def _kill(self) -> None:
        if self._process is not None:
            end(self._process, signal.SIGKILL)

    def restart(self) -> None:
        """``kill9`` and ``start``."""
        self.kill9()
        self.start()

    def pause(self) -> None:
        """Stop its process (SIGSTOP): connections stay open, but nothing answers."""
        self._paused = True
        if self._kind is Kind.DOCKER:
            _docker("pause", self.name)
        else:
            assert self._process is not None
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue a paused process."""
        self._paused = False
        if self._kind is Kind.DOCKER:
            _docker("unpause", self.name)
        else:
            assert self._process is not None
            self._process.send_signal(signal.SIGCONT)

    def mend(self) -> None:
        """Repair the node after an earlier test: resume it, start it, clear an alarm."""
        if self._paused and self.running:
            self.resume()
        if not self.running:
            self.start()
        if self._alarm is not None:
            self._alarm(on=False)

    # -- administration -----------------------------------------------------------------------------------------------

    def ctl(self, *words: str) -> str:
        """Run ``rabbitmqctl`` (takes a second or more: prefer the API)."""
        if self._kind is Kind.DOCKER:
            return _docker("exec", self.name, "rabbitmqctl", "--node", self.full_name, *words)
        return subprocess.run(
            self._command("rabbitmqctl", "--quiet", *words),
            env=self._env(),
            cwd=self.directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout

    def api(self, method: str, path: str, body: object = None, *, timeout: float = 20.0) -> Any:
        """Call the management API as guest, and wait *timeout* seconds at most; return the decoded answer.

        Raises:
            RabbitApiError: the API refused the request.
        """
        request = urllib.request.Request(
            self.management_url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={
                "Authorization": "Basic " + b64encode(b"guest:guest").decode(),
                "Content-Type": "application/json",
            },
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            with error:
                raise RabbitApiError(f"{method} {path}: {error.code} {error.read().decode(errors='replace')}") from None
        return json.loads(text) if text else None

    def add_vhost(self, name: str | None = None) -> str:
        """Make a virtual host that guest may use; returns its name."""
        name = name or f"t-{secrets.token_hex(5)}"
        self.api("PUT", f"/api/vhosts/{quote(name, safe='')}", {})
        self.set_permissions("guest", vhost=name)
        return name

    def delete_vhost(self, name: str) -> None:
        """Remove it with everything in it."""
        self.api("DELETE", f"/api/vhosts/{quote(name, safe='')}")

    def add_user(
        self,
        name: str,
        password: str | None = None,
        *,
        tags: str = "",
        vhost: str = "/",
        configure: str = ".*",
        write: str = ".*",
        read: str = ".*",
    ) -> str:
        """Make a user with permissions on *vhost*; returns its URL there. The password is the name unless given."""
        self._passwords[name] = name if password is None else password
        body = {"password": self._passwords[name], "tags": tags}
        self.api("PUT", f"/api/users/{quote(name, safe='')}", body)
        self.set_permissions(name, vhost=vhost, configure=configure, write=write, read=read)
        return self.url(name, vhost=vhost)

    def delete_user(self, name: str) -> None:
        """Remove a user."""
        self.api("DELETE", f"/api/users/{quote(name, safe='')}")
        self._passwords.pop(name, None)

    def set_permissions(
        self, user: str, *, vhost: str = "/", configure: str = ".*", write: str = ".*", read: str = ".*"
    ) -> None:
        """Set the permissions of *user* in *vhost*."""
        path = f"/api/permissions/{quote(vhost, safe='')}/{quote(user, safe='')}"
        self.api("PUT", path, {"configure": configure, "write": write, "read": read})

    def set_topic_permissions(
        self, user: str, exchange: str, *, vhost: str = "/", write: str = ".*", read: str = ".*"
    ) -> None:
        """Set the routing keys that *user* may publish to and bind on a topic exchange."""
        path = f"/api/topic-permissions/{quote(vhost, safe='')}/{quote(user, safe='')}"
        self.api("PUT", path, {"exchange": exchange, "write": write, "read": read})

    def set_policy(
        self,
        name: str,
        pattern: str,
        definition: Mapping[str, Any],
        *,
        vhost: str = "/",
        apply_to: str = "queues",
        priority: int = 0,
    ) -> None:
        """Set a policy, e.g. ``set_policy("ttl", ".*", {"message-ttl": 1000})``."""
        path = f"/api/policies/{quote(vhost, safe='')}/{quote(name, safe='')}"
        body = {"pattern": pattern, "definition": dict(definition), "apply-to": apply_to, "priority": priority}
        self.api("PUT", path, body)

    def delete_policy(self, name: str, *, vhost: str = "/") -> None:
        """Remove a policy."""
        self.api("DELETE", f"/api/policies/{quote(vhost, safe='')}/{quote(name, safe='')}")

    def memory_alarm(self, *, on: bool) -> None:
        """Raise or clear the memory alarm, and wait for it. A raised alarm blocks publishers."""
        self._alarm = self.memory_alarm if on else None
        self.ctl("set_vm_memory_high_watermark", "absolute", "1MB" if on else "64GB")
        wait_until(lambda: self._alarmed() is on, what=f"the memory alarm going {'on' if on else 'off'}")

    def disk_alarm(self, *, on: bool) -> None:
        """Raise or clear the disk alarm: the required free space becomes larger than any disk."""
        self._alarm = self.disk_alarm if on else None
        self.ctl("set_disk_free_limit", "1000000GB" if on else DEFAULTS["disk_free_limit.absolute"])
        wait_until(lambda: self._alarmed() is on, what=f"the disk alarm going {'on' if on else 'off'}")

    def _alarmed(self) -> bool:
        try:
            self.api("GET", "/api/health/checks/local-alarms")
        except RabbitApiError:
            return True
        return False

    def delete_queue(self, queue: str, *, vhost: str = "/") -> None:
        """Delete a queue, also an exclusive one of another connection."""
        found = f'rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost}">>, queue, <<"{queue}">>))'
        self.ctl("eval", f'{{ok, Q}} = {found}, {{ok, _}} = rabbit_amqqueue:delete(Q, false, false, <<"test">>).')

    @contextlib.contextmanager
    def suspended(self, *queues: str, vhost: str = "/") -> Iterator[None]:
        """Suspend the processes of *queues*, which then do not answer, like a queue without a leader."""
        self._each_queue("sys:suspend", queues, vhost)
        try:
            yield
        finally:
            self._each_queue("sys:resume", queues, vhost)

    def _each_queue(self, call: str, queues: Sequence[str], vhost: str) -> None:
        names = ", ".join(f'<<"{queue}">>' for queue in queues)
        found = f'rabbit_amqqueue:lookup(rabbit_misc:r(<<"{vhost}">>, queue, Name))'
        self.ctl("eval", f"[begin {{ok, Q}} = {found}, ok = {call}(amqqueue:get_pid(Q)) end || Name <- [{names}]].")

    # -- messages -----------------------------------------------------------------------------------------------------

    # -- files and processes ------------------------------------------------------------------------------------------

    def _command(self, program: str, *words: str) -> Sequence[str | Path]:
        return self.place.command(self._installation.command(self.directory, program, *words))

    def _write_files(self) -> None:
        lines = {
            "listeners.tcp.1": f"{self.place.address}:{self.port}",
            "management.tcp.ip": self.place.address,
            "management.tcp.port": str(self.management_port),
            **self._config,
        }
        if self._tls is not None:
            shutil.copytree(self._tls, self.directory / "tls")  # a node in another system can see this directory
            lines |= {
                "listeners.ssl.1": f"{self.place.address}:{self.tls_port}",
                "ssl_options.cacertfile": str(self.directory / "tls/ca.pem"),
                "ssl_options.certfile": str(self.directory / "tls/server.pem"),
                "ssl_options.keyfile": str(self.directory / "tls/server.key"),
                "ssl_options.verify": "verify_none",
            }
        for name, text in {
            "rabbitmq.conf": "".join(f"{key} = {value}\n" for key, value in lines.items()),
            "enabled_plugins": f"[{','.join(self._plugins)}].\n",
            "rabbitmq-env.conf": "",  # replaces the file of the machine
            "advanced.config": f"[{self._advanced}].\n",
        }.items():
            (self.directory / name).write_text(text)
        (self.directory / "mnesia").mkdir()
        (self.directory / "home").mkdir()
        cookie = self.directory / "home/.erlang.cookie"
        cookie.write_text(self._cookie)
        cookie.chmod(0o400)

    def _env(self) -> dict[str, str]:
        directory = self.directory
        ours = {
            "HOME": str(directory / "home"),  # contains the Erlang cookie
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_EPMD_ADDRESS": self.place.address,
            "RABBITMQ_NODENAME": self.full_name,
            "RABBITMQ_USE_LONGNAME": "false" if self.place is LOCAL else "true",
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONFIG_FILE": str(directory / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(directory / "conf.d"),
            "RABBITMQ_ADVANCED_CONFIG_FILE": str(directory / "advanced.config"),
            "RABBITMQ_CONF_ENV_FILE": str(directory / "rabbitmq-env.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(directory),
            "RABBITMQ_LOGS": str(self.log_path),
            "RABBITMQ_PID_FILE": str(directory / "node.pid"),
            "RABBITMQ_GENERATED_CONFIG_DIR": str(directory / "generated"),
            "RABBITMQ_FEATURE_FLAGS_FILE": str(directory / "feature_flags"),
            # the script then becomes the node instead of supervising it, so their pids are the same
            "RUNNING_UNDER_SYSTEMD": "true",
            "LANG": "C.UTF-8",
        }
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RABBITMQ_", "ERL_"))}
        kept.pop("NOTIFY_SOCKET", None)
        return kept | ours

    def _start_epmd(self) -> subprocess.Popen[bytes] | None:
        """Start Erlang's port mapper as a child; Erlang itself would start a daemon that outlives the tests."""
        epmd = self._installation.epmd()
        if epmd is None:
            self._stack.callback(self.ctl, "eval", "erl_epmd:names().")
            return None
        command = self._command(str(epmd), "-port", str(self._epmd_port), "-address", self.place.address)
        with (self.directory / "epmd.log").open("ab") as log:
            return spawn(command, output=log.fileno(), env=self._env())

    def _create_container(self) -> None:
        """Create a container, whose file system survives restarts."""
        for path in self.directory.iterdir():
            path.chmod(0o755 if path.is_dir() else 0o644)
        settings = {
            "ERL_EPMD_PORT": str(self._epmd_port),
            "RABBITMQ_NODENAME": self.full_name,
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_CONFIG_FILE": "/dtx/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": "/dtx/enabled_plugins",
        }
        words = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
        mount = f"{self.directory}:/dtx"
        _docker(
            "create",
            "--name",
            self.name,
            "--network",
            "host",
            "--volume",
            mount,
            *words,
            str(self._installation.programs),
        )


class RabbitApiError(Exception):
    """The management API refused a request."""


def _docker(*words: str, check: bool = True) -> str:
    return subprocess.run(
        ["docker", *words], capture_output=True, text=True, check=check, stdin=subprocess.DEVNULL, timeout=300
    ).stdout
