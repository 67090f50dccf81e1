"""The systemd unit starts as it is installed, and serves the members of its group only. Usage: unit_test.py BUILD"""

import contextlib
import os
import pathlib
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import unittest

import unit_file
from unit_file import MEMBER_ID, SERVICE_ID, STRANGER_ID

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from skip import skip_unless  # noqa: E402  (found in the line above)

BUILD = pathlib.Path(sys.argv.pop(1)).resolve()
STOP_SECONDS = 60
CONNECT = "import socket, sys; socket.socket(socket.AF_UNIX).connect(sys.argv[1])"


def install(folder, component, prefix="/usr"):
    """Installs into a folder as a package's build does."""
    subprocess.run(["cmake", "--install", BUILD, "--prefix", prefix, "--component", component], check=True,
                   stdout=subprocess.DEVNULL, env={**os.environ, "DESTDIR": str(folder)})


class InstalledTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.folder.chmod(0o755)  # as other users see an installation

    def unit(self, prefix="/usr"):
        return self.folder / prefix.lstrip("/") / "lib/systemd/system/pqcached.service"

    def test_what_the_unit_names_is_installed_with_it(self):
        for prefix, configuration in (("/usr", "/etc/pqcached.yaml"), ("/opt/pq", "/opt/pq/etc/pqcached.yaml")):
            install(self.folder, "daemon", prefix)
            command = shlex.split(unit_file.read_unit(self.unit(prefix))["Service"]["ExecStart"])
            self.assertEqual([command[0], command[command.index("--config") + 1]], [f"{prefix}/bin/pqcached", configuration])
            self.assertTrue(os.access(self.folder / command[0].lstrip("/"), os.X_OK))
            self.assertTrue((self.folder / configuration.lstrip("/")).is_file())

    def test_an_update_keeps_the_operators_configuration(self):
        install(self.folder, "daemon")
        (self.folder / "etc/pqcached.yaml").write_text("max_caches: 3\n")
        install(self.folder, "daemon")
        self.assertEqual((self.folder / "etc/pqcached.yaml").read_text(), "max_caches: 3\n")

    @skip_unless("systemd", shutil.which("systemd-analyze") and shutil.which("systemd-sysusers"), "systemd is not installed")
    def test_systemd_accepts_the_files(self):
        install(self.folder, "daemon")
        subprocess.run(["systemd-sysusers", f"--root={self.folder}", self.folder / "usr/lib/sysusers.d/pqcached.conf"],
                       check=True, capture_output=True)
        service = unit_file.read_unit(self.unit())["Service"]
        for names, name in (("passwd", service["User"]), ("group", service["Group"])):
            self.assertIn(f"{name}:x:", (self.folder / "etc" / names).read_text())
        # The unit, and not what it refers to: the program's path is that of this folder here.
        text = self.unit().read_text().replace("/usr/bin/pqcached", str(self.folder / "usr/bin/pqcached"))
        copy = self.folder / "pqcached.service"
        copy.write_text(text)
        done = subprocess.run(["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", copy], check=False,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        ours = [line for line in done.stdout.splitlines() if "pqcached" in line]
        self.assertEqual((ours, done.returncode), ([], 0), done.stdout)


def why_no_namespaces():
    """Why this process can make no mount namespace with an overlay in it, or ""."""
    done = subprocess.run(["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", "lowerdir=/usr:/etc", "/mnt"],
                          check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return "" if done.returncode == 0 else done.stdout.strip()


IS_ROOT = os.geteuid() == 0
WHY_NO_NAMESPACES = why_no_namespaces() if IS_ROOT else ""


@skip_unless("root", IS_ROOT, "only root can run the unit as its user")
@skip_unless("namespaces", not WHY_NO_NAMESPACES, f"no mount namespace: {WHY_NO_NAMESPACES}")
class RunningTest(unittest.TestCase):
    """The unit's ExecStart line under its settings, where /usr and /etc have what was installed."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.folder.chmod(0o755)
        cls.installed = cls.folder / "installed"
        for component in ("daemon", "client"):
            install(cls.installed, component)
        cls.service = unit_file.read_unit(cls.installed / "usr/lib/systemd/system/pqcached.service")["Service"]
        command = shlex.split(cls.service["ExecStart"])
        cls.endpoint = command[command.index("--listen") + 1]

    def setUp(self):
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        own = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        own.chmod(0o755)
        notified = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        notified.bind(str(own / "notify"))
        (own / "notify").chmod(0o666)
        self.log = own / "log"
        with self.log.open("wb") as log:
            self.daemon = subprocess.Popen(unit_file.start_command(self.service, self.installed, own), stdout=log, stderr=log,
                                           env=unit_file.environment_of(self.service, os.environ))
        stack.callback(self.daemon.wait)
        stack.callback(self.daemon.kill)
        ended = os.pidfd_open(self.daemon.pid)
        stack.callback(os.close, ended)
        messages = []
        while "READY=1" not in messages:
            readable = select.select([notified, ended], [], [])[0]
            if notified not in readable:
                self.fail(f"the daemon ended before READY=1:\n{self.log.read_text()}")
            messages += notified.recv(65536).decode().splitlines()

    def run_as(self, user, group, *command):
        """The exit status and output of a command as another user, in the daemon's namespace."""
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        done = subprocess.run(["nsenter", f"--mount=/proc/{self.daemon.pid}/ns/mnt", "setpriv", f"--reuid={user}",
                               f"--regid={user}", f"--groups={group}", *command], check=False, cwd="/",
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
        return done.returncode, done.stdout

    def sockets(self):
        path = self.endpoint.removeprefix("unix://")
        return path, f"{path}.broker"

    def status(self):
        text = pathlib.Path(f"/proc/{self.daemon.pid}/status").read_text()
        return dict(line.split(":\t", 1) for line in text.splitlines())

    def test_runs_under_the_settings_of_the_unit(self):
        status = self.status()
        self.assertEqual(set(status["Uid"].split()), {str(unit_file.SERVICE_ID)})
        self.assertEqual(set(status["Gid"].split()), {str(unit_file.SERVICE_ID)})
        self.assertEqual((status["Umask"], status["NoNewPrivs"]), (self.service["UMask"], "1"))
        self.assertEqual({int(status[name], 16) for name in ("CapBnd", "CapPrm", "CapEff", "CapInh", "CapAmb")}, {0})

    @skip_unless("systemd", unit_file.can_filter_calls(), "systemd-analyze or libseccomp is not installed")
    def test_runs_under_the_filter_of_system_calls(self):
        self.assertEqual(self.status()["Seccomp"], "2")

    def test_a_member_of_the_group_may_connect(self):
        for path in self.sockets():
            self.assertEqual(self.run_as(MEMBER_ID, SERVICE_ID, "/usr/bin/python3", "-c", CONNECT, path), (0, ""))
        status, output = self.ctl(MEMBER_ID, "--as-tenant", "default", "ls")
        self.assertEqual(status, 0, output + self.log.read_text())

    def ctl(self, user, *arguments):
        return self.run_as(user, SERVICE_ID, "/usr/bin/pqcachectl", "--endpoint", self.endpoint, *arguments)

    def test_operators_are_the_user_of_the_sidecar_and_root(self):
        status, output = self.ctl(SERVICE_ID, "ls")
        self.assertEqual(status, 0, output + self.log.read_text())
        status, output = self.ctl(MEMBER_ID, "ls")
        self.assertEqual(status, 1, output)
        self.assertIn("this user is no operator of the sidecar", output)

    def test_another_user_may_not(self):
        for path in self.sockets():
            status, output = self.run_as(STRANGER_ID, STRANGER_ID, "/usr/bin/python3", "-c", CONNECT, path)
            self.assertEqual(status, 1, output)
            self.assertIn("PermissionError: [Errno 13]", output)

    def test_sigterm_ends_it_cleanly(self):
        self.daemon.send_signal(signal.SIGTERM)
        self.assertEqual(self.daemon.wait(timeout=STOP_SECONDS), 0, self.log.read_text())


if __name__ == "__main__":
    unittest.main()
