"""A store on an S3 API: a network that fails between, and two hosts of which each is killed."""

import contextlib
import http.client
import logging
import os
import random
import shutil
import socket
import struct
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil

from rlhf.stages.store.artifacts import Store
from tests.faults.storm import ground as grounds
from tests.faults.storm.files import host
from tests.faults.storm.ground import Broken, Command
from tests.faults.storm.moments import ROUNDS
from tests.faults.storm.scene import Scene

KINDS = ("error 500", "error 503", "delay", "answer lost", "reset", "lists nothing")
EMPTY = (
    b'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated><KeyCount>0</KeyCount></ListBucketResult>'
)
_server: Any = None
_lock = threading.Lock()


def server() -> str:
    """URL of moto's S3 server in this process, for its checks too."""
    global _server
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    with _lock:
        if _server is None:
            _server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
            _server.start()
            address, port = _server.get_host_and_port()
            os.environ |= {
                "AWS_ENDPOINT_URL": f"http://{address}:{port}",
                "AWS_ACCESS_KEY_ID": "test",
                "AWS_SECRET_ACCESS_KEY": "test",
                "AWS_DEFAULT_REGION": "us-east-1",
            }
        return os.environ["AWS_ENDPOINT_URL"]


class Proxy:
    """An HTTP proxy in front of a server, which fails as it is told."""

    def __init__(self, target: str, rng: random.Random, share: float, most: int):
        """share: of requests that fail. most: how many fail in all, after which all goes well."""
        self.target, self.rng, self.share, self.left = target.removeprefix("http://"), rng, share, most
        self.failed: Counter[str] = Counter()
        self._choosing = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def _forward(self) -> None:
                proxy.forward(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _forward

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _choice(self, listing: bool) -> str | None:
        with self._choosing:
            if self.left <= 0 or self.rng.random() > self.share:
                return None
            kind = self.rng.choice(KINDS if listing else KINDS[:-1])
            self.left -= 1
            self.failed[kind] += 1
            return kind

    def forward(self, request: BaseHTTPRequestHandler) -> None:
        """Hands on one request, or fails it."""
        body = self._body(request)
        kind = self._choice(request.command == "GET" and "list-type=2" in request.path)
        match kind:
            case "error 500" | "error 503":
                self._answer(request, int(kind[-3:]), [], b"")
                return
            case "reset":
                linger = struct.pack("ii", 1, 0)
                request.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                request.close_connection = True
                request.connection.close()
                return
            case "lists nothing":
                self._answer(request, 200, [("Content-Type", "application/xml")], EMPTY)
                return
            case "delay":
                time.sleep(self.rng.uniform(0.5, 5.0))
        connection = http.client.HTTPConnection(self.target, timeout=120)
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("transfer-encoding", "expect")}
        headers["Content-Length"] = str(len(body))
        connection.request(request.command, request.path, body, headers)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if kind == "answer lost":
            request.close_connection = True
            request.connection.close()
            return
        self._answer(request, answer.status, answer.getheaders(), data)

    @staticmethod
    def _body(request: BaseHTTPRequestHandler) -> bytes:
        if "chunked" in request.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(request.rfile.readline().split(b";")[0], 16):
                parts.append(request.rfile.read(size))
                request.rfile.readline()
            request.rfile.readline()
            return b"".join(parts)
        return request.rfile.read(int(request.headers.get("Content-Length") or 0))

    @staticmethod
    def _answer(request: BaseHTTPRequestHandler, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
        with contextlib.suppress(OSError):
            request.send_response_only(status)
            length = str(len(data))
            for name, value in headers:
                if name.lower() == "content-length":
                    length = value
                elif name.lower() not in ("transfer-encoding", "connection"):
                    request.send_header(name, value)
            request.send_header("Content-Length", length)
            request.end_headers()
            if request.command != "HEAD":
                request.wfile.write(data)


def _bucket(scene: Scene, *gone: str) -> None:
    """The scene's store is a bucket of its own."""
    import boto3

    server()
    name = scene.name.replace("/", "-").replace("_", "-")
    boto3.client("s3").create_bucket(Bucket=name)
    scene.ground.partly(scene.store, set(gone))
    scene.url = f"s3://{name}/store"
    place = Store(scene.url)
    for path in scene.store.rglob("*"):
        if path.is_file():
            place.fs.put_file(str(path), place.join(path.relative_to(scene.store).as_posix()))
    shutil.rmtree(scene.store)
    scene.before = grounds.committed(scene.url)


def weather(scene: Scene) -> None:
    """Requests to the store fail at random, in every way; then all goes well."""
    gone = scene.rng.choice((("sft",), ("rollout",), ("score", "update"), ("evaluate", "export"), ("reward",)))
    _bucket(scene, *gone)
    proxy = Proxy(server(), scene.rng, 0.05, 12)
    try:
        run = scene.start(AWS_ENDPOINT_URL=proxy.url)
        run.wait(600)
        for kind, count in proxy.failed.items():
            for _ in range(count):
                scene.struck(f"storage: {kind}", gone[0], "any request", network=True)
        scene.over(run)
        proxy.left = 0
        scene.finish(AWS_ENDPOINT_URL=proxy.url)
    finally:
        proxy.close()


def hosts(scene: Scene) -> None:
    """Two hosts run one recipe on one bucket; each is killed, and goes on later."""
    gone = scene.rng.choice((("sft",), ROUNDS, ("evaluate",)))
    _bucket(scene, *gone)
    names = ("one", "two")

    def start(name: str) -> Command:
        scratch = str(scene.folder / f"scratch-{name}")
        return scene.start(name, before=host(f"storm-{name}"), RLHF_SCRATCH=scratch)

    runs = {name: start(name) for name in names}
    for _ in range(3):
        # One of them makes something; the other waits for its lease, and takes over half a minute after a kill.
        deadline = time.monotonic() + 120
        while not any(run.worker() for run in runs.values()) and time.monotonic() < deadline:
            if all(run.over for run in runs.values()):
                break
            time.sleep(0.05)
        name = next((name for name, run in runs.items() if run.worker()), names[0])
        run = runs[name]
        scene.pause(8.0)
        worker = run.worker()
        if run.over or worker is None:
            continue
        who = scene.rng.choice(("flow", "worker"))
        with contextlib.suppress(psutil.NoSuchProcess):
            (psutil.Process(run.process.pid) if who == "flow" else worker).kill()
            scene.struck(f"two hosts on S3: kill {who}", gone[0], "at work")
        scene.over(run)
        runs[name] = start(name)
    for name, run in runs.items():
        # One that was killed as it left has finished: the command for it is refused.
        if scene.over(run) not in (0, 1) and grounds.record(scene.url, name).get("status") != "finished":
            raise Broken(run.output()[-3000:])
    for name in names:
        scene.finish(name, before=host(f"storm-{name}"), RLHF_SCRATCH=str(scene.folder / f"scratch-{name}"))
