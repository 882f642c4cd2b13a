"""A PostgreSQL server that hears no network, and ends with the tests that start it."""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = next(
    (folder for folder in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)),
    Path(shutil.which("initdb") or "/none/initdb").parent,
)


@contextmanager
def postgres_server() -> Iterator[Path]:
    """Start a server and give the folder of its socket."""
    user = "postgres" if os.geteuid() == 0 else None  # it refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="pg-"))  # a socket's path has a hundred letters at most
    data = folder / "data"
    if user is not None:
        shutil.chown(folder, user)
    run = {"user": user, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    command = [PROGRAMS / "initdb", "-D", data, "-U", "me", "-A", "trust", "--no-sync"]
    subprocess.run(command, check=True, **run)  # type: ignore[call-overload]
    settings = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", f"unix_socket_directories={folder}"]
    process = subprocess.Popen([PROGRAMS / "postgres", "-D", data, *settings], **run)  # type: ignore[call-overload]
    try:
        until = time.monotonic() + 60
        ready = [PROGRAMS / "pg_isready", "-q", "-h", folder, "-d", "postgres"]  # its socket is there before
        while subprocess.run(ready, check=False, **run).returncode:  # type: ignore[call-overload]
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.05)
        yield folder
    finally:
        process.send_signal(signal.SIGINT)  # it waits for no connection that a test left open
        process.wait(60)
        shutil.rmtree(folder)
