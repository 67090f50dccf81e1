"""Runs the test engine's programs against a daemon of its own, in a temporary directory."""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import children  # noqa: E402  (found in the line above)

STOP_SECONDS = 30


@contextlib.contextmanager
def running(build, *flags):
    """The endpoint of a daemon that lives as long as the context."""
    with tempfile.TemporaryDirectory() as directory:
        socket = pathlib.Path(directory, "pqcached.sock")
        daemon = subprocess.Popen([build / "service/pqcached", "--listen", f"unix://{socket}", *flags],
                                  stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  preexec_fn=children.end_with_parent)
        drain = None
        try:
            # The daemon says when it listens; its end closes the pipe.
            said = []
            for line in daemon.stdout:
                said.append(line)
                if "event=ready" in line:
                    break
            else:
                raise RuntimeError("the daemon did not start:\n" + "".join(said))
            drain = threading.Thread(target=daemon.stdout.read, daemon=True)  # a full pipe would stop the daemon
            drain.start()
            yield f"unix://{socket}"
        finally:
            daemon.terminate()
            daemon.wait(timeout=STOP_SECONDS)
            if drain:
                drain.join(timeout=STOP_SECONDS)
            daemon.stdout.close()


def report(build, data, lengths, tasks=None, contexts=0, questions=0):
    """The report of tinylm_report as a dict; 0 contexts or questions means all."""
    with running(build) as endpoint, tempfile.NamedTemporaryFile(suffix=".json") as out:
        command = [build / "tests/tinylm/tinylm_report", "--model", data / "model", "--prompts", data / "prompts_dev",
                   "--endpoint", endpoint, "--lengths", ",".join(map(str, lengths)), "--contexts", str(contexts),
                   "--questions", str(questions), "--json", out.name]
        if tasks:
            command += ["--tasks", ",".join(tasks)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return json.loads(pathlib.Path(out.name).read_text())


def reference(build, data):
    """How the engine compares with another implementation's outputs and logits, as a dict."""
    done = subprocess.run([build / "tests/tinylm/tinylm_reference", "--model", data / "model", "--prompts",
                           data / "prompts_dev", "--references", data / "reference_dev"],
                          check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)
