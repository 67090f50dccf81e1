"""The command of client/engines/lmcache/README.md: LMCache's server with the L2 adapter. Usage: server_test.py BUILD"""

import json
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import unittest
import urllib.request

import lmcache_case  # first
from lmcache_case import TESTS, LMCacheTest, needs_lmcache, wait_for

README = TESTS.parent / "client/engines/lmcache/README.md"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def command_of_readme(endpoint, **parameters):
    """The README's command as a list, with our endpoint, little memory and free ports."""
    text = re.search(r"^ +(lmcache server .*?)\n\n", README.read_text(), re.M | re.S).group(1)
    words = shlex.split(text.replace("\\\n", " "))
    words[0] = str(pathlib.Path(sys.executable).parent / "lmcache")
    adapter = json.loads(words[words.index("--l2-adapter") + 1])
    adapter["adapter_params"].update(endpoint=endpoint, capacity_bytes=64 << 20, **parameters)
    words[words.index("--l2-adapter") + 1] = json.dumps(adapter)
    words[words.index("--l1-size-gb") + 1] = "0.1"
    return [*words, "--host", "127.0.0.1", "--port", str(free_port())]


@needs_lmcache
class ServerTest(LMCacheTest):
    def begin(self, port, **parameters):
        path = os.pathsep.join(str(TESTS.parent / folder) for folder in ("client/python", "client/engines/lmcache"))
        with open(f"{self.folder}/log", "w", encoding="utf-8") as log:
            server = subprocess.Popen([*command_of_readme(self.endpoint, **parameters), "--http-port", str(port)],
                                      stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": path},
                                      preexec_fn=lmcache_case.daemons.children.end_with_parent)
        self.addCleanup(server.wait, 60)
        self.addCleanup(server.send_signal, signal.SIGKILL)
        return server

    def log(self):
        return pathlib.Path(f"{self.folder}/log").read_text()

    def test_the_command_of_the_readme_starts_a_server_with_the_adapter(self):
        self.start()
        port = free_port()
        server = self.begin(port)

        def status():
            self.assertIsNone(server.poll(), self.log())
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/status", timeout=5) as answer:
                    return json.load(answer)
            except OSError:
                return None
        (adapter,) = wait_for(status)["storage_manager"]["l2_adapters"]
        self.assertEqual((adapter["type"], adapter["is_healthy"]), ("pqcached", True))

    def test_a_wrong_setting_ends_the_server(self):
        self.assertNotEqual(self.begin(free_port(), capacity=1).wait(120), 0)
        self.assertIn("capacity: unknown; known are", self.log())


if __name__ == "__main__":
    unittest.main()
