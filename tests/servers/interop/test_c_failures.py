"""No failure of the switch looks like success: 0 is XA_OK, and also what C gets if Python cannot run.

Every entry point is tested with each kind of failure, in a real process.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from dtx.client import Xid
from tests.servers.interop.c.programs import (
    NO_FLAGS,
    RM,
    ROOT,
    SCAN,
    SUCCESS,
    XA_OK,
    XAER_INVAL,
    XAER_PROTO,
    XAER_RMERR,
    XAER_RMFAIL,
    Driver,
    built,
)
from tests.support.processes import short_directory
from tests.support.service import DtxService

XID: Final = Xid(1, b"g", b"b")
NOWHERE: Final = "url=amqp://guest:guest@127.0.0.1:1/"
ENTRIES: Final[dict[str, tuple[object, ...]]] = {
    "open": (RM, NO_FLAGS, NOWHERE),
    "close": (RM, NO_FLAGS),
    "start": (XID, RM, NO_FLAGS),
    "end": (XID, RM, SUCCESS),
    "rollback": (XID, RM, NO_FLAGS),
    "prepare": (XID, RM, NO_FLAGS),
    "commit": (XID, RM, NO_FLAGS),
    "recover": (10, RM, SCAN),
    "forget": (XID, RM, NO_FLAGS),
    "complete": (RM, NO_FLAGS),
    "publish": ("-", "queue", "body"),
    "get": ("queue", 10),
    "header": (1, "colour", 10),
    "ack": (1,),
    "reject": (1, 1),
    "use": (RM,),
}
"""Every entry point that passes its call to Python, with possible arguments."""
XA_OPEN_KNOWS_NO_RMFAIL: Final = {"open", "close"}


def all_codes(driver: Driver, thread: str = "a") -> dict[str, int]:
    """The code of every entry point."""
    return {call: driver.code(thread, call, *words) for call, words in ENTRIES.items()}


def unavailable() -> dict[str, int]:
    """The code that every entry point must return if the outcome is unknown."""
    return {call: XAER_RMERR if call in XA_OPEN_KNOWS_NO_RMFAIL else XAER_RMFAIL for call in ENTRIES}


@pytest.fixture
def modules() -> Iterator[Path]:
    """A directory for modules that the interpreter of the switch finds before any other."""
    with short_directory("modules") as directory:
        yield directory


def test_every_call_reports_that_python_cannot_start() -> None:
    """Here cffi by itself would end the process of the transaction manager."""
    with Driver(env={"PYTHONHOME": "/nonexistent"}) as driver:
        assert all_codes(driver) == unavailable()
        assert driver.reason("a").startswith("Python cannot be started: ")
        assert all_codes(driver, "another") == unavailable()
        assert driver.process.poll() is None
    assert "dtx_xa_switch: Python cannot be started" in driver.errors


def test_every_call_reports_a_site_module_that_exits(modules: Path) -> None:
    """A comment of cffi: "if importing 'site' fails, CPython calls exit()"."""
    (modules / "sitecustomize.py").write_text("raise SystemExit(0)\n")
    with Driver(env={"PYTHONPATH": str(modules)}) as driver:
        assert all_codes(driver) == unavailable()
        assert driver.reason("a").startswith("Python cannot be started: ")
        assert driver.process.poll() is None


def test_every_call_reports_an_environment_without_dtx(modules: Path) -> None:
    """The environment has no cffi either."""
    (modules / "bin").mkdir()
    base = Path(sys.executable).resolve()
    (modules / "bin/python").symlink_to(base)
    (modules / "pyvenv.cfg").write_text(f"home = {base.parent}\n")
    with Driver(env={"DTX_PYTHON": str(modules / "bin/python")}) as driver:
        assert all_codes(driver) == unavailable()
        assert "the package dtx cannot be loaded" in driver.reason("a")
    assert "No module named" in driver.errors


@pytest.mark.parametrize("content", ["", "raise SystemExit(0)\n", "import os\nraise KeyboardInterrupt\n"])
def test_every_call_reports_a_package_that_cannot_be_loaded(modules: Path, content: str) -> None:
    (modules / "dtx").mkdir()
    (modules / "dtx/__init__.py").write_text(content)
    with Driver(env={"PYTHONPATH": str(modules)}) as driver:
        assert all_codes(driver) == unavailable()
        assert "the package dtx cannot be loaded" in driver.reason("a")
        assert driver.process.poll() is None


_SABOTAGE: Final = """
import importlib.abc, sys

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "dtx.client.xa_switch.bridge":
            sys.meta_path.remove(self)
            from dtx.client.xa_switch import switch
            for method in ("open", "close", "branch", "recover", "complete", "working", "use", "gone"):
                def fail(*_, **__):
                    {statement}
                setattr(switch.Switch, method, fail)
        return None

sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    "statement",
    [
        "raise RuntimeError('unforeseen')",
        "raise SystemExit(0)",
        "raise MemoryError",
        "raise KeyboardInterrupt",
        "from dtx.client import XAException; raise XAException('of no kind')",
        "return None",
        "return 'XA_OK'",
        "return 1 << 40",
        "fail()",  # recurses until the stack is full
    ],
)
def test_an_exception_in_any_call_is_no_success(modules: Path, statement: str) -> None:
    """Python raises any exception, or returns no valid number."""
    (modules / "sitecustomize.py").write_text(_SABOTAGE.format(statement=statement))
    with Driver(env={"PYTHONPATH": str(modules)}) as driver:
        assert all_codes(driver) == unavailable()
        driver("a", "leave")  # the thread ends, but the process does not
        assert all_codes(driver, "b") == unavailable()
        assert driver.process.poll() is None


def test_the_cause_of_a_failure_is_reported(modules: Path) -> None:
    (modules / "sitecustomize.py").write_text(_SABOTAGE.format(statement="raise RuntimeError('unforeseen')"))
    with Driver(env={"PYTHONPATH": str(modules)}) as driver:
        driver.code("a", "commit", *ENTRIES["commit"])
        assert driver.reason("a") == "internal error: RuntimeError, see stderr"
    assert "RuntimeError: unforeseen" in driver.errors


@pytest.mark.parametrize(
    ("info", "words"),
    [
        ("null", "the open string is NULL"),
        ("", "url is missing"),
        ("url=http://127.0.0.1/", "no amqp:// or amqps:// URL"),
        ("url=amqp://h/;url=amqp://h/", "url is given twice"),
        ("url=amqp://h:port/", "open string: pika cannot parse the URL of url"),
        ("uri=amqp://h/", "known are url, coordination"),
    ],
)
def test_an_open_string_that_cannot_be_read_is_refused(info: str, words: str) -> None:
    with Driver() as driver:
        assert driver.code("a", "open", RM, NO_FLAGS, info) == XAER_INVAL
        assert words in driver.reason("a")


def test_calls_fail_before_xa_open_and_after_a_failed_one() -> None:
    protocol = dict.fromkeys(ENTRIES, XAER_PROTO) | {"open": XAER_RMERR, "close": XA_OK}
    with Driver() as driver:
        assert all_codes(driver) == protocol
        assert all_codes(driver) == protocol


@pytest.mark.parametrize("which", ["url", "coordination"])
def test_a_refused_login_is_named(service: DtxService, which: str) -> None:
    """No call was made, so no outcome is unknown."""
    right, wrong = service.url(), service.url(password="wrong")
    urls = {"url": right, "coordination": right} | {which: wrong}
    with Driver() as driver:
        assert (
            driver.code("a", "open", RM, NO_FLAGS, ";".join(f"{name}={url}" for name, url in urls.items()))
            == XAER_RMERR
        )
        reason = driver.reason("a")
    assert f"{service.host}:{service.port} refused the login" in reason
    assert "not known" not in reason
    assert "out of reach" not in reason


def test_arguments_that_are_not_there_are_refused(service: DtxService) -> None:
    with Driver() as driver:
        driver.open("a", service.url())
        for call in ("start", "end", "prepare", "commit", "rollback", "forget"):
            flags = SUCCESS if call == "end" else NO_FLAGS
            for xid in (
                "null",
                "-1:67:62",
                "1::62",
                f"1:{'67' * 65}:62",
                f"1:67:{'62' * 65}",
                f"{1 << 32}:67:62",
                "-2:67:",
            ):
                assert driver.code("a", call, xid, RM, flags) == XAER_INVAL, (call, xid)
        assert driver.code("a", "recover", 9999, RM, SCAN) == XAER_INVAL
        assert driver.code("a", "recover", -1, RM, SCAN) == XAER_INVAL
        assert driver.code("a", "recover", 0, RM, SCAN) == 0
        driver("a", "start", XID, RM, NO_FLAGS)
        assert driver.code("a", "publish-nothing", "queue") == XAER_INVAL
        assert driver.code("a", "publish-null", "queue") == XAER_INVAL
        assert driver.code("a", "publish", "-", "q" * 256, "x") == XAER_INVAL
        assert (
            driver.code("a", "publish", "-", "\udcff".encode(errors="surrogateescape").decode("latin1"), "x") == XA_OK
        )
        assert driver.code("a", "publish-with", "-", "queue", "x", 256) == XAER_INVAL
        assert driver.code("a", "publish-with", "-", "queue", "x", 1, "null") == XAER_INVAL
        assert driver.code("a", "ack", 77) == XAER_INVAL
        assert driver.code("a", "header", 77, "colour", 10) == XAER_INVAL
        driver("a", "end", XID, RM, SUCCESS)
        driver("a", "rollback", XID, RM, NO_FLAGS)


