"""What may happen to a sidecar, at random instants: its worker or all of it is killed, it is frozen, absent, late, or full."""

import collections
import contextlib
import random
import signal
import threading

from daemon import Daemon

LONGEST_PAUSE = 3.0  # seconds between events
LONGEST_ABSENCE = 0.6
LONGEST_FREEZE = 0.5
# The supervisor doubles its pause before each restart of a worker. A new one begins with a short pause.
MOST_RESTARTS = 4
FULL = ("--max-pool-bytes", "64mib")  # too few for four sequences
EVENTS = ("worker killed", "sidecar killed", "frozen")


@contextlib.contextmanager
def beside(work):
    """Runs `work` (None: nothing) on a thread until its argument, an event, is set at the end."""
    ended = threading.Event()
    thread = threading.Thread(target=work or (lambda _: None), args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Kills:
    """A thread in which a number of events happen to a sidecar. `counts`: how often each event has happened."""

    def __init__(self, build, socket, number, seed=5):
        self._build = build
        self._socket = socket
        self._number = number
        self._random = random.Random(seed)
        self._ends = threading.Event()
        self._error = None
        self.counts = collections.Counter()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def happened(self):
        return sum(self.counts[event] for event in EVENTS)

    def is_running(self):
        return self._thread.is_alive()

    def end(self):
        """Ends the events, and raises what has gone wrong with them."""
        self._ends.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self):
        try:
            self._let_happen()
        except Exception as error:  # raised on the thread that ends the events
            self._error = error

    def _pause(self, longest):
        self._ends.wait(self._random.uniform(0, longest))

    def _let_happen(self):
        daemon = self._start()
        restarts = 0
        while self.happened() < self._number and not self._ends.is_set():
            self._pause(LONGEST_PAUSE)
            event = self._random.choices(EVENTS, (6, 1, 1))[0]
            if restarts == MOST_RESTARTS:
                event = "sidecar killed"
            if event == "worker killed":
                if not daemon.kill_worker():
                    continue  # it is being restarted
                restarts += 1
            elif event == "frozen":
                daemon.send(signal.SIGSTOP)
                self._pause(LONGEST_FREEZE)
                daemon.send(signal.SIGCONT)
            else:
                daemon.kill()
                self._pause(LONGEST_ABSENCE)
                daemon = self._start()
                restarts = 0
            self.counts[event] += 1
        daemon.stop()

    def _start(self):
        is_full = self._random.random() < 0.2
        self.counts["started with a small pool" if is_full else "started"] += 1
        return Daemon(self._build, self._socket, *(FULL if is_full else ()))
