"""A full disk is told with its place and with what to do, whoever has met it."""

import errno
import http.server
import json
import os
import subprocess
import sys
import threading
import urllib.error
from email.message import Message
from pathlib import Path

import pytest
import safetensors

from stages.store.disk import DiskFull, check_room, full_disk


class Own(Exception):
    """As clients of services have classes of their own."""


def raised(kind, cause=None):
    try:
        try:
            if cause is not None:
                raise cause
        except Exception as error:
            raise kind from error
        raise kind
    except Exception as error:
        return error


@pytest.mark.parametrize(
    "error",
    [
        raised(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/a/b")),
        raised(OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/tmp/a/b")),
        raised(RuntimeError("the save failed"), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/a/b")),
        raised(RuntimeError("ABORTED: write() failed: No space left on device [/tmp/x]")),
        raised(RuntimeError("Error writing file:///tmp/x: No space left on device; see https://x.y")),
        raised(OSError("Error writing file:///tmp/x: No space left on device; see https://x.y")),
        raised(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file:///tmp/a/b")),
        raised(KeyError("x"), safetensors.SafetensorError("Error while serializing: No space left on device")),
        raised(Own("not saved: No space left on device"), OSError("Error writing bytes: No space left on device")),
    ],
)
def test_a_full_disk_is_found_behind_what_it_has_caused(error):
    found = full_disk(error, Path("/tmp"))
    assert found is not None
    assert "MB left" in found.strerror and "/tmp" in found.strerror
    assert "the same command again" in found.strerror


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), ValueError("no space"), KeyError("x")])
def test_other_errors_are_none(error):
    assert full_disk(error, Path("/tmp")) is None


ANSWERED = "Error code: 500 - {'error': {'message': '[Errno 28] No space left on device'}}"


@pytest.mark.parametrize(
    "error",
    [
        Own(ANSWERED),
        raised(RuntimeError(f"prompt 3: {ANSWERED}"), Own(ANSWERED)),
        urllib.error.HTTPError("http://10.0.0.5/v1", 507, "No space left on device", Message(), None),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "s3://bucket/key"),
    ],
)
def test_a_full_disk_of_a_service_is_not_this_machines(error):
    assert full_disk(error, Path("/tmp")) is None


class FullService(http.server.BaseHTTPRequestHandler):
    """A service whose disk is full."""

    def do_POST(self):
        body = json.dumps({"error": {"message": "[Errno 28] No space left on device"}}).encode()
        self.send_response(500)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def test_the_answer_of_a_service_whose_disk_is_full_is_not_this_machines():
    openai = pytest.importorskip("openai")
    with http.server.HTTPServer(("127.0.0.1", 0), FullService) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.server_port}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.InternalServerError, match="No space left on device") as answered:
            client.completions.create(model="m", prompt="x")
        server.shutdown()
    assert full_disk(answered.value, Path("/tmp")) is None
    assert full_disk(raised(OSError(f"prompt 3: {answered.value}"), answered.value), Path("/tmp")) is None


def test_room_is_asked_for_before_it_is_needed(tmp_path):
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(DiskFull, match="No space left on device: 1000000000.0 GB and more are to be written"):
        check_room(tmp_path, 10**18)


WRITES = """
import sys
from pathlib import Path
from stages.store.artifacts import Store
from stages.store.disk import full_disk
store = Store(sys.argv[1])
try:
    for number in range(100):
        store.write_bytes(bytes(2**18), "things", str(number))
except OSError as error:
    print(full_disk(error, store.scratch).strerror)
left = [p.name for p in Path(sys.argv[1], "things").iterdir() if p.name.endswith(".part")]
print(left)
"""


def can_mount():
    return sys.platform == "linux" and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="this machine gives no namespace of mounts")
def test_a_real_full_disk_is_told_and_keeps_nothing_half_written(tmp_path):
    script = f"mount -t tmpfs -o size=2m none {tmp_path} && exec {sys.executable} -c '{WRITES}' {tmp_path}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert "No space left on device: the disk of" in done.stdout, done.stderr
    assert str(tmp_path) in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
