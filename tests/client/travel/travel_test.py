"""The conformance suite of the client's remote path over TCP: programs that also run locally and remotely, as they are.

travel_test.py tcp FOLDER  Plain TCP on the loopback of a network namespace of its own.
travel_test.py tls FOLDER  TLS between two network namespaces, one with the daemons and one with the clients: two hosts.
FOLDER has the programs.
"""

import atexit
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parents[2])]

import skip  # noqa: E402  (found in the line above)
from certificates import make_certificates, run  # noqa: E402

WAY, FOLDER = sys.argv.pop(1), pathlib.Path(sys.argv.pop(1)).resolve()
PROGRAMS = ("client_daemon_test", "client_daemon_step_test")
SERVER, CLIENT = (f"pqc-{os.getpid()}-{name}" for name in ("server", "client"))
HOST = "127.0.0.1" if WAY == "tcp" else "10.77.0.1"
# Calls that plain TCP does not carry: DropCache and Evict.
FILTER = "*/Remote*" if WAY == "tls" else "*/Remote*-*ADroppedCacheIsGone*:*RanksMakeOneSequence*"
CLIENTS = {tenant: f"pqcached://tenant/{tenant}" for tenant in ("default", "other-tenant")}


def in_namespace(name):
    return [shutil.which("ip"), "netns", "exec", name]


def missing():
    """The reason why this machine cannot have the namespaces; none: it can."""
    if not shutil.which("ip") or not shutil.which("openssl"):
        return "ip (Debian: iproute2) or openssl is not installed"
    try:
        run("ip", "netns", "add", SERVER)
        run("ip", "netns", "add", CLIENT)
        run("ip", "link", "add", "server", "netns", SERVER, "type", "veth", "peer", "name", "client", "netns", CLIENT)
    except subprocess.CalledProcessError as error:
        remove_namespaces()
        return error.stdout.strip()
    for name in (SERVER, CLIENT):
        run("ip", "-n", name, "link", "set", "lo", "up")
    for name, device, address in ((SERVER, "server", "10.77.0.1/24"), (CLIENT, "client", "10.77.0.2/24")):
        run("ip", "-n", name, "address", "add", address, "dev", device)
        run("ip", "-n", name, "link", "set", device, "up")
    return ""


def remove_namespaces():
    for name in (SERVER, CLIENT):
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def received_bytes():
    """Bytes that the namespace of the daemons has received by the device that the way uses."""
    device = "lo" if WAY == "tcp" else "server"
    where = CLIENT if WAY == "tcp" else SERVER
    text = run(*in_namespace(where), "cat", f"/sys/class/net/{device}/statistics/rx_bytes").stdout
    return int(text)


atexit.register(remove_namespaces)
REASON = missing()


@skip.skip_unless("namespaces", not REASON, REASON)
class TravelTest(unittest.TestCase):
    def test_the_suite_passes(self):
        with tempfile.TemporaryDirectory() as folder:
            environment = {**os.environ, "PQCACHED_TEST_TCP_HOST": HOST}
            if WAY == "tls":
                make_certificates(pathlib.Path(folder), HOST, CLIENTS)
                environment["PQCACHED_TEST_TLS"] = folder
                environment["PQCACHED_TEST_TCP_COMMAND"] = " ".join(in_namespace(SERVER))
            for program in PROGRAMS:
                with self.subTest(program=program):
                    before = received_bytes()
                    ended = subprocess.run([*in_namespace(CLIENT), FOLDER / program, f"--gtest_filter={FILTER}"],
                                           env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
                    self.assertEqual(ended.returncode, 0, ended.stdout)
                    self.assertNotIn("[==========] 0 tests", ended.stdout, "the program has no test of the remote path")
                    self.assertGreater(received_bytes() - before, 100_000, "the rows have taken another way")


if __name__ == "__main__":
    unittest.main()
