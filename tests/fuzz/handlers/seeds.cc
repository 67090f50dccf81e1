#include "tests/fuzz/handlers/seeds.h"

#include <initializer_list>

#include "tests/fuzz/handlers/calls.h"

namespace pqcached::fuzz {
namespace {

// A call by its number and choices; `tenant` is 0 or 1.
std::string CallOf(CallKind kind, std::initializer_list<int> choices, int tenant = 0) {
  std::string text(1, static_cast<char>(static_cast<int>(kind) + 128 * tenant));
  for (const int choice : choices) text += static_cast<char>(choice);
  return text;
}

}  // namespace

std::vector<std::string> CallSeeds() {
  using enum CallKind;
  const auto create = [](int tenant, int kind, int prompt) {
    return CallOf(kCreate, {kind, prompt, 0}, tenant);
  };
  const auto append = [](int tenant, int tokens, int kind) {
    return CallOf(kAppend, {0, tokens, kind, 0}, tenant);
  };
  const auto ingest = [](int tenant, int tokens) {
    return CallOf(kIngest, {0, tokens, 1, 0}, tenant);
  };
  const std::string grow = create(0, 1, 20) + ingest(0, 7) + append(0, 4, 0);
  return {
      grow + CallOf(kFetchBlocks, {0, 1, 0, 200, 0}) +
          CallOf(kFetchTokens, {0, 24, 9, 80, 200, 3, 0}),
      grow + CallOf(kBuild, {0, 1, 0}) + CallOf(kTopK, {0, 43, 0}) + CallOf(kTopK, {0, 40, 0}) +
          CallOf(kAttend, {0, 42, 0}) + CallOf(kAttend, {0, 41, 0}),
      grow + CallOf(kScore, {0, 80, 0}),
      grow + CallOf(kAttendRange, {0, 11, 0, 200, 0}) + CallOf(kAttendRange, {0, 23, 40, 0, 0}) +
          CallOf(kAttendRange, {0, 227, 40, 250, 0}),
      grow + CallOf(kDrop, {0, 0}) + CallOf(kMatch, {20, 0}) + create(0, 1, 20) + create(1, 1, 20),
      create(0, 0, 0) + CallOf(kCommit, {0, 6, 0, 0}) + CallOf(kRacedCommit, {0, 2}) +
          CallOf(kRacedCommit, {0, 3}) + CallOf(kTruncate, {0, 5, 0}),
      create(0, 0, 0) + append(0, 4, 0) + CallOf(kSuspend, {0, 240 - 3}) +
          CallOf(kCreate, {0, 0, 232}) + CallOf(kFork, {0, 0, 232}) + append(0, 4, 0),
      grow + CallOf(kFork, {0, 100, 0}) + append(0, 3, 0) + CallOf(kTruncate, {1, 200, 0}),
      grow + CallOf(kAttach, {0, 0}) + append(0, 4, 0) + CallOf(kAttach, {0, 0}) +
          CallOf(kTruncate, {0, 3, 0}) + CallOf(kDetach, {0, 0}),
      grow + CallOf(kSuspend, {0, 0}) + append(0, 1, 0) + CallOf(kResume, {0, 0}),
      grow + CallOf(kPin, {0, 1, 0}) + CallOf(kEvict, {0, 0}) + CallOf(kPin, {0, 0, 0}) +
          CallOf(kEvict, {0, 0}),
      create(0, 0, 0) + CallOf(kCommit, {0, 4, 14, 0}) + CallOf(kRacedCommit, {0, 3}) +
          CallOf(kRacedCommit, {0, 3}) + CallOf(kRacedCommit, {0, 0}),
      create(0, 7, 20) + ingest(0, 7) + CallOf(kMatch, {20, 0}) + CallOf(kMatch, {20 + 96, 0}) +
          create(0, 1, 20),
      create(0, 240, 0) + ingest(0, 7) + CallOf(kClosePrefill, {0, 0}) + append(0, 5, 0),
      create(0, 240, 0) + ingest(0, 7) + CallOf(kInspect, {0, 0}) + ingest(0, 7) +
          CallOf(kClosePrefill, {0, 0}) + CallOf(kInspect, {0, 0}) + append(0, 4, 0) +
          CallOf(kInspect, {0, 0}),
      create(0, 0, 0) + append(0, 4, 32) + append(0, 3, 7) + append(0, 3, 6) + append(0, 12, 16),
      grow + create(1, 1, 20) + ingest(1, 7) + CallOf(kEndSession, {0, 0}) + create(0, 1, 24),
      grow + create(1, 0, 0) + append(1, 4, 0) + CallOf(kRestart, {}) + append(0, 4, 0),
      grow + CallOf(kRestart, {}) + CallOf(kMatch, {20, 0}) + create(0, 1, 20),
      create(0, 0, 0) + append(0, 4, 0) + CallOf(kFork, {0, 0, 0}) + CallOf(kRestart, {}) +
          CallOf(kTruncate, {0, 5, 0}) + append(0, 3, 0),
      CallOf(kAdmit, {1, 1, 0}) + CallOf(kOpenCache, {0}) + CallOf(kInspect, {0, 0}) +
          CallOf(kInspect, {2, 0}) + CallOf(kInspect, {4, 0}),
      CallOf(kInspect, {1, 0}) + CallOf(kInspect, {3, 0}) + CallOf(kInspect, {5, 0}) +
          CallOf(kInspect, {6, 0}) + CallOf(kInspect, {7, 0}) + CallOf(kInspect, {8, 0}),
      grow + CallOf(kInspect, {9, 0, 0}),
      CallOf(kPages, {0, 2, 1, 2, 3, 0}) + CallOf(kPages, {1, 2, 0}) + CallOf(kPages, {2, 3, 0}) +
          CallOf(kPages, {1, 39, 0}),
  };
}

}  // namespace pqcached::fuzz
