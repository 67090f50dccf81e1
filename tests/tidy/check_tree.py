"""Checks the folder rules of the tree: which folder may include which, names, sizes, and the files that a folder may hold.

Run as `check_tree.py ROOT`: prints one line per finding and exits with 1 when there is any.
The table below is the one of the README; the code of each rule says what it protects.
"""

import collections
import pathlib
import re
import subprocess
import sys

# The values and interfaces at the root of kvstore/, which all its folders use. "=" means without subfolders.
KVSTORE = {"=kvstore", "kvstore/read", "kernels"}
KVSTORE_FOLDERS = ("limits", "memory", "plugins", "records", "pages", "sequence", "checksum", "rows", "index", "share", "evict", "image", "store")  # lower ones first
KVSTORE_OTHERS = {"absl", "oneapi", "tbb", "liburing", "openssl", "curl"}


def kvstore_rules():
    """No folder includes a higher one."""
    for number, folder in enumerate(KVSTORE_FOLDERS, 1):
        yield f"kvstore/{folder}", (KVSTORE | {f"kvstore/{lower}" for lower in KVSTORE_FOLDERS[:number]}, KVSTORE_OTHERS)


# Folder -> what its files may include, of ours and of others. Longest prefix wins.
MAY_INCLUDE = {
    "kernels/base/simd": ({"kernels/base"}, set()),
    "kernels/base": ({"kernels/base"}, set()),
    "kernels/rows": ({"kernels/rows", "kernels/base"}, set()),
    "kernels/attend": ({"kernels/attend", "kernels/base"}, set()),
    "kernels/select/exact": ({"kernels/select/exact", "kernels/attend", "kernels/base"}, set()),
    "kernels/select": ({"kernels/select", "kernels/base"}, set()),
    "kernels/train": ({"kernels/train", "kernels/select", "kernels/base"}, set()),
    "kernels": ({"kernels"}, set()),
    "gpu": ({"gpu", "kernels"}, {"cuda"}),
    "kvstore/read": ({"kvstore/read", "kernels"}, set()),
    "kvstore": (KVSTORE, KVSTORE_OTHERS),
    **dict(kvstore_rules()),
    "kvstore/plugins/include": (set(), set()),
    "kvstore/plugins/example": ({"pqcached"}, set()),  # a copy of the folder compiles
    "proto/codec": ({"proto/codec", "kvstore/read", "kernels", "pqcached/v1"}, set()),
    "service/base": ({"service/base", "kvstore", "kernels"}, {"absl", "spdlog"}),
    "service/config": ({"service/config", "service/base", "kvstore", "kernels"}, {"absl", "CLI", "yaml-cpp"}),
    "service/rdma": ({"service/rdma", "service/base", "kvstore", "kernels"}, {"absl", "boost", "infiniband", "rdma"}),
    "service/supervise": ({"service/supervise", "service/base", "kvstore", "kernels"}, {"absl"}),
    "service/session": (
        {"service/session", "service/supervise", "service/config", "service/base", "kvstore", "kernels"}, {"absl", "boost"}),
    "service/tls": ({"service/tls", "service/session", "service/base", "kvstore", "kernels"}, {"absl", "boost", "openssl"}),
    "service/wire": (
        {"service/wire", "service/session", "service/base", "proto/codec", "kvstore", "kernels", "pqcached/v1"}, {"absl", "google"}),
    "service/handlers": (
        {"service/handlers", "service/wire", "service/session", "service/config", "service/base", "proto/codec", "kvstore",
         "kernels", "pqcached/v1"}, {"absl"}),
    "service/rpc": (
        {"service/rpc", "service/handlers", "service/wire", "service/tls", "service/session", "service/supervise", "service/config",
         "service/base", "kvstore", "kernels", "pqcached/v1"}, {"absl", "google", "grpc", "grpcpp"}),
    "service": ({"service", "kvstore", "kernels"}, {"absl"}),
    "client/include": ({"pqcached"}, set()),
    "client/base": ({"client/base", "kvstore/read", "kernels", "pqcached"}, set()),
    "client/local": ({"client/local", "client/base", "kvstore/read", "kernels", "pqcached"}, set()),
    "client/rpc": (
        {"client/rpc", "client/base", "proto/codec", "kvstore/read", "kernels", "pqcached/v1", "pqcached"},
        {"absl", "grpc", "grpcpp", "google"},
    ),
    "client/step": ({"client/step", "client/local", "client/base", "kvstore/read", "kernels", "gpu", "pqcached"}, set()),
    "client/gpu": (
        {"client/gpu", "client/step", "client/local", "client/base", "kvstore/read", "kernels", "gpu", "pqcached"}, set()),
    "client/abi": (
        {"client/abi", "client/gpu", "client/step", "client/local", "client/base", "kvstore/read", "kernels", "gpu", "pqcached"},
        set(),
    ),
    "client/ctl": ({"client/ctl", "kvstore/read", "kernels", "pqcached"}, {"CLI", "nlohmann"}),
    "client/conform": ({"client/conform", "pqcached"}, {"CLI", "nlohmann"}),
    "client/engines/llama": ({"client/engines/llama", "kernels", "pqcached"}, set()),
    "client/examples": ({"pqcached", "."}, set()),  # a header next to the program, so that a copy of the folder compiles
    "client": ({"pqcached"}, set()),
    "tests": (None, None),  # anything
}
TOP_LEVEL = {
    "CMakeLists.txt", "CMakePresets.json", "LICENSE", "README.md",
    "proto", "service", "client", "kvstore", "gpu", "kernels", "deploy", "tests",
}
JUNK_DRAWERS = {"utils", "util", "common", "helpers", "helper", "misc", "types.h", "utils.h", "common.h"}
LINE_LIMIT = 600  # past it a file is surely two things
FILE_LIMIT = 28  # past it a folder shows no structure
UNIT_LIMIT = 25  # a unit is a header with its sources
FOLDERS_OF_FEW_FILES = (
    "kernels", "gpu", "kvstore", "service", "client", "tests/kernels", "tests/kvstore", "tests/service", "tests/client", "tests/tinylm")
