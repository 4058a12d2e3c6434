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
import s3fs.errors
import safetensors
from botocore.exceptions import ClientError

from rlhf.stages.store.disk import DiskFault, check_room, disk_fault
from tests.support import can_mount


class Own(Exception):
    """As clients of services have classes of their own."""


UNKNOWN = ClientError({"Error": {"Code": "Own", "Message": "a disk failed"}}, "PutObject")
"""An answer of S3 that s3fs does not know, and makes EIO of."""


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
    found = disk_fault(error, Path("/tmp"))
    assert found is not None
    assert "MB left" in found.strerror and "/tmp" in found.strerror
    assert "the same command again" in found.strerror


@pytest.mark.parametrize(
    "error",
    [
        raised(OSError(errno.EIO, os.strerror(errno.EIO), "/tmp/a/b")),
        raised(RuntimeError("not read"), OSError(errno.EIO, "Error reading bytes: [errno 5] Input/output error")),
        raised(OSError(errno.ESTALE, os.strerror(errno.ESTALE))),
    ],
)
def test_a_disk_that_fails_is_named_with_its_remedy(error):
    found = disk_fault(error, Path("/tmp"))
    assert found is not None and found.errno in (errno.EIO, errno.ESTALE)
    assert "/tmp" in found.strerror and "give the same command again" in found.strerror


@pytest.mark.parametrize(
    "error",
    [s3fs.errors.translate_boto_error(UNKNOWN), OSError(errno.EACCES, "x"), ValueError("no space"), KeyError("x")],
)
def test_other_errors_are_none(error):
    assert disk_fault(error, Path("/tmp")) is None


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
    assert disk_fault(error, Path("/tmp")) is None


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
    assert disk_fault(answered.value, Path("/tmp")) is None
    assert disk_fault(raised(OSError(f"prompt 3: {answered.value}"), answered.value), Path("/tmp")) is None


def test_room_is_asked_for_before_it_is_needed(tmp_path):
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(DiskFault, match="No space left on device: 1000000000.0 GB and more are to be written"):
        check_room(tmp_path, 10**18)


WRITES = """
import sys
from pathlib import Path
from rlhf.stages.store.artifacts import Store
from rlhf.stages.store.disk import disk_fault
store = Store(sys.argv[1])
try:
    for number in range(100):
        store.write_bytes(bytes(2**18), "things", str(number))
except OSError as error:
    print(disk_fault(error, store.scratch).strerror)
left = [p.name for p in Path(sys.argv[1], "things").iterdir() if p.name.endswith(".part")]
print(left)
"""


@pytest.mark.skipif(not can_mount(), reason="this machine gives no namespace of mounts")
def test_a_real_full_disk_is_told_and_keeps_nothing_half_written(tmp_path):
    script = f"mount -t tmpfs -o size=2m none {tmp_path} && exec {sys.executable} -c '{WRITES}' {tmp_path}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert "No space left on device: the disk of" in done.stdout, done.stderr
    assert str(tmp_path) in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"
