"""What is secret in a recipe or the environment is in nothing that a run writes; no process of a run can be reached."""

import http.server
import ipaddress
import json
import re
import subprocess
import sys
import threading

import pytest
from prefect.exceptions import ParameterTypeError
from prefect.utilities.schema_tools import ValidationError, validate

from rlhf.flows.pipeline import rlhf_pipeline
from rlhf.flows.recipe.model import RecipeError
from rlhf.flows.recipe.reading import load_recipe
from rlhf.stages.store.keys import config_content, published, without_userinfo
from tests.sockets import LISTENERS, listeners
from tests.stages.sampling.http_server import VERSION
from tests.support import RLHF


@pytest.mark.parametrize(
    "item",
    [
        "rl.score.rewards.j={function: judge, arguments: {api_key: sk-123456}}",
        "rl.score.rewards.j={function: judge, arguments: {Authorization: Bearer 1}}",
        "rl.score.rewards.j={function: judge, arguments: {key_variable: sk-123abc}}",
        "evaluate.judge_arguments.key_variable=hf_abc",
        "rl.score.rewards.j={function: judge, arguments: {openai_api_key: sk-123456}}",
        "rl.score.rewards.j={function: judge, arguments: {hf_token: hf_abc1234567}}",
        "environment={name: guess, arguments: {service_auth: 0abc123456}}",
        "rl.rollout.engine={kind: vllm, version: '1', command: [vllm, serve, --hf-token=hf_abc1234567]}",
        "evaluate.judge_arguments.secret_key=abc",
        "data.source_args.password=abc",
        "rl.rollout.engine={kind: vllm, version: '1', command: [vllm, serve], arguments: [--api-key, abc]}",
        "rl.rollout.engine={kind: vllm, version: '1', command: [vllm, serve, --api-key=abc]}",
    ],
)
def test_a_secret_that_would_be_recorded_is_refused_with_its_place(item):
    with pytest.raises(RecipeError, match="looks like a secret") as error:
        load_recipe("smoke", sets=[item])
    assert item.partition("=")[0].rpartition(".")[0] in str(error.value)
    assert "abc" not in str(error.value) and "sk-1" not in str(error.value)


def test_names_that_only_sound_like_secrets_are_settings():
    load_recipe("smoke", sets=["rl.score.rewards.m={function: matches, arguments: {pattern: token}}"])
    load_recipe(
        "smoke", sets=["rl.score.rewards.j={function: judge, arguments: {url: http://h/v1, key_variable: MY_KEY}}"]
    )
    for name in ("token", "key", "tokenizer", "author"):
        load_recipe("smoke", sets=[f"data.source_args.{name}=abc"])
    for pair in (
        "eos_token=<|im_end|>",
        "answer_key=solution",
        "sort_key=column 12",
        "judge_key_variable=OPENAI_API_KEY2",
    ):
        load_recipe("smoke", sets=[f"data.source_args.{pair}"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "parameters",
    [
        {"rl": {"score": {"rewards": {"j": {"function": "judge", "arguments": {"url": "http://me:abc@host/v1"}}}}}},
        {"rl": {"score": {"rewards": {"j": {"function": "judge", "arguments": {"api-key": "abc"}}}}}},
        {"rl": {"rollout": {"engine": {"kind": "vllm", "environment": {"HF_TOKEN": "abc"}}}}},
        {"rl": {"rollout": {"engine": {"kind": "vllm", "arguments": ["--api-key", "abc"]}}}},
        {"rl": {"score": {"rewards": {"j": {"function": "judge", "arguments": {"key_variable": "sk-abc"}}}}}},
        {"environment": {"name": "guess", "arguments": {"hf_token": "hf_abc1234567"}}},
        {"data": {"source": ["https://host/x?X-Amz-Signature=abc"]}},
        {"store": "s3://me:abc@host/x"},
    ],
    ids=lambda parameters: json.dumps(parameters)[:60],
)
def test_a_deployment_refuses_a_secret_among_its_parameters(parameters):
    """The server checks the schema before it stores parameters; the flow checks it where a server does not."""
    with pytest.raises(ValidationError):
        validate(parameters, rlhf_pipeline.parameters.model_dump_for_openapi(), raise_on_error=True)
    with pytest.raises(ParameterTypeError, match="it holds a secret") as error:
        rlhf_pipeline.validate_parameters(parameters)
    assert "abc" not in str(error.value).partition("[type=")[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"data": {"source": "http://bob:hunter2@127.0.0.1:1/x.jsonl?sig=hunter2"}},
        {"store": "s3://AKIA:hunter2@rlhf/store"},
    ],
)
def test_a_deployments_run_that_cannot_begin_has_no_secret_in_its_state(tmp_path, monkeypatch, fields):
    monkeypatch.setattr("rlhf.tuning.data.remote.FIRST_WAIT_SECONDS", 0.001)
    # Prefect logs the traceback of a state's data.
    ended = rlhf_pipeline.fn(**{"recipe": "smoke", "store": str(tmp_path / "store"), **fields})
    assert ended.is_failed() and ended.data is None
    assert ended.message.startswith("no run of recipe smoke began: ") and "hunter2" not in ended.message
    assert "ConnectionRefusedError" in ended.message or "keys of a bucket come from the environment" in ended.message