SOURCES = {".h", ".hpp", ".cc", ".cu"}
HEADERS = {".h", ".hpp", ".cuh"}
STANDARD_WITH_SLASH = ("sys/", "linux/", "arpa/", "netinet/", "net/", "bits/", "asm/", "sanitizer/")
# Wall time jumps, so what waits or counts time uses a steady clock (kvstore/clock.h). Waits of absl end at a wall time even
# when they are given a duration, and gRPC's alarms wait by absl; high_resolution_clock is the wall clock of libstdc++.
STEADY = ("kvstore/", "service/", "client/", "gpu/", "kernels/")
WALL_CLOCK = re.compile(
    r"\babsl::(?:Now|GetCurrentTimeNanos|Time)\b|\b(?:system_clock|high_resolution_clock|CLOCK_REALTIME\w*|GPR_CLOCK_REALTIME)\b"
    r"|\bgettimeofday\b|\bgrpc::Alarm\b|\btime\s*\(\s*(?:nullptr|NULL|0)\s*\)"
    r"|\b(?:WaitForNotification|Await|LockWhen|ReaderLockWhen|Wait)With(?:Timeout|Deadline)\b")
MAY_READ_THE_WALL_CLOCK = set()  # files that tell people the time; spdlog does it for the log
# The second one: PQCACHED_RECORD alone. A plug-in of llama.cpp has no other place for its settings.
MAY_READ_THE_ENVIRONMENT = {"service/base/environment.cc", "client/base/call_log.cc", "client/engines/llama/settings.cc"}
GETENV = re.compile(r"\b(?:secure_)?getenv\s*\(")
# Callers decide by the code, field and retry time of an error, which kvstore/refusal.h gives to every one.
REFUSALS = ("kvstore/", "service/")
MAY_MAKE_STATUSES = {"kvstore/refusal.cc"}
BARE_STATUS = re.compile(
    r"\babsl::\w+Error\s*\("
    r"|\babsl::Status\s*(?:\w+\s*)?[({]\s*(?:absl::StatusCode::\w+|static_cast<absl::StatusCode>\([^;]*?\)|[\w.>()-]*\bcode\b[()]*)\s*,")
CALLED_MESSAGE = r"\b(?:message|error_message|pqc_last_error)\s*\(\s*\)"
MESSAGE = rf"(?:{CALLED_MESSAGE}|(?:\.|->)text\b)"
ARGUMENTS = r"(?:[^;()]|\((?:[^;()]|\([^;()]*\))*\)|\w+\()*?"  # also of a call that is not closed yet
MATCH = r"(?:find\w*|rfind|starts_with|ends_with|contains|compare)"
MATCHED_MESSAGE = re.compile(
    rf"\b(?:StartsWith|EndsWith|StrContains|starts_with|ends_with|find|rfind|strstr|strcmp|strncmp|regex_\w+)\s*\({ARGUMENTS}{MESSAGE}"
    rf"|{MESSAGE}[\s)}}]*(?:\.|->)\s*{MATCH}\s*\("
    rf"|{CALLED_MESSAGE}\s*[!=]=")
COMMENT = re.compile(r"//.*")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def rule_of(path):
    parts = str(path)
    best = max((p for p in MAY_INCLUDE if parts == p or parts.startswith(p + "/")), key=len, default=None)
    return MAY_INCLUDE.get(best)


