"""Each rule of check_tree must find what it is there to find."""

import pathlib
import tempfile
import unittest

import check_tree


class CheckTreeTest(unittest.TestCase):
    def found_in(self, files):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            for name, text in files.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            names = [pathlib.PurePath(name) for name in files]
            return list(check_tree.findings(root, names))

    def assert_finds(self, words, files):
        found = self.found_in(files)
        self.assertTrue(any(words in line for line in found), f"{words!r} not in {found}")

    def test_a_tidy_tree_has_no_findings(self):
        self.assertEqual([], self.found_in({
            "kernels/README.md": "numbers",
            "kernels/a.h": "#ifndef PQCACHED_KERNELS_A_H_\n#define PQCACHED_KERNELS_A_H_\n#include <cstdint>\n#endif\n",
            "kernels/a.cc": '#include "kernels/a.h"\n',
        }))

    def test_kernels_may_not_include_the_store_or_a_third_party(self):
        self.assert_finds("may not include kvstore/memory/pool.h", {"kernels/a.cc": '#include "kvstore/memory/pool.h"\n'})
        self.assert_finds("may not include <absl/status/status.h>", {"kernels/a.cc": "#include <absl/status/status.h>\n"})
        self.assert_finds("may not include absl/status/status.h", {"kernels/a.cc": '#include "absl/status/status.h"\n'})

    def test_the_read_view_may_not_include_the_rest_of_the_store(self):
        self.assert_finds("may not include kvstore/memory/pool.h", {"kvstore/read/a.cc": '#include "kvstore/memory/pool.h"\n'})

    def test_no_room_of_the_store_includes_a_higher_one(self):
        self.assert_finds("may not include kvstore/index/builder.h", {"kvstore/sequence/a.cc": '#include "kvstore/index/builder.h"\n'})
        self.assert_finds("may not include kvstore/memory/pool.h", {"kvstore/a.cc": '#include "kvstore/memory/pool.h"\n'})
        self.assertEqual([], self.found_in({
            "kvstore/README.md": "",
            "kvstore/index/a.cc": '#include "kvstore/values.h"\n#include "kvstore/index/b.h"\n#include "kvstore/sequence/c.h"\n'}))

    def test_a_folder_holds_28_files_and_25_units(self):
        self.assert_finds("kernels/x: 29 files", {f"kernels/x/a_{number}.cc": "" for number in range(28)} | {"kernels/x/README.md": ""})
        self.assert_finds("kernels/x: 26 units", {f"kernels/x/a{number}.cc": "" for number in range(26)})
        one_unit = {f"kernels/x/a_{level}.cc": "" for level in range(26)}
        guard = "#ifndef PQCACHED_KERNELS_X_A_H_\n"
        self.assertEqual([], self.found_in({"kernels/README.md": "", "kernels/x/a.h": guard} | one_unit))

    def test_the_store_may_not_include_grpc_and_nothing_includes_the_service(self):
        self.assert_finds("may not include <grpcpp/grpcpp.h>", {"kvstore/a.cc": "#include <grpcpp/grpcpp.h>\n"})
        self.assert_finds("nothing includes service/", {"client/a.cc": '#include "service/wire.h"\n'})
        self.assert_finds("nothing includes tests/", {"service/a.cc": '#include "tests/fake.h"\n'})

    def test_the_supervisor_may_not_include_grpc_or_the_configuration(self):
        for header in ("pqcached/v1/types.pb.h", "service/config/config.h", "service/session/broker.h"):
            self.assert_finds(f"may not include {header}", {"service/supervise/a.cc": f'#include "{header}"\n'})
        self.assert_finds("may not include <grpcpp/grpcpp.h>", {"service/supervise/a.cc": "#include <grpcpp/grpcpp.h>\n"})

    def test_no_arrow_of_the_service_runs_up(self):
        floors = ("base", "supervise", "session", "wire", "handlers", "rpc")
        for below, above in zip(floors, floors[1:]):
            header = f"service/{above}/a.h"
            self.assert_finds(f"may not include {header}", {f"service/{below}/a.cc": f'#include "{header}"\n'})
        self.assert_finds("may not include <grpcpp/grpcpp.h>", {"service/handlers/a.cc": "#include <grpcpp/grpcpp.h>\n"})

    def test_the_client_core_may_not_include_the_wire_format(self):
        self.assert_finds("may not include pqcached/v1/types.pb.h", {"client/a.cc": '#include "pqcached/v1/types.pb.h"\n'})

    def test_floors_of_the_client_include_only_lower_ones(self):
        floors = ("base", "local", "step", "gpu", "abi")
        for lower, upper in zip(floors, floors[1:]):
            self.assertEqual([], self.found_in({"client/README.md": "", f"client/{upper}/a.cc": f'#include "client/{lower}/a.h"\n'}))
            self.assert_finds(f"may not include client/{upper}/a.h", {f"client/{lower}/a.cc": f'#include "client/{upper}/a.h"\n'})
        self.assert_finds("may not include client/step/a.h", {"client/rpc/a.cc": '#include "client/step/a.h"\n'})
        self.assert_finds("may not include client/rpc/a.h", {"client/abi/a.cc": '#include "client/rpc/a.h"\n'})
        self.assert_finds("may not include client/base/a.h", {"client/examples/c/a.cc": '#include "client/base/a.h"\n'})

    def test_names_sizes_guards_and_getenv(self):
        self.assert_finds("junk drawer", {"kvstore/utils/a.cc": ""})
        self.assert_finds("does not belong at the top level", {"scripts/a.sh": ""})
        self.assert_finds("split it by meaning", {"kernels/a.cc": "\n" * 601})
        self.assert_finds("include guard must be PQCACHED_KERNELS_A_H_", {"kernels/a.h": "#pragma once\n"})
        for code in ('getenv("A");\n', 'secure_getenv("A");\n'):
            self.assert_finds("getenv", {"service/main.cc": code})
            self.assert_finds("getenv", {"client/base/error.cc": code})
            self.assertEqual([], self.found_in({"client/README.md": "", "client/base/call_log.cc": code}))
        self.assert_finds("has no README.md", {"kernels/a.cc": ""})

    def test_nothing_follows_the_wall_clock(self):
        for code in ("absl::Time until = absl::Now();", "std::chrono::system_clock::now()", "clock_gettime(CLOCK_REALTIME, &now);",
                     "done.WaitForNotificationWithTimeout(timeout);", "mutex_.AwaitWithDeadline(condition, until);",
                     "changed_.WaitWithTimeout(&mutex_, timeout);", "grpc::Alarm alarm_;", "time(nullptr)"):
            for folder in ("kvstore", "service", "client/rpc", "gpu"):
                self.assert_finds("follows the wall clock", {f"{folder}/a.cc": code + "\n"})
            self.assertEqual([], self.found_in({"tests/README.md": "", "tests/a.cc": code + "\n"}))
        self.assertEqual([], self.found_in({
            "service/README.md": "",
            "service/a.cc": "// Not absl::Now().\nabsl::Duration left = until - kvstore::SteadyTime::Now();\nWaitUntil(&mutex_, until);\n"}))

    def test_errors_have_fields_and_nothing_looks_into_messages(self):
        for code in ('return absl::InvalidArgumentError("no");', 'return absl::Status(absl::StatusCode::kAborted, "no");',
                     "return absl::Status(\n    other.status().code(), text);", 'absl::Status status(code, "no");',
                     "return absl::Status{code, text};"):
            for folder in ("kvstore", "kvstore/read", "service"):
                self.assert_finds("a status without a field", {f"{folder}/a.cc": code + "\n"})
            self.assertEqual([], self.found_in({"tests/README.md": "", "tests/a.cc": code + "\n"}))
            self.assertEqual([], self.found_in({"kvstore/README.md": "", "kvstore/refusal.cc": code + "\n"}))
        for code in ('if (absl::StartsWith(status.message(), "items["))', 'absl::StrContains(std::string(status.message()), "x")',
                     'status.message().find("x")', 'status.error_message().starts_with("x")',
                     'if (std::string_view(refusal.text).starts_with("x"))', "std::strstr(error->text,\n            kStaging)",
                     'std::string(pqc_last_error()).find("x")', 'if (status.message() == "x")',
                     'strstr(pqc_last_error(), "x")'):
            for folder in ("kvstore", "service", "client", "client/rpc"):
                self.assert_finds("looks into the words", {f"{folder}/a.cc": code + "\n"})
        self.assertEqual([], self.found_in({
            "service/README.md": "",
            "service/a.cc": 'absl::Status Check(const Call& call);\nstd::function<absl::Status(const Call& call)> work;\n'
                            "absl::Status status = absl::Status();\nabsl::Status CheckAll(absl::string_view field, int count);\n"
                            "std::function<absl::Status(absl::string_view value, Config& config)> set;\n"
                            "std::function<absl::Status()> work;\n"
                            'if (absl::StartsWith(FieldOf(status), "items")) return status;\n'
                            'log.Error("failed", {{"message", status.message()}});\n'
                            "// absl::InternalError(text), status.message().find(text)\n"}))


if __name__ == "__main__":
    unittest.main()
