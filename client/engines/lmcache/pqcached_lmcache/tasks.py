"""Tasks that threads of their own do, with a limit on those that wait."""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Dict, Generic, Optional, TypeVar

_log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class TaskQueue(Generic[_Result]):
    """Does tasks in their order, on one thread, and keeps each result until it is taken.

    on_done: called after each task, on any thread. most_waiting: tasks that wait or are in progress;
    a task beyond it ends at once with its result for a failure, so that waiting tasks hold a limited
    number of LMCache's memory objects.
    """

    def __init__(self, name: str, on_done: Callable[[], None], most_waiting: int) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=f"pqcached-{name}")
        self._name, self._on_done, self._most_waiting = name, on_done, most_waiting
        self._ids = itertools.count()
        self._lock = threading.Lock()  # guards the fields below
        self._waiting = 0
        self._results: Dict[int, _Result] = {}

    def submit(self, work: Callable[[], _Result], failed: Callable[[], _Result]) -> int:
        """Returns the number of the new task. failed: makes the result of a task that raises, or is
        not done.
        """
        with self._lock:
            number = next(self._ids)
            accepted = self._waiting < self._most_waiting
            self._waiting += accepted
        if accepted:
            try:
                self._executor.submit(self._do, number, work, failed)
                return number
            except RuntimeError:  # it was shut down
                with self._lock:
                    self._waiting -= 1
        self._finish(number, failed())
        return number

    def take(self, number: int) -> Optional[_Result]:
        """Removes and returns a task's result; None if it is not done."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> Dict[int, _Result]:
        with self._lock:
            results, self._results = self._results, {}
            return results

    def close(self) -> None:
        """Waits for the task in progress, and drops the others."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def _do(self, number: int, work: Callable[[], _Result], failed: Callable[[], _Result]) -> None:
        try:
            result = work()
        except Exception:  # an engine does not fail because its store does
            _log.exception("pqcached: a task of %s has failed", self._name)
            result = failed()
        with self._lock:
            self._waiting -= 1
        self._finish(number, result)

    def _finish(self, number: int, result: _Result) -> None:
        with self._lock:
            self._results[number] = result
        self._on_done()
