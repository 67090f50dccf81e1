"""A CA, and certificates of a sidecar and of its clients, made by openssl."""

import subprocess

NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def run(*command):
    """Runs a program that must succeed."""
    return subprocess.run([str(word) for word in command], check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def make_certificates(folder, host, identities):
    """Writes ca.pem, server.pem, and NAME.pem of each of {NAME: identity} to a folder, each with its key (NAME.key)."""
    run("openssl", "req", "-x509", *NEW_KEY, "-keyout", folder / "ca.key", "-out", folder / "ca.pem", "-subj", "/CN=ca", "-days", "2")
    names = {"server": f"IP:{host}", **{name: f"URI:{identity}" for name, identity in identities.items()}}
    for name, alternative in names.items():
        (folder / "extensions").write_text(f"subjectAltName={alternative}\n")
        run("openssl", "req", *NEW_KEY, "-keyout", folder / f"{name}.key", "-out", folder / "request", "-subj", f"/CN={name}")
        run("openssl", "x509", "-req", "-in", folder / "request", "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key",
            "-CAcreateserial", "-out", folder / f"{name}.pem", "-days", "2", "-extfile", folder / "extensions")
