#!/usr/bin/env python3
"""The figures of area `travel` about TLS: which refusals are tested, and what mutual TLS costs.

tls_rows.py BUILD --json FILE [--calls N]: two daemons serve the loopback, one by plain TCP and one by TLS with certificates of
both sides. A client of each makes the same calls in turn, N (400) of each kind: a small one, and one that loads 4 MiB of rows.

Rows: tls_refusals_tested = the refusals of TLS whose tests pass; mtls_calls_over_plain, mtls_loads_over_plain = the median time
of a call with mutual TLS over that of the same call without.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "client/python"), str(ROOT / "tests"), str(ROOT / "tests/client/travel")]

import children  # noqa: E402
import pqcached  # noqa: E402
from certificates import make_certificates  # noqa: E402

REFUSALS = ("RefusesAClientWithoutACertificate", "RefusesAnExpiredCertificate", "RefusesACertificateOfAnotherCa",
            "RefusesAnotherTenantThanThatOfTheCertificate", "RefusesPlainTextOnATlsPort", "ClosesAHandshakeThatDrips",
            "AStormOfHandshakesHarmsNoConnectedClient", "TenThousandHalfOpenConnectionsHarmNoClient",
            "AWithdrawnTokenIsRefusedFromTheNextCallOn")
HEADS, DIM, TOKENS = 8, 128, 1024  # 4 MiB of rows in fp16
WARM_UP = 20


def refusals_tested(build):
    """The number of refusals whose tests pass."""
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "report.json"
        subprocess.run([build / "tests/service/service_tls_test", f"--gtest_output=json:{report}"], stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL, check=False)
        tests = [test for suite in json.loads(report.read_text())["testsuites"] for test in suite["testsuite"]]
    passed = {test["name"] for test in tests if test["result"] == "COMPLETED" and "failures" not in test}
    return len(passed & set(REFUSALS))


def start(build, folder, *flags):
    """A daemon on a free port of the loopback, and its address."""
    daemon = subprocess.Popen([build / "service/pqcached", "--listen", f"unix://{folder}/s", "--max-pool-bytes", "256mib",
                               "--tcp-listen", "127.0.0.1:0", *flags], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              preexec_fn=children.end_with_parent)
    for line in daemon.stdout:
        found = re.search(r"event=ready .*?(127\.0\.0\.1:\d+)", line)
        if found:
            return daemon, found[1]
    raise RuntimeError("the daemon did not start")


def filled(client):
    group = pqcached.LayerGroup([0], HEADS, HEADS, DIM, DIM, pqcached.DType.F16)
    cache = client.open_cache("bench", model_fingerprint="bench", groups=[group], capacity_bytes=64 << 20)
    sequence = cache.create_sequence()
    rows = np.ones((TOKENS, HEADS, DIM), np.float16)
    sequence.ingest(0, 0, rows, rows)
    return sequence


def ratios(build, calls):
    """The two ratios of medians, and the number of calls of each."""
    with tempfile.TemporaryDirectory() as plain_folder, tempfile.TemporaryDirectory() as tls_folder:
        folder = pathlib.Path(tls_folder)
        make_certificates(folder, "127.0.0.1", {"bench": "pqcached://tenant/bench"})
        plain, plain_address = start(build, plain_folder, "--plain-tcp", "true")
        secured, tls_address = start(build, tls_folder, "--tls-certificate", folder / "server.pem", "--tls-key", folder / "server.key",
                                     "--tls-client-ca", folder / "ca.pem")
        try:
            clients = [pqcached.Client(plain_address, timeout_ms=60000),
                       pqcached.Client(tls_address, timeout_ms=60000, tls_ca=str(folder / "ca.pem"),
                                       tls_certificate=str(folder / "bench.pem"), tls_key=str(folder / "bench.key"))]
            sequences = [filled(client) for client in clients]
            out = (np.empty((TOKENS, HEADS, DIM), np.float16), np.empty((TOKENS, HEADS, DIM), np.float16))
            found = []
            for call in (lambda one: one.describe(), lambda one: one.load((0, TOKENS), {0: out})):
                times = ([], [])
                for number in range(calls + WARM_UP):
                    for way, sequence in enumerate(sequences):
                        begin = time.perf_counter()
                        call(sequence)
                        if number >= WARM_UP:
                            times[way].append(time.perf_counter() - begin)
                medians = [statistics.median(each) for each in times]
                print(f"plain {medians[0] * 1e6:.0f} us, mutual TLS {medians[1] * 1e6:.0f} us", flush=True)
                found.append(medians[1] / medians[0])
            for client in clients:
                client.close()
            return found
        finally:
            for daemon in (plain, secured):
                daemon.terminate()
                daemon.communicate()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--calls", type=int, default=400)
    arguments = parser.parse_args()
    build = arguments.build.resolve()
    small, large = ratios(build, arguments.calls)
    rows = [("tls_refusals_tested", refusals_tested(build), "count", "higher", len(REFUSALS), 1,
             "no, expired or foreign certificate, other tenant, plain text, drip, storm, 10^4 half-open connections, withdrawn token"),
            ("mtls_calls_over_plain", round(small, 3), "ratio", "lower", None, arguments.calls,
             "a small call over mutual TLS, over the same one over plain TCP, on the loopback"),
            ("mtls_loads_over_plain", round(large, 3), "ratio", "lower", None, arguments.calls,
             "a call that loads 4 MiB of rows, likewise")]
    arguments.json.write_text(json.dumps([
        {"area": "travel", "name": name, "value": value, "unit": unit, "better": better, "goal": goal, "against": against,
         "samples": samples, "spread": None} for name, value, unit, better, goal, samples, against in rows]))


if __name__ == "__main__":
    main()
