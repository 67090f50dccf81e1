"""A running sidecar, which a test kills, freezes and starts again."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from children import end_with_parent  # noqa: E402


class Daemon:
    """Ends with the thread that has started it, at the latest."""

    def __init__(self, build, socket, *flags):
        self.endpoint = f"unix://{socket}"
        self.process = subprocess.Popen(
            [build / "service/pqcached", "--listen", self.endpoint, "--threads", "1", "--shutdown-timeout", "2s", *flags],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=end_with_parent)
        for line in self.process.stdout:
            if "event=ready" in line:
                break
        else:
            raise RuntimeError("the daemon did not start")
        self._reader = threading.Thread(target=self.process.stdout.read, daemon=True)  # a full pipe would stop it
        self._reader.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def workers(self):
        """The supervisor's worker; nothing while it is restarted."""
        try:
            children = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:  # the supervisor has ended
            return []
        return [int(child) for child in children.split()]

    def processes(self):
        """The supervisor and its worker; none when they have ended."""
        return [] if self.process.poll() is not None else [self.process.pid, *self.workers()]

    def kill_worker(self):
        """Kills the worker. Returns whether there was one."""
        workers = self.workers()
        for process in workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        return bool(workers)

    def kill(self):
        """Kills the supervisor and its worker."""
        self.send(signal.SIGKILL)
        self.process.wait()
        self._close()

    def send(self, number):
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def stop(self):
        self.send(signal.SIGCONT)
        self.process.terminate()
        self.process.wait(timeout=30)
        self._close()

    def _close(self):
        self._reader.join(timeout=30)
        self.process.stdout.close()
