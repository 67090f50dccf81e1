#!/usr/bin/env bash
# Installs qemu and a kernel, makes the virtual machine, and runs the tests of RDMA in it.
set -euo pipefail
cd "$(dirname "$0")/../.."
deploy/install_packages.sh rdma
tests/rdma/vm.sh --prepare
PQCACHED_REQUIRE=rdma_vm tests/run.sh "$@" -R '^rdma_vm$'
