// The calls of an input: requests that fit the model, and their effect on it.
#ifndef PQCACHED_TESTS_FUZZ_HANDLERS_CALLS_H_
#define PQCACHED_TESTS_FUZZ_HANDLERS_CALLS_H_

#include <cstdint>

#include "tests/fuzz/bytes.h"
#include "tests/fuzz/handlers/world.h"

namespace pqcached::fuzz {

// Numbers of the calls. Corpora depend on them: new ones go to the end.
enum class CallKind : uint8_t {
  kCreate,
  kAppend,
  kIngest,
  kCommit,
  kRacedCommit,
  kTruncate,
  kFork,
  kDrop,
  kSuspend,
  kResume,
  kFetchBlocks,
  kFetchTokens,
  kTopK,
  kAttend,
  kScore,
  kMatch,
  kBuild,
  kClosePrefill,
  kAttach,
  kDetach,
  kAdmit,
  kPin,
  kEvict,
  kOpenCache,
  kInspect,
  kEndSession,
  kRestart,
  kAttendRange,
  kPages,
  kCount,
};

// Makes the call with this number, modulo their count.
void CallOne(World& world, Tenant& tenant, uint8_t number, Bytes& bytes);

// Chooses one of the tenant's sequences, or null when it has none.
Sequence* Choose(Tenant& tenant, Bytes& bytes);
// What a call of the sequence's data is expected to return when nothing else is wrong with it.
absl::StatusCode ExpectedOf(const Sequence& sequence);

// ---- By source file.

void Create(World& world, Tenant& tenant, Bytes& bytes);
void Fork(World& world, Tenant& tenant, Bytes& bytes);
void Drop(World& world, Tenant& tenant, Bytes& bytes);
void Truncate(World& world, Tenant& tenant, Bytes& bytes);
void Suspend(World& world, Tenant& tenant, Bytes& bytes);
void Resume(World& world, Tenant& tenant, Bytes& bytes);
void Match(World& world, Tenant& tenant, Bytes& bytes);
void Build(World& world, Tenant& tenant, Bytes& bytes);
void ClosePrefill(World& world, Tenant& tenant, Bytes& bytes);

void Append(World& world, Tenant& tenant, Bytes& bytes);
void Ingest(World& world, Tenant& tenant, Bytes& bytes);
void Commit(World& world, Tenant& tenant, Bytes& bytes);
void RacedCommit(World& world, Tenant& tenant, Bytes& bytes);

void FetchBlocks(World& world, Tenant& tenant, Bytes& bytes);
void FetchTokens(World& world, Tenant& tenant, Bytes& bytes);
void TopK(World& world, Tenant& tenant, Bytes& bytes);
void Attend(World& world, Tenant& tenant, Bytes& bytes);
void AttendRange(World& world, Tenant& tenant, Bytes& bytes);
void Score(World& world, Tenant& tenant, Bytes& bytes);

void Attach(World& world, Tenant& tenant, Bytes& bytes);
void Detach(World& world, Tenant& tenant, Bytes& bytes);
void Admit(World& world, Tenant& tenant, Bytes& bytes);
void Pin(World& world, Tenant& tenant, Bytes& bytes);
void Evict(World& world, Tenant& tenant, Bytes& bytes);
void OpenCache(World& world, Tenant& tenant, Bytes& bytes);
void Inspect(World& world, Tenant& tenant, Bytes& bytes);

void Pages(World& world, Tenant& tenant, Bytes& bytes);

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_HANDLERS_CALLS_H_
