# Makes two soft-RoCE devices in the guest, runs the job's command, and switches the guest off.
#   rxe0 on veth0, 10.77.0.1; rxe1 on veth1, 10.77.0.2
exec </dev/null
for interface in all default; do
  echo 0 >/proc/sys/net/ipv4/conf/$interface/rp_filter
  echo 1 >/proc/sys/net/ipv4/conf/$interface/accept_local
done
# Soft-RoCE serves only the first network namespace (Linux 6.1), so both ends are in it. The rules
# send packets between the two addresses over the pair of interfaces, instead of the loopback.
ip -batch - <<'IP'
link set lo up
link add veth0 mtu 9000 address 02:00:00:77:00:01 type veth peer name veth1 mtu 9000 address 02:00:00:77:00:02
addr add 10.77.0.1/32 dev veth0
addr add 10.77.0.2/32 dev veth1
link set veth0 up
link set veth1 up
rule add pref 1 iif veth0 lookup local
rule add pref 1 iif veth1 lookup local
route add 10.77.0.2/32 dev veth0 src 10.77.0.1 table 101
route add 10.77.0.1/32 dev veth1 src 10.77.0.2 table 102
rule add pref 2 from 10.77.0.1 to 10.77.0.2 lookup 101
rule add pref 2 from 10.77.0.2 to 10.77.0.1 lookup 102
rule add pref 4 lookup local
rule del pref 0
neigh replace 10.77.0.2 lladdr 02:00:00:77:00:02 dev veth0 nud permanent
neigh replace 10.77.0.1 lladdr 02:00:00:77:00:01 dev veth1 nud permanent
IP
rdma link add rxe0 type rxe netdev veth0
rdma link add rxe1 type rxe netdev veth1
ulimit -l unlimited
export RDMA_VM=1 HOME=/root
for port in /dev/vport*; do
  name=$(cat "/sys/class/virtio-ports/${port#/dev/}/name" 2>/dev/null)
  case $name in out) output=$port ;; err) errors=$port ;; esac
done
cd /run/rdma-vm
( . ./command ) >"$output" 2>"$errors"
echo $? >status
sync
echo o >/proc/sysrq-trigger
while :; do sleep 1; done
