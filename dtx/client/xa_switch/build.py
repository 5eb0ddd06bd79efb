"""Builds the shared object: ``python -m dtx.client.xa_switch.build --into build/xa_switch``, or ``make xa-switch``.

It needs a C compiler, and the headers and the shared library of the Python that runs this. The object starts this
Python with its environment, which must have dtx; the variable ``DTX_PYTHON`` names another Python at run time.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Final

LIBRARY: Final = "libdtx_xa_switch.so"
HEADERS: Final = ("dtx_xa.h", "xa.h")
_HERE: Final = Path(__file__).parent
_TYPES: Final = """
    typedef struct xid_t { long formatID; long gtrid_length; long bqual_length; char data[128]; } XID;
    struct dtx_outcome { int code; char reason[...]; };
    struct dtx_header { const char *name; const char *text; int64_t number; };
    struct dtx_properties {
        const char *content_type; const char *message_id; const char *correlation_id; const char *reply_to;
        const char *type; const char *expiration; int priority; int transient; const char *content_encoding;
        const char *app_id; const char *user_id; int64_t timestamp; const struct dtx_header *headers;
        size_t header_count; ...;
    };
    struct dtx_message {
        uint64_t delivery_tag; size_t length; int redelivered; char exchange[...]; char routing_key[...];
        char content_type[...]; char message_id[...]; char correlation_id[...]; char reply_to[...]; char type[...];
        char content_encoding[...]; char app_id[...]; char user_id[...]; int64_t timestamp; ...;
    };
    extern "Python" {
        void dtx_py_open(uint64_t, char *, int, long, struct dtx_outcome *);
        void dtx_py_close(uint64_t, int, long, struct dtx_outcome *);
        void dtx_py_branch(uint64_t, int, XID *, int, long, struct dtx_outcome *);
        void dtx_py_recover(uint64_t, XID *, long, int, long, struct dtx_outcome *);
        void dtx_py_complete(uint64_t, int, long, struct dtx_outcome *);
        void dtx_py_publish(uint64_t, char *, char *, void *, size_t, struct dtx_properties *, struct dtx_outcome *);
        void dtx_py_get(uint64_t, char *, void *, size_t, struct dtx_message *, struct dtx_outcome *);
        void dtx_py_header(uint64_t, uint64_t, char *, char *, size_t, struct dtx_outcome *);
        void dtx_py_settle(uint64_t, uint64_t, int, struct dtx_outcome *);
        void dtx_py_use(uint64_t, int, struct dtx_outcome *);
        void dtx_py_gone(uint64_t);
    }
"""


class Missing(Exception):
    """Something that the build needs is missing; the message says how to install it."""


def build(directory: Path, compiler: str) -> Path:
    """Build the object and copy the headers to its directory.

    Args:
        directory: for object and headers; created if it is missing.
        compiler: command of a C compiler.

    Returns:
        Path of the object.

    Raises:
        Missing: something that the build needs is missing.
        subprocess.CalledProcessError: the compiler failed; stderr has its messages.
    """
    library = _python_library()
    if shutil.which(compiler) is None:
        raise Missing(
            f"the XA switch needs a C compiler and there is no {compiler} (Debian: apt install gcc), or set CC"
        )
    directory.mkdir(parents=True, exist_ok=True)
    for header in HEADERS:
        shutil.copyfile(_HERE / header, directory / header)
    made = directory / LIBRARY
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "dtx_xa_switch.c"
        _emit(source)
        unfinished = directory / f"{LIBRARY}~"
        subprocess.run([compiler, *_words(), "-o", str(unfinished), str(source), *library], check=True)
        unfinished.replace(made)
    return made


def _emit(source: Path) -> None:
    try:
        ffi: Any = import_module("cffi").FFI()
    except ImportError:
        raise Missing("the XA switch needs cffi: pip install 'dtx[xa-switch]'") from None
    ffi.embedding_api("")
    ffi.cdef(_TYPES)
    ffi.embedding_init_code("import dtx.client.xa_switch.bridge")
    ffi.set_source("_dtx_xa_switch", (_HERE / "entry.c").read_text())
    with contextlib.redirect_stdout(io.StringIO()):  # cffi prints its progress
        ffi.emit_c_code(str(source))


def _words() -> list[str]:
    """Options of the compiler: only marked symbols are exported, and dlclose does not unload the object."""
    include = sysconfig.get_path("include")
    if not (Path(include) / "Python.h").exists():
        raise Missing(
            f"the XA switch needs Python's headers and there is no {include}/Python.h (Debian: apt install python3-dev)"
        )
    return [
        *("-O2", "-g", "-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra", "-Wno-unused-parameter"),
        # cffi's parts of the source cause these warnings.
        *("-Wno-missing-field-initializers", "-Wno-cast-function-type", "-Wno-pedantic"),
        "-D_CFFI_NO_LIMITED_API",
        f"-DDTX_PROGRAM={json.dumps(sys.executable)}",
        *(f"-I{place}" for place in dict.fromkeys((include, sysconfig.get_path("platinclude"), str(_HERE)))),
        *("-Wl,-z,nodelete", "-Wl,--no-undefined", f"-Wl,-soname,{LIBRARY}"),
    ]


def _python_library() -> list[str]:
    """Options that link with the shared library of this Python."""
    if not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise Missing(
            f"the XA switch needs Python as a shared library and {sys.executable} has none: use a Python that was"
            " configured with --enable-shared (Debian's is)"
        )
    place = str(sysconfig.get_config_var("LIBDIR"))
    version = sysconfig.get_config_var("LDVERSION")
    if not (Path(place) / str(sysconfig.get_config_var("LDLIBRARY"))).exists():
        raise Missing(f"the XA switch needs libpython{version} to link with (Debian: apt install python3-dev)")
    return [f"-L{place}", f"-Wl,-rpath,{place}", f"-lpython{version}", "-lpthread", "-ldl"]


def main() -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m dtx.client.xa_switch.build", description=__doc__)
    parser.add_argument(
        "--into", type=Path, default=Path("build/xa_switch"), help="directory of the object and its headers"
    )
    words = parser.parse_args()
    try:
        made = build(words.into, os.environ.get("CC", "cc"))
    except Missing as missing:
        sys.stderr.write(f"{missing}\n")
        return 1
    except subprocess.CalledProcessError as failed:
        sys.stderr.write(f"the XA switch cannot be compiled: {failed.cmd[0]} ended with {failed.returncode}\n")
        return 1
    sys.stdout.write(f"{made}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
