#!/bin/sh
# Installs component `client` into a folder, moves it, builds a consumer against it with find_package, and runs it,
# pqcachectl and pqcached-conform. Usage: install_test.sh BUILD SOURCE [CMAKE_ARGUMENT...]
set -eu
build=$1
source=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cmake --install "$build" --prefix "$work/first" --component client > "$work/log" || { cat "$work/log"; exit 1; }
mv "$work/first" "$work/moved"  # nothing may remember where it was installed
cmake -S "$source/tests/client/install" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/moved" \
  -DEXAMPLE="$source/client/examples/attend/main.cc" "$@" > "$work/log" || { cat "$work/log"; exit 1; }
cmake --build "$work/build" > "$work/log" || { cat "$work/log"; exit 1; }

# UNAVAILABLE says that both libraries were found: gRPC's was loaded, and nobody listened.
"$work/build/consumer_c" "unix://$work/nobody"
status=0
"$work/build/consumer_cxx" "unix://$work/nobody" 2> "$work/log" || status=$?
cat "$work/log"
[ "$status" = 1 ] && grep -q '^UNAVAILABLE' "$work/log"
status=0
"$work/moved/bin/pqcachectl" --endpoint "unix://$work/nobody" ping 2> "$work/log" || status=$?
cat "$work/log"
[ "$status" = 3 ]
status=0
PQCACHED_RECORD="$work/calls" "$work/build/consumer_c" "unix://$work/nobody"
"$work/moved/bin/pqcached-conform" "$work/calls" > "$work/log" || status=$?
cat "$work/log"
[ "$status" = 0 ] && grep -q '^calls: [1-9]' "$work/log"

"$work/build/consumer_llama"

# llama.cpp's plug-in loads without llama.cpp, and then says that it finds no ggml. With a sanitizer, its runtime would
# have to be loaded first.
plugin=$(find "$work/moved" -path '*/pqcached/libggml-pqcached.so')
[ -n "$plugin" ]
if ! nm -D "$plugin" | grep -qE '__(asan|tsan|ubsan)_'; then
  status=0
  python3 -c 'import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).ggml_backend_init())' "$plugin" 2> "$work/log" || status=$?
  cat "$work/log"
  [ "$status" = 0 ] && grep -q '^ggml-pqcached: not used' "$work/log"
fi
