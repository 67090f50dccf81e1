"""TLS and tokens, as clients in Python and pqcachectl use them.

tls_test.py BUILD_FOLDER PQCACHECTL [unittest's arguments]
"""

import pathlib
import subprocess
import sys
import tempfile
import unittest

from daemon import SOURCE, Daemon, group  # finds pqcached: first

import pqcached

CTL = sys.argv.pop(1)
sys.path.insert(0, str(SOURCE / "tests/client/travel"))

from certificates import make_certificates  # noqa: E402  (found in the line above)

TOKEN = "0123456789abcdef-of-team-a"


class TlsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        make_certificates(cls.folder, "127.0.0.1", {"a": "pqcached://tenant/team-a", "operator": "pqcached://operator"})
        cls.tokens = cls.folder / "tokens"
        cls.tokens.write_text(f"{TOKEN} pqcached://tenant/team-a\n")
        (cls.folder / "token").write_text(TOKEN + "\n")
        log = cls.folder / "log"
        daemon = Daemon(cls.folder, ("--tcp-listen", "127.0.0.1:0", "--tls-certificate", cls.file("server.pem"), "--tls-key",
                                     cls.file("server.key"), "--tls-client-ca", cls.file("ca.pem"), "--token-file", str(cls.tokens),
                                     "--handshake-timeout", "1m", "--log-file", str(log)), log)
        cls.addClassCleanup(daemon.stop)
        ready = next(line for line in log.read_text().splitlines() if "event=ready" in line)
        cls.address = ready.split("endpoint=")[1].split()[0].strip('"').split(",")[1]

    @classmethod
    def file(cls, name):
        return str(cls.folder / name)

    def client(self, name=None, **named):
        if name:
            named |= {"tls_certificate": self.file(f"{name}.pem"), "tls_key": self.file(f"{name}.key")}
        return pqcached.Client(self.address, timeout_ms=60000, tls_ca=self.file("ca.pem"), **named)

    def ctl(self, *arguments):
        return subprocess.run([CTL, "--endpoint", self.address, "--tls-ca", self.file("ca.pem"), *arguments], capture_output=True,
                              text=True, check=False)

    def test_a_certificate_or_a_token_names_the_tenant(self):
        for named in ({"name": "a"}, {"token_file": self.file("token")}):
            with self.subTest(**named), self.client(**named) as client:
                with client.open_cache("shared", model_fingerprint="f", groups=[group()], capacity_bytes=16 << 20) as cache:
                    self.assertEqual(cache.create_sequence().describe().token_count, 0)
        listed = self.ctl("--tls-certificate", self.file("operator.pem"), "--tls-key", self.file("operator.key"), "ls")
        self.assertEqual(listed.returncode, 0, listed.stderr)
        self.assertIn("team-a", listed.stdout)
        self.assertEqual(self.ctl("--as-tenant", "team-a", "--token-file", self.file("token"), "ls").returncode, 0)

    def test_refusals_name_the_option(self):
        with self.assertRaises(pqcached.PermissionDenied) as caught:
            self.client("a", tenant="team-b")
        self.assertEqual(caught.exception.field, "options.tenant")
        with self.assertRaises(pqcached.Unauthenticated) as caught:
            self.client()
        self.assertEqual(caught.exception.field, "options.token_file")
        (self.folder / "malformed").write_bytes(b"\xef\xbb\xbf" + TOKEN.encode())
        with self.assertRaises(pqcached.Unauthenticated) as caught:
            self.client(token_file=self.file("malformed"))
        self.assertEqual(caught.exception.field, "options.token_file")
        with self.assertRaises(pqcached.InvalidArgument) as caught:
            self.client(token_file=self.file("no-such-file"))
        self.assertEqual(caught.exception.field, "options.token_file")
        with self.assertRaises(pqcached.Unavailable):
            self.client("a", tls_server_name="another.example.org")
        self.assertEqual(self.ctl("drain").returncode, 1, "without an identity")

    def test_a_withdrawn_token_ends_at_the_next_call(self):
        text = self.tokens.read_text()
        self.addCleanup(self.tokens.write_text, text)
        with self.client(token_file=self.file("token")) as client:
            cache = client.open_cache("withdrawn", model_fingerprint="f", groups=[group()], capacity_bytes=16 << 20)
            self.tokens.write_text("")
            with self.assertRaises(pqcached.Unauthenticated):
                cache.create_sequence()


if __name__ == "__main__":
    unittest.main()
