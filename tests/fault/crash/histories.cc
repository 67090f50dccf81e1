#include "tests/fault/crash/histories.h"

namespace pqcached::kvstore::testing {
namespace {

using enum Operation;

// Rows of every kind of write, over several segments; codes follow them.
std::vector<Step> RowSteps() {
  return {{kCreate, 0},      {kIngest, 0, 150},   {kBuild, 0, 0},      {kAppend, 0, 3},
          {kAppend, 0, 120}, {kIngest, 0, 20, 1}, {kTruncate, 0, 140}, {kAppend, 0, 5},
          {kTruncate, 0, 0}, {kAppend, 0, 2},     {kDrop, 0}};
}

// Sequences that share segments; clients that map what others change.
std::vector<Step> SharingSteps() {
  return {{kCreate, 0},    {kAppend, 0, 140},   {kFork, 1, 135, 0}, {kAttach, 0, 0, 0},
          {kAppend, 1, 4}, {kTruncate, 0, 100}, {kAppend, 0, 40},   {kAttach, 1, 0, 1},
          {kDrop, 1},      {kCreate, 2},        {kAppend, 2, 130},  {kDetach, 0, 0, 0},
          {kDrop, 0},      {kCreate, 3},        {kAppend, 3, 130}};
}

// Names, and what is retained of a sequence that has ended.
std::vector<Step> NameSteps() {
  return {{kCreate, 0}, {kAppend, 0, 260},   {kName, 0},         {kAppend, 0, 4}, {kName, 0},
          {kBuild, 0},  {kTruncate, 0, 261}, {kDrop, 0},         {kCreate, 1, 1}, {kAppend, 1, 3},
          {kName, 1},   {kDrop, 1},          {kEvictRetained, 0}};
}

// Sequences whose open segment is retained: as a copy without its unused slots, and as it is.
std::vector<Step> RetainedTailSteps() {
  return {{kCreate, 0}, {kAppend, 0, 140}, {kName, 0},          {kDrop, 0}, {kCreate, 1, 1},
          {kBuild, 1},  {kAppend, 1, 150}, {kName, 1},          {kDrop, 1}, {kCreate, 2, 1},
          {kName, 2},   {kAppend, 2, 300}, {kEvictRetained, 0}, {kName, 2}, {kDrop, 2}};
}

// What holds a sequence, and what takes it away.
std::vector<Step> HoldSteps() {
  return {{kCreate, 0}, {kAppend, 0, 5},   {kPin, 0},     {kSuspend, 0}, {kEvict, 0},
          {kResume, 0}, {kPin, 0},         {kAttach, 0},  {kEvict, 0},   {kDrop, 0},
          {kCreate, 1}, {kAppend, 1, 130}, {kSuspend, 1}, {kEvict, 1}};
}

// Another store takes over, once with a client that goes on to read.
std::vector<Step> TakeOverSteps() {
  return {{kCreate, 0},      {kAppend, 0, 140},  {kBuild, 0},       {kAttach, 0},
          {kTakeOver},       {kTruncate, 0, 10}, {kAppend, 0, 130}, {kCreate, 1},
          {kAppend, 1, 130}, {kDrop, 0},         {kCreate, 2},      {kAppend, 2, 130},
          {kEndQuarantine},  {kAppend, 2, 130},  {kTakeOver},       {kAppend, 2, 1}};
}

// The process after the first moves the pool, and later ones use the memory of the copy. The client of the first one
// maps what was copied.
std::vector<Step> MoveSteps() {
  return {{kCreate, 0}, {kAppend, 0, 140}, {kBuild, 0},      {kAttach, 0},     {kCreate, 1},
          {kPlanMove},  {kTakeOver},       {kAppend, 0, 10}, {kPlanMove},      {kAppend, 1, 130},
          {kTakeOver},  {kDrop, 0},        {kCreate, 2},     {kEndQuarantine}, {kAppend, 2, 130}};
}

// A client maps a sequence that shares the active segment of another one. The next process does not know that, and writes
// these rows again.
std::vector<Step> SharedTailSteps() {
  return {{kCreate, 0}, {kAppend, 0, 50},   {kFork, 1, 50, 0}, {kAttach, 1, 0, 0},
          {kDrop, 1},   {kTruncate, 0, 10}, {kTakeOver},       {kAppend, 0, 40}};
}

// The same with segments that are full, and not closed yet because nothing has been appended since.
std::vector<Step> FullTailSteps() {
  return {{kCreate, 0},       {kAppend, 0, 128},  {kAttach, 0, 0, 0},
          {kFork, 1, 128, 0}, {kAttach, 1, 0, 1}, {kDrop, 1},
          {kTruncate, 0, 10}, {kTakeOver},        {kAppend, 0, 118}};
}

std::vector<Step> RankSteps() {
  return {{kCreateRanks, 0}, {kAppend, 0, 130}, {kAppend, 1, 130}, {kPin, 0}, {kPin, 1},
          {kEvict, 0},       {kCreateRanks, 2}, {kAppend, 3, 2},   {kDrop, 2}};
}

// Tails are coded and merged in the background.
std::vector<Step> IncrementalSteps() {
  return {{kCreate, 0, 0, 1},
          {kIngest, 0, 130},
          {kBuild, 0},
          {kAppend, 0, 300},
          {kIdle},
          {kAppend, 0, 250},
          {kIdle},
          {kAttach, 0},
          {kTruncate, 0, 500},
          {kAppend, 0, 200},
          {kIdle},
          {kDrop, 0}};
}

}  // namespace

std::vector<History> Histories() {
  return {
      {.name = "rows", .spec = {}, .steps = RowSteps(), .fills = true},
      {.name = "sharing", .spec = {}, .steps = SharingSteps()},
      {.name = "names", .spec = {}, .steps = NameSteps()},
      {.name = "retained tail",
       .spec = {.capacity_bytes = size_t{8} << 20, .tail_tokens = 512},
       .steps = RetainedTailSteps()},
      {.name = "holds", .spec = {}, .steps = HoldSteps()},
      {.name = "take-over", .spec = {}, .steps = TakeOverSteps()},
      {.name = "move", .spec = {}, .steps = MoveSteps()},
      {.name = "move in a directory",
       .spec = {},
       .keeping = Keeping::kDirectory,
       .steps = MoveSteps()},
      {.name = "shared tail", .spec = {}, .steps = SharedTailSteps()},
      {.name = "full tail", .spec = {}, .steps = FullTailSteps()},
      {.name = "ranks", .spec = {.ranks = true}, .steps = RankSteps()},
      {.name = "incremental", .spec = {}, .steps = IncrementalSteps(), .fills = true},
      {.name = "directory", .spec = {}, .keeping = Keeping::kDirectory, .steps = HoldSteps()},
      {.name = "strict",
       .spec = {.strict = true},
       .keeping = Keeping::kStrict,
       .steps = TakeOverSteps()},
  };
}

}  // namespace pqcached::kvstore::testing
