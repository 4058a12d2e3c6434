#!/usr/bin/env bash
# Installs files of pinned requirements into a virtual environment: install.sh VENV FILE...
# uv takes a sixth of pip's time, which works on one core. An index that pip is configured for is uv's too; where uv does
# not get through all the same, pip does it.
set -euo pipefail
bin=$1/bin
shift
index=${PIP_INDEX_URL:-$("$bin/pip" config get global.index-url 2>/dev/null || true)}
if [ -n "$index" ]; then export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index}; fi
export UV_HTTP_TIMEOUT=${UV_HTTP_TIMEOUT:-20}
pip=("$bin/pip" install --quiet --no-compile --no-deps --require-hashes)
fast=("$bin/uv" pip install --quiet --python "$bin/python" --no-deps --require-hashes)
if ! [ -x "$bin/uv" ]; then "${pip[@]}" -r infra/requirements-uv.txt || true; fi
for file in "$@"; do
  if ! "${fast[@]}" -r "$file"; then
    echo "uv could not install $file; pip does it, which takes longer" >&2
    "${pip[@]}" -r "$file"
  fi
done
