#!/usr/bin/env bash
# Runs a command in a small virtual machine whose kernel has soft-RoCE, on a host whose kernel has no RDMA.
#   tests/rdma/vm.sh [--timeout S] [--with FILE]... -- COMMAND [ARGUMENT...]
#   tests/rdma/vm.sh --prepare     fetches Debian's kernel (71 MB) and makes the initial file system
# The guest sees the host's root file system read-only, so the host's programs and libraries run
# unchanged; FILEs are in its working directory. It needs no KVM: qemu emulates the CPU (which has AVX2,
# but no AVX-512). The exit status is that of the command; 124: timeout, 125: the guest itself has
# failed, 77: it is not prepared, or a program is missing, which the output names.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
cache=${PQCACHED_MODEL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/pqcached}/rdma-vm
timeout_s=240 prepare=0 files=()
while (( $# )); do
  case $1 in
    --timeout) timeout_s=$2; shift 2 ;;
    --with) files+=("$(realpath "$2")"); shift 2 ;;
    --prepare) prepare=1; shift ;;
    --) shift; break ;;
    *) sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done

missing() { echo "$1"; exit 77; }
export PATH=$PATH:/usr/sbin:/sbin
for program in qemu-system-x86_64 busybox ip rdma modprobe depmod; do
  command -v "$program" >/dev/null || missing "no $program (deploy/install_packages.sh rdma)"
done
ls /usr/lib/*/libibverbs/librxe-rdmav*.so >/dev/null 2>&1 || missing "no ibverbs-providers (deploy/install_packages.sh rdma)"

# Unpacks vmlinuz and the modules of Debian's kernel into the cache.
fetch_kernel() {
  local folder package
  folder=$(mktemp -d "$cache/kernel.XXXX")
  package=$(apt-cache depends linux-image-amd64 | awk '/Depends:/{print $2; exit}')
  [ -n "$package" ] || missing "apt knows no kernel"
  (cd "$folder" && apt-get -qq download "$package" 2>/dev/null) || missing "the kernel's package cannot be had"
  dpkg-deb --fsys-tarfile "$folder"/linux-image-*.deb |
    tar -x -C "$folder" --wildcards './boot/vmlinuz-*' './lib/modules/*'
  rm -rf "$cache/modules"
  mv "$folder/lib/modules" "$cache/modules"
  mv "$folder"/boot/vmlinuz-* "$cache/vmlinuz"
  rm -rf "$folder"
}

make_initial_file_system() {
  local root links version module
  root=$(mktemp -d "$cache/root.XXXX")
  links=$cache/links/lib/modules
  version=$(ls "$cache/modules")
  mkdir -p "$root"/{bin,proc,sys,dev,mnt,mods,lower,upper} "$links"
  cp "$(command -v busybox)" "$root/bin/busybox"
  ln -sfn "$cache/modules/$version" "$links/$version"
  depmod -b "$cache/links" "$version"
  for module in virtio_pci virtio_console 9pnet_virtio 9p overlay veth crc32_generic crc32c_generic rdma_rxe rdma_ucm ib_umad; do
    modprobe -d "$cache/links" -S "$version" --show-depends --ignore-install "$module"
  done | awk '$1 == "insmod" && !seen[$2]++ {print $2}' | while read -r module; do
    cp "$module" "$root/mods/"
    basename "$module" >>"$root/mods/order"
  done
  install -m 755 "$here/guest_init.sh" "$root/init"
  (cd "$root" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1) >"$cache/initrd.new"
  mv "$cache/initrd.new" "$cache/initrd.gz"
  rm -rf "$root"
}

if (( prepare )); then
  mkdir -p "$cache"
  exec 9>"$cache/lock"
  flock 9
  [ -s "$cache/vmlinuz" ] || fetch_kernel
  make_initial_file_system
  exit 0
fi
[ -s "$cache/initrd.gz" ] || missing "no kernel (tests/rdma/vm.sh --prepare)"
(( $# )) || { echo "vm.sh: no command" >&2; exit 2; }

job=$(mktemp -d) machine=
cleanup() {
  [ -z "$machine" ] || kill "$machine" 2>/dev/null || true
  rm -rf "$job"
}
trap cleanup EXIT
for file in "${files[@]}"; do cp "$file" "$job/"; done
cp "$here/guest_setup.sh" "$job/setup.sh"
{ printf '%q ' "$@"; echo; } >"$job/command"
mkfifo "$job/out" "$job/err"
cat "$job/out" & output=$!
cat "$job/err" >&2 & errors=$!
cpus=$(nproc)
timeout --foreground -k 5 "$timeout_s" qemu-system-x86_64 -M pc -accel tcg,thread=multi -cpu max \
  -smp $(( cpus > 4 ? 4 : cpus )) -m 2048 -nodefaults -no-user-config -no-reboot -display none \
  -kernel "$cache/vmlinuz" -initrd "$cache/initrd.gz" \
  -append "console=ttyS0 panic=-1 rdinit=/init mitigations=off nokaslr tsc=reliable no_timer_check random.trust_cpu=on quiet loglevel=3" \
  -chardev "file,id=serial,path=$job/serial" -serial chardev:serial \
  -device virtio-serial-pci,max_ports=4 \
  -chardev "file,id=out,path=$job/out,append=on" -device virtserialport,chardev=out,name=out \
  -chardev "file,id=err,path=$job/err,append=on" -device virtserialport,chardev=err,name=err \
  -object rng-builtin,id=rng -device virtio-rng-pci,rng=rng \
  -virtfs "local,path=/,mount_tag=hostroot,security_model=none,readonly=on,multidevs=remap" \
  -virtfs "local,path=$job,mount_tag=job,security_model=none" </dev/null >"$job/qemu.log" 2>&1 &
machine=$!
ended=0
wait $machine || ended=$?
machine=
kill $output $errors 2>/dev/null && sleep 0.05 || true
wait $output $errors 2>/dev/null || true
[ -s "$job/status" ] && exit "$(cat "$job/status")"
echo "vm.sh: the guest gave no exit status (qemu: $ended)" >&2
cat "$job/qemu.log" >&2
tail -n 20 "$job/serial" >&2 || true
(( ended == 124 || ended == 137 )) && exit 124
exit 125
