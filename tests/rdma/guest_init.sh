#!/bin/busybox sh
# First process of the guest, in its initial file system. Loads the modules, mounts the host's root
# file system read-only below an overlay in memory, and goes on with setup.sh of the job.
B=/bin/busybox
fail() { echo "rdma-vm: $1"; $B poweroff -f; }
share() { $B mount -t 9p -o "$1,trans=virtio,version=9p2000.L,msize=512000" "$2" "$3"; }

$B mount -t proc proc /proc
$B mount -t sysfs sys /sys
$B mount -t devtmpfs dev /dev
while read -r module; do
  $B insmod "/mods/$module" || echo "rdma-vm: insmod $module failed"
done < /mods/order
share ro,cache=loose,posixacl hostroot /lower || fail "no root"
$B mount -t tmpfs -o mode=755 tmpfs /upper
$B mkdir /upper/u /upper/w
$B mount -t overlay -o lowerdir=/lower,upperdir=/upper/u,workdir=/upper/w overlay /mnt || fail "no overlay"
for folder in proc sys dev; do
  $B mkdir -p "/mnt/$folder"
  $B mount --move "/$folder" "/mnt/$folder"
done
$B mkdir -p /mnt/run /mnt/tmp /mnt/dev/shm
$B mount -t tmpfs tmpfs /mnt/run
$B mount -t tmpfs -o mode=1777 tmpfs /mnt/tmp
$B mount -t tmpfs tmpfs /mnt/dev/shm
$B mkdir -p /mnt/run/rdma-vm
share rw job /mnt/run/rdma-vm || fail "no job"
exec $B switch_root /mnt /bin/sh /run/rdma-vm/setup.sh
