"""No process of a run listens beyond this machine, whatever its stage."""

import ipaddress
import json
import subprocess
import sys

import pytest

from tests.sockets import LISTENERS, listeners

LISTEN = """
import socket, time
server = socket.create_server(("", 0), family=socket.{family})
datagrams = socket.socket(socket.{family}, socket.SOCK_DGRAM)
datagrams.bind(("", 0))
print("listening", flush=True)
time.sleep(1)
"""


@pytest.mark.parametrize(("family", "address"), [("AF_INET", "0.0.0.0"), ("AF_INET6", "::")])
def test_a_process_that_listens_to_the_network_is_seen(family, address):
    shell = [sys.executable, "-c", LISTEN.format(family=family)]
    with listeners() as found:
        subprocess.run(["sh", "-c", '"$@"; true', "sh", *shell], check=True, capture_output=True)
    assert address in found


def beyond(found):
    """Addresses that are not this machine's alone."""
    return [address for address in found if not ipaddress.ip_address(address).is_loopback]


def test_no_stage_of_a_run_listens_to_the_network(smoke_store):
    assert beyond(json.loads((smoke_store.parent / LISTENERS).read_text())) == []


@pytest.mark.slow
def test_no_process_that_prepares_data_listens_to_the_network(rlhf, tmp_path):
    with listeners() as found:
        rlhf("run", "smoke", "--no-prefect", "--only", "prepare", "--set", "data.workers=2", "--store", tmp_path / "s")
    assert beyond(found) == []
