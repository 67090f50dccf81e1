#!/usr/bin/env bash
# Installs the Debian packages of the given scopes that are missing, and says which and why.
#   deploy/install_packages.sh SCOPE...     scopes: build test bench lint arm64 rdma (see packages.txt)
# Does nothing when PQCACHED_SKIP_PACKAGES=1.
set -euo pipefail
cd "$(dirname "$0")"
[ "${PQCACHED_SKIP_PACKAGES:-0}" = 1 ] && exit 0

missing=()
while read -r scope package why; do
  [[ "$scope" == \#* || -z "$scope" ]] && continue
  for wanted in "$@"; do
    [ "$scope" = "$wanted" ] || continue
    if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed'; then
      echo "missing: $package ($why)"
      missing+=("$package")
    fi
  done
done < packages.txt
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" != 0 ]; then
  if ! command -v sudo >/dev/null; then
    echo "error: these packages need root to install: apt-get install ${missing[*]}" >&2
    echo "       install them, or pass --skip-packages if you have them elsewhere" >&2
    exit 1
  fi
  as_root=(sudo)
fi
echo "installing ${#missing[@]} packages from Debian (--skip-packages leaves this out)"
log=$(mktemp)
if ! { "${as_root[@]}" apt-get update -qq &&
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -20 "$log" >&2
  rm -f "$log"
  echo "error: apt-get failed" >&2
  exit 1
fi
rm -f "$log"
