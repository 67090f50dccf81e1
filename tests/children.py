"""Child processes of the Python tests and of the programs that measure."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>
_prctl = ctypes.CDLL(None).prctl


def end_with_parent():
    """Makes the kernel kill the calling process when its parent ends: `preexec_fn` of a Popen, so that a test that is
    killed leaves no daemon behind."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