def test_parameters_without_a_secret_pass():
    rewards = {"j": {"function": "judge", "arguments": {"url": "http://host/v1?a=1", "key_variable": "MY_KEY"}}}
    parameters = {"recipe": "demo", "rl": {"rounds": 3, "score": {"rewards": rewards}}, "store": "s3://bucket/x"}
    validate(parameters, rlhf_pipeline.parameters.model_dump_for_openapi(), raise_on_error=True)
    rlhf_pipeline.validate_parameters(parameters)


URLS = {
    "http://me:SECRET@host/x": "http://host/x",
    "http://me:SEC@SECRET@host/x": "http://host/x",
    "s3://b/x?X-Amz-Signature=SECRET&a=1": "s3://b/x?X-Amz-Signature=***&a=1",
    "https://h/x.jsonl?a=1&access_token=SECRET": "https://h/x.jsonl?a=1&access_token=***",
    "https://h/x?sig=SECRET#part": "https://h/x?sig=***#part",
    "error at https://h/x?api_key=SECRET: no such file": "error at https://h/x?api_key=*** no such file",
}


@pytest.mark.parametrize("url", URLS)
def test_urls_are_written_without_what_opens_them(url):
    assert without_userinfo(url) == URLS[url]
    assert published({"command": [url]}) == {"command": [URLS[url]]}
    recipe = load_recipe("smoke", sets=[f"data.source={json.dumps(url.partition(': ')[0].removeprefix('error at '))}"])
    assert "SECRET" not in json.dumps(config_content(recipe.data))


class Planted(http.server.BaseHTTPRequestHandler):
    """Problems as a file, and a judge."""

    problems = "".join(json.dumps({"prompt": f"{i} + 1 = ", "answer": str(i + 1)}) + "\n" for i in range(200)).encode()

    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self):
        self.send_response(200)
        self.send_header("content-length", str(len(self.problems)))
        self.end_headers()

    def do_GET(self):
        self.answer(self.problems)

    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.answer(json.dumps({"choices": [{"message": {"content": "7 out of 10: 7"}}]}).encode())

    def log_message(self, *_):
        pass


@pytest.mark.slow
def test_a_run_with_a_secret_in_every_place_writes_none_of_them(tmp_path, monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Planted)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    host = f"127.0.0.1:{server.server_port}"
    judge = f"http://{host}/v1?api_key=PLANTED-query"
    engine = {"kind": "vllm", "version": VERSION, "dtype": "float32", "tolerance": 0.001}
    engine["command"] = f"{sys.executable} -m tests.stages.sampling.http_server"
    engine["environment"] = {"HF_TOKEN": "PLANTED-variable", "ORDINARY": "PLANTED-other"}
    sets = {
        "data.source": f"http://me:PLANTED-user@{host}/x.jsonl",
        "sft": "null",
        "reward": "null",
        "rl.rounds": 1,
        "rl.score.rewards.model": "{function: matches, arguments: {pattern: x}}",
        "rl.score.rewards": json.dumps({"j": {"function": "judge", "arguments": {"url": judge, "model": "m"}}}),
        "rl.rollout.engine": json.dumps(engine),
    }
    monkeypatch.setenv("OPENAI_API_KEY", "PLANTED-environment")
    monkeypatch.setenv("RLHF_SCRATCH", str(tmp_path / "scratch"))
    options = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    command = [RLHF, "run", "smoke", "--no-prefect", "--store", str(tmp_path / "store"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    server.shutdown()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PLANTED" not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"run.json", "report.html", "manifest.json", "worker.log"} <= {path.name for path in files}
    found = {(path.name, *re.findall(rb"PLANTED-\w+", path.read_bytes())) for path in files}
    assert not [entry for entry in found if len(entry) > 1]


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