@pytest.mark.parametrize("getter", ["lixa_get_xa_switch", "ndrx_get_xa_switch", "dtx_xa_switch"])
@pytest.mark.parametrize("how", ["local", "global"])
def test_the_switch_is_found_as_managers_look_for_it(getter: str, how: str) -> None:
    """LIXA loads it with RTLD_GLOBAL, Enduro/X with RTLD_LOCAL: Python's modules find Python in both cases."""
    with Driver(getter, how) as driver:
        assert driver.ready == "ready 0 dtx 2 0"  # TMNOMIGRATE; version 0
        assert driver.code("a", "open", RM, NO_FLAGS, NOWHERE) == XAER_RMERR
        assert "127.0.0.1:1 is out of reach" in driver.reason("a")


def test_an_object_that_is_closed_stays_where_it_is(service: DtxService) -> None:
    """LIXA closes the object that it has loaded, but Python cannot be unloaded."""
    with Driver() as driver:
        driver.open("a", service.url())
        driver("a", "dlclose")
        driver("a", "start", XID, RM, NO_FLAGS)
        driver("a", "end", XID, RM, SUCCESS)
        driver("a", "rollback", XID, RM, NO_FLAGS)


def test_nothing_else_is_exported() -> None:
    said = subprocess.run(
        ["nm", "-D", "--defined-only", str(built() / "libdtx_xa_switch.so")], capture_output=True, text=True, check=True
    )
    names = {line.split()[-1] for line in said.stdout.splitlines()}
    assert names == {
        *("dtx_xa_switch", "lixa_get_xa_switch", "ndrx_get_xa_switch", "PyInit__dtx_xa_switch"),
        *("dtx_publish_2", "dtx_get_2", "dtx_header", "dtx_ack", "dtx_reject", "dtx_use", "dtx_reason"),
    }


_XID: Final = """
struct xid_t { long formatID; long gtrid_length; long bqual_length; char data[XIDDATASIZE]; };
typedef struct xid_t XID;
"""
_TX_H: Final = {
    "LIXA": f"#define XIDDATASIZE 128\n#ifndef XID_T_TYPE\n#define XID_T_TYPE{_XID}#endif\n",
    "X/Open": f"#define XIDDATASIZE 128{_XID}",
}
"""How tx.h of other products defines an xid; they define much more."""


@pytest.mark.parametrize(
    ("kind", "order"),
    [("LIXA", ("tx.h", "dtx_xa.h")), ("LIXA", ("dtx_xa.h", "tx.h")), ("X/Open", ("tx.h", "dtx_xa.h"))],
    ids=["LIXA's first", "LIXA's last", "X/Open's first"],
)
def test_the_header_compiles_beside_tx_h(tmp_path: Path, kind: str, order: tuple[str, str]) -> None:
    directory = built()
    (tmp_path / "tx.h").write_text(_TX_H[kind])
    includes = "".join(f'#include "{name}"\n' for name in order)
    (tmp_path / "both.c").write_text(f"{includes}XID one = {{-1, 0, 0, {{0}}}};\n")
    done = subprocess.run(
        ["gcc", "-std=c99", "-pedantic", "-Wall", "-Wextra", "-fsyntax-only", f"-I{directory}", tmp_path / "both.c"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_machine_without_a_compiler_gets_the_missing_package_named() -> None:
    with short_directory("build") as directory:
        command = [sys.executable, "-m", "dtx.client.xa_switch.build", "--into", str(directory)]
        environment = os.environ | {"CC": "no-such-compiler"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
        assert not list(directory.iterdir())
    assert done.returncode == 1
    assert done.stderr == (
        "the XA switch needs a C compiler and there is no no-such-compiler (Debian: apt install gcc), or set CC\n"
    )
