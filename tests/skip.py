"""Skips of the Python tests, with the lines that skips.py collects."""

import functools
import unittest


def skip_unless(name, condition, reason):
    """Skips the decorated test, or class of tests, for want of `name`, one of skips.REQUIREMENTS."""
    def decorated(test):
        if condition:
            return test
        lines = [f"SKIPPED {name}: {reason}", *getattr(test, "skip_lines", [])]  # one for each of several decorators

        def skipped(*_):
            print(*lines, sep="\n", flush=True)
            raise unittest.SkipTest(reason)

        if isinstance(test, type):
            test.setUpClass = classmethod(skipped)
        else:
            test = functools.wraps(test)(skipped)
        test.skip_lines = lines
        return test
    return decorated
