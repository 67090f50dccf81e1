#!/usr/bin/env bash
# An unmodified llama-server answers a question about a long document, without and with pqcached's
# plug-in; prints both answers and their speed. llama.cpp and the model are fetched once, into
# $PQCACHED_MODEL_CACHE or ~/.cache/pqcached; building llama.cpp takes six minutes on two cores.
#   deploy/demo_llama.sh [--skip-packages] [--plugin FILE] [ARGUMENT...]
#   --skip-packages   does not install Debian packages
#   --plugin FILE     uses this plug-in and builds none
#   ARGUMENT...       of tests/llama/demo.py, for example --threads 4 or --settings k=1024
set -euo pipefail
arguments=()
plugin=
while [ $# -gt 0 ]; do
  case "$1" in
    --skip-packages) export PQCACHED_SKIP_PACKAGES=1 ;;
    --plugin) plugin=$(realpath "${2:?--plugin needs a file}"); shift ;;
    -h|--help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) arguments+=("$1") ;;
  esac
  shift
done
cd "$(dirname "$0")/.."

export PYTHONDONTWRITEBYTECODE=1
if [ -z "$plugin" ]; then
  deploy/install_packages.sh build
  cmake --preset quickstart >/dev/null
  cmake --build build/quickstart --target ggml_pqcached
  plugin=$PWD/build/quickstart/client/libggml-pqcached.so
fi
version=$(PYTHONPATH=tests/llama python3 -c 'import engine; print(engine.TESTED[0])')
python3 tests/llama/engine.py --tools "$version" >/dev/null
python3 tests/quality/pretrained.py --model >/dev/null
python3 tests/llama/demo.py "$plugin" "${arguments[@]}"
