"""A real local Ray head with its dashboard and token authentication, ended by the handles of its own processes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


class LocalHead:
    """`ray start --head --block` in a folder of its own; use as a context manager."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.temp = Path(tempfile.mkdtemp(prefix="gemhead-"))  # short: Unix socket paths may have 107 characters
        self.process: subprocess.Popen[bytes] | None = None
        self.address = ""

    def __enter__(self) -> LocalHead:
        gcs, dashboard, client, agent_http, agent_grpc = free_ports(5)
        self.address = f"http://127.0.0.1:{dashboard}"
        command = [str(Path(sys.executable).parent / "ray"), "start", "--head", "--block", "--disable-usage-stats"]
        options = {
            "node-ip-address": "127.0.0.1",
            "port": gcs,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "ray-client-server-port": client,
            "dashboard-agent-listen-port": agent_http,
            "dashboard-agent-grpc-port": agent_grpc,
            "num-cpus": 2,
            "object-store-memory": 100 * 2**20,
            "temp-dir": self.temp,
        }
        command += [f"--{name}={value}" for name, value in options.items()]
        with (self.temp / "start.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env())
        try:
            self._wait(120.0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def env(self, **changes: str) -> dict[str, str]:
        """The environment of a process that may talk to this head; `NAME=""` drops a variable."""
        out = {k: v for k, v in os.environ.items() if not k.startswith("RAY_") or k == "RAY_USAGE_STATS_ENABLED"}
        out |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token, "HOME": str(self.temp)} | changes
        return {k: v for k, v in out.items() if v}

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process is not None and self.process.poll() is not None:
                raise RuntimeError(f"ray start ended: {(self.temp / 'start.log').read_text()[-2000:]}")
            try:
                request = urllib.request.Request(f"{self.address}/api/jobs/")
                request.add_header("Authorization", f"Bearer {self.token}")
                with urllib.request.urlopen(request, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"no jobs API within {seconds} s: {(self.temp / 'start.log').read_text()[-2000:]}")

    def _own_processes(self) -> list[psutil.Process]:
        """Our `ray start`, all it started, and what was handed to init meanwhile but runs in our folder."""
        if self.process is None:
            return []
        found: list[psutil.Process] = []
        if self.process.poll() is None:
            parent = psutil.Process(self.process.pid)
            found = [*parent.children(recursive=True), parent]
        for other in psutil.process_iter(["cmdline"]):
            if other not in found and any(str(self.temp) in part for part in other.info["cmdline"] or ()):
                found.append(other)
        return found

    def __exit__(self, *_: object) -> None:
        for send in ("terminate", "kill"):
            own = self._own_processes()
            for one in own:
                try:
                    getattr(one, send)()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(own, timeout=10)
        if self.process is not None:
            self.process.wait(timeout=10)
        shutil.rmtree(self.temp, ignore_errors=True)