def include_findings(path, text):
    rule = rule_of(path)
    if rule is None:
        return
    ours, others = rule
    for number, line in enumerate(text.splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        kind, target = match.groups()
        if str(path).startswith("tests/"):
            continue
        if target.startswith(("service/", "tests/")) and not str(path).startswith(target.split("/")[0] + "/"):
            yield f"{path}:{number}: nothing includes {target.split('/')[0]}/"
            continue
        if kind == '"':
            folder = str(pathlib.PurePath(target).parent)
            is_ours = any(folder == o.lstrip("=") or (not o.startswith("=") and o != "pqcached" and folder.startswith(o + "/")) for o in ours)
            if not is_ours and target.split("/")[0] not in others:
                yield f"{path}:{number}: may not include {target}; allowed: {', '.join(sorted(ours))}"
        elif "/" in target and not target.startswith(STANDARD_WITH_SLASH):
            package = target.split("/")[0]
            if package == "pqcached" and "pqcached" in ours:
                continue
            if package not in others:
                yield f"{path}:{number}: may not include <{target}>; allowed: {', '.join(sorted(others)) or 'std only'}"


def guard_finding(path, text):
    if path.suffix != ".h" or path.parent.match("include/pqcached"):  # public headers, and those of earlier versions
        return
    guard = "PQCACHED_" + re.sub(r"[^A-Za-z0-9]", "_", str(path)).upper() + "_"
    if f"#ifndef {guard}\n" not in text:
        yield f"{path}:1: include guard must be {guard}"


def clock_findings(path, text):
    if not str(path).startswith(STEADY) or str(path) in MAY_READ_THE_WALL_CLOCK:
        return
    for number, line in enumerate(text.splitlines(), 1):
        found = WALL_CLOCK.search(COMMENT.sub("", line))
        if found:
            yield f"{path}:{number}: {found.group()} follows the wall clock, which jumps; use kvstore/clock.h or std::chrono::steady_clock"


def refusal_findings(path, text):
    """Errors that lack a field, and code that looks for something in the words of one. Calls may span lines."""
    name = str(path)
    code = "\n".join(COMMENT.sub("", line) for line in text.splitlines())

    def line_of(match):
        return code.count("\n", 0, match.start()) + 1

    if name.startswith(REFUSALS) and name not in MAY_MAKE_STATUSES:
        for found in BARE_STATUS.finditer(code):
            yield f"{path}:{line_of(found)}: a status without a field; make it by kvstore/refusal.h"
    if name.startswith((*REFUSALS, "client/")):
        for found in MATCHED_MESSAGE.finditer(code):
            yield f"{path}:{line_of(found)}: looks into the words of a message; a refusal has a code, a field and a retry time"


def source_findings(path, text):
    yield from refusal_findings(path, text)
    yield from include_findings(path, text)
    yield from guard_finding(path, text)
    yield from clock_findings(path, text)
    lines = text.count("\n")
    if lines > LINE_LIMIT:
        yield f"{path}: {lines} lines; split it by meaning (limit {LINE_LIMIT})"
    if not str(path).startswith("tests/") and str(path) not in MAY_READ_THE_ENVIRONMENT and GETENV.search(text):
        yield f"{path}: getenv belongs to {' and '.join(sorted(MAY_READ_THE_ENVIRONMENT))} alone"
    if re.search(r"\b(TODO|FIXME|XXX)\b(?!.*when)", text):
        yield f"{path}: a TODO says what, and when it is done"


def units(paths):
    """The headers with their sources (a.h, a.cc, a_avx2.cc are one), and the files that belong to none."""
    headers = {path.stem for path in paths if path.suffix in HEADERS}
    found = set()
    for path in paths:
        own = [header for header in headers if path.stem == header or path.stem.startswith(header + "_")]
        found.add(max(own, key=len) if own else path.stem)
    return found


def folder_findings(files):
    folders = collections.defaultdict(list)
    for path in files:
        folders[path.parent].append(path)
    for folder, paths in sorted(folders.items()):
        if not any(folder.is_relative_to(each) for each in FOLDERS_OF_FEW_FILES):
            continue
        if len(paths) > FILE_LIMIT:
            yield f"{folder}: {len(paths)} files; split it by meaning (limit {FILE_LIMIT})"
        if len(units(paths)) > UNIT_LIMIT:
            yield f"{folder}: {len(units(paths))} units; split it by meaning (limit {UNIT_LIMIT})"


def findings(root, files):
    for path in files:
        top = path.parts[0]
        if top not in TOP_LEVEL and not top.startswith("."):
            yield f"{path}: {top} does not belong at the top level"
        for part in path.parts:
            if part in JUNK_DRAWERS:
                yield f"{path}: {part} is a junk drawer; name it by what it is about"
        if path.suffix in SOURCES:
            yield from source_findings(path, (root / path).read_text(encoding="utf-8"))
    yield from folder_findings(files)
    folders = {path.parts[0] for path in files if len(path.parts) > 1 and not path.parts[0].startswith(".")}
    for folder in sorted(folders):
        if pathlib.PurePath(folder, "README.md") not in files:
            yield f"{folder}: has no README.md"


def tracked_files(root):
    listing = subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True, check=True)
    return [pathlib.PurePath(line) for line in listing.stdout.splitlines() if (root / line).is_file()]


def main():
    root = pathlib.Path(sys.argv[1])
    found = list(findings(root, tracked_files(root)))
    print("\n".join(found) if found else "tree is tidy")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
