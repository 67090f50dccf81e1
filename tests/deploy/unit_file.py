"""Reads a systemd unit, and starts its ExecStart line as systemd would, as far as a plain process can.

Applied: User, Group, UMask, RuntimeDirectory with its mode, LimitNOFILE, WatchdogSec, NoNewPrivileges, empty sets of
capabilities, ProtectSystem=strict, PrivateTmp, and SystemCallFilter where libseccomp and systemd-analyze are there.
"""

import ctypes.util
import errno
import pathlib
import resource
import shlex
import shutil
import subprocess

SERVICE_ID, MEMBER_ID, STRANGER_ID = 61901, 61902, 61903  # user and group ids that no one has

# Runs as the unit's user: loads the filter of system calls, and becomes the program.
# Arguments: the library, the error number, "name name ...", the program with its arguments.
FILTERED = """
import ctypes, os, sys
library, number, names, program = sys.argv[1], int(sys.argv[2]), sys.argv[3].split(), sys.argv[4:]
if library:
    seccomp = ctypes.CDLL(library)
    seccomp.seccomp_init.restype = ctypes.c_void_p
    filter = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(0x00050000 | number)))
    for name in names:
        call = seccomp.seccomp_syscall_resolve_name(name.encode())
        if call >= 0:
            assert seccomp.seccomp_rule_add_array(filter, ctypes.c_uint32(0x7fff0000), call, 0, None) == 0, name
    assert seccomp.seccomp_load(filter) == 0
os.execv(program[0], program)
"""

# Arguments: the folder of the installation, the folder that may be written, RuntimeDirectory, its mode, ids, the command.
# /usr and /etc show what is installed, and /run and /tmp are empty.
IN_NAMESPACE = """
set -e
installed=$1 own=$2 directory=$3 mode=$4 id=$5
shift 5
for top in usr etc; do mount -t overlay overlay -o "lowerdir=$installed/$top:/$top" "/$top"; done
mount -t tmpfs -o mode=755 run /run
mkdir -m "$mode" "/run/$directory"
chown "$id:$id" "/run/$directory"
mount --bind "$own" /mnt
mount -t tmpfs -o mode=1777 tmp /tmp
mount -o remount,bind,ro /
exec "$@"
"""


def settings_of(text):
    """The unit's settings: {section: {key: last value}}; lines that end in a backslash continue."""
    sections, section = {}, None
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if line.startswith("["):
            section = sections.setdefault(line.strip("[]"), {})
        elif line and not line.startswith(("#", ";")):
            key, value = line.split("=", 1)
            section[key] = value
    return sections


def can_filter_calls():
    return shutil.which("systemd-analyze") is not None and ctypes.util.find_library("seccomp") is not None


def calls_of(sets):
    """The system calls in sets like @system-service."""
    names, left = set(), ["@default", *sets.split()]
    while left:
        name = left.pop()
        if not name.startswith("@"):
            names.add(name)
            continue
        text = subprocess.run(["systemd-analyze", "syscall-filter", name], check=True, capture_output=True, text=True).stdout
        lines = [line.strip() for line in text.splitlines()[1:]]
        left += [line for line in lines if line and not line.startswith("#")]
    return sorted(names | {"execve", "exit_group"})


def seconds_of(value):
    number = value.removesuffix("s")
    assert number.isdigit(), value
    return int(number)


def start_command(service, installed, own):
    """The command that starts the unit in a mount namespace; `own` is a folder that it sees as /mnt."""
    program = shlex.split(service["ExecStart"])
    assert service["User"] == service["Group"] == "pqcached" and service["NoNewPrivileges"] == "yes"
    assert service["CapabilityBoundingSet"] == service["AmbientCapabilities"] == ""
    assert service["SystemCallErrorNumber"] == "EPERM"
    assert service["ProtectSystem"] == "strict" and service["PrivateTmp"] == "yes"
    calls = calls_of(service["SystemCallFilter"]) if can_filter_calls() else []
    library = ctypes.util.find_library("seccomp") if calls else ""
    ids = [f"--reuid={SERVICE_ID}", f"--regid={SERVICE_ID}", "--clear-groups"]
    descriptors = min(int(service["LimitNOFILE"]), resource.getrlimit(resource.RLIMIT_NOFILE)[1])  # a container may have less
    limited = ["prlimit", f"--nofile={descriptors}", "setpriv", *ids, "--no-new-privs", "--bounding-set=-all",
               "--inh-caps=-all", "--ambient-caps=-all", "sh", "-c", f'umask {service["UMask"]}; exec "$@"', "sh"]
    filtered = ["/usr/bin/python3", "-c", FILTERED, library, str(errno.EPERM), " ".join(calls)]
    return ["unshare", "--mount", "sh", "-c", IN_NAMESPACE, "sh", installed, own, service["RuntimeDirectory"],
            service["RuntimeDirectoryMode"], str(SERVICE_ID), *limited, *filtered, *program]


def environment_of(service, inherited):
    """What systemd would set, and what a sanitizer of the build needs."""
    kept = {name: inherited[name] for name in ("LD_LIBRARY_PATH", "ASAN_OPTIONS", "UBSAN_OPTIONS") if name in inherited}
    return {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "NOTIFY_SOCKET": "/mnt/notify",
            "WATCHDOG_USEC": str(1_000_000 * seconds_of(service["WatchdogSec"])), **kept}


def read_unit(path):
    return settings_of(pathlib.Path(path).read_text())
