"""LMCache's own storage manager of its server mode, over the L2 adapter. Usage: manager_test.py BUILD"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import unittest

import lmcache_case  # first
from lmcache_case import CHUNK_BYTES, LMCacheTest, Manager, needs_lmcache, wait_for

HERE = pathlib.Path(__file__).resolve()


def worker_of(daemon):
    """The process id of the daemon's worker; None while there is none."""
    pid = daemon.process.pid
    children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


@needs_lmcache
class ManagerTest(LMCacheTest):
    def test_the_next_manager_finds_what_the_last_one_has_stored(self):
        self.start()
        first = Manager(self.endpoint)
        first.write(range(6))
        first.close()
        self.assertEqual(self.manager().read(range(8)), (6, True))

    def test_two_processes_share_chunks(self):
        self.start()
        manager = self.manager()
        manager.write(range(3))
        other = subprocess.run([sys.executable, HERE, str(lmcache_case.daemons.BUILD), "--other", self.endpoint],
                               capture_output=True, text=True, check=True, timeout=300)
        self.assertEqual(json.loads(other.stdout.splitlines()[-1]), [3, True])
        self.assertEqual(manager.read(range(100, 104)), (2, True))

    def test_chunks_that_the_sidecar_has_evicted_are_missing(self):
        self.start()
        capacity = 2 << 20
        first = Manager(self.endpoint, capacity_bytes=capacity)
        for number in range(4 * capacity // CHUNK_BYTES):
            first.write([number])
        self.assertEqual(first.status()["refused"], 0)
        first.close()
        second = self.manager(capacity_bytes=capacity)
        self.assertEqual(second.read(range(2)), (0, True))
        last = 4 * capacity // CHUNK_BYTES - 1
        self.assertEqual(second.read([last]), (1, True))

    def test_a_killed_worker_loses_no_chunk(self):
        daemon = self.start()
        first = Manager(self.endpoint)
        for round in range(3):
            first.write(range(4 * round, 4 * round + 4))
            worker = worker_of(daemon)
            os.kill(worker, signal.SIGKILL)
            wait_for(lambda killed=worker: worker_of(daemon) not in (None, killed))
            wait_for(lambda: self.answers(first))
        stored = first.status()["stored"]
        first.close()
        second = self.manager()
        wait_for(lambda: self.answers(second))
        self.assertEqual((stored, second.read(range(12))), (12, (12, True)))

    def answers(self, manager):
        manager.read([9999])
        return manager.status()["available"]

    def test_a_killed_sidecar_is_a_miss_and_no_failure(self):
        daemon = self.start()
        first = Manager(self.endpoint)
        first.write(range(4))
        first.close()
        second = self.manager(timeout_ms=5000)
        self.assertEqual(second.read(range(2)), (2, True))
        daemon.stop(signal.SIGKILL)
        self.assertEqual(second.read(range(4)), (0, True))
        second.write(range(4, 6))
        self.assertEqual(second.read([4, 5]), (2, True))  # LMCache's own memory has them
        os.unlink(f"{self.folder}/s")
        self.start()
        second.write(range(6, 8))
        third = self.manager()
        self.assertEqual((third.read([6, 7]), third.read([4])), ((2, True), (0, True)))


def other_process(endpoint):
    manager = Manager(endpoint)
    print(json.dumps(manager.read(range(3))))
    manager.write([100, 101])
    manager.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--other"]:
        other_process(sys.argv[2])
    else:
        unittest.main()
