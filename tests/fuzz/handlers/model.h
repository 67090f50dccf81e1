// What the clients of two tenants have stored and hold: the expected state of the sidecar.
#ifndef PQCACHED_TESTS_FUZZ_HANDLERS_MODEL_H_
#define PQCACHED_TESTS_FUZZ_HANDLERS_MODEL_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kvstore/read/attachment.h"
#include "tests/fuzz/handlers/rows.h"
#include "tests/service/handlers/direct_sidecar.h"
#include "tests/service/handlers/shared_mapping.h"

namespace pqcached::fuzz {

struct Sequence {
  uint64_t id = 0;
  Content content;
  std::vector<uint32_t> ids;  // names of its first tokens, stored or to come
  bool has_extra_key = false;
  bool is_suspended = false;
  bool is_live = false;  // has an incremental index
  bool is_pinned = false;
  bool is_loose = false;  // a changed request reached it: only its id is known
  std::vector<kvstore::IndexDescriptor> indexes;

  size_t named() const { return std::min(ids.size(), content.size()); }
};

// The names under which a sequence has stored tokens.
struct Names {
  std::vector<uint32_t> ids;
  bool has_extra_key = false;
};

struct Lease {
  uint64_t id = 0;
  uint64_t sequence_id = 0;
  uint64_t version = 0;
  kvstore::Attachment attachment;
  Content content;        // of the tokens that the attachment names
  bool is_loose = false;  // a changed request named it
};

struct Tenant {
  explicit Tenant(std::string tenant_name, bool is_negative)
      : name(std::move(tenant_name)), rows(is_negative) {}

  const std::string name;
  RowTable rows;
  service::Client client;
  uint64_t cache_id = 0;
  service::SharedMapping staging;
  service::SharedMapping pool;
  uint64_t generation = 0;  // of the staging slot
  std::vector<Sequence> sequences;
  std::vector<Lease> leases;
  std::vector<Names> ended;      // what may be retained
  bool has_loose_pages = false;  // a changed request may have stored pages
  bool has_loose_names = false;  // a changed request may have named tokens

  // Returns whether a changed request may have used up the generations of the slot.
  bool is_staging_worn() const { return generation > ~uint64_t{0} / 2; }

  Sequence* Find(uint64_t id) {
    for (Sequence& each : sequences) {
      if (each.id == id) return &each;
    }
    return nullptr;
  }
  bool HasLease(uint64_t sequence_id) const {
    return std::any_of(leases.begin(), leases.end(),
                       [&](const Lease& each) { return each.sequence_id == sequence_id; });
  }
  // Ends the sequence, whose prefix may be retained.
  void Forget(uint64_t id) {
    for (size_t i = 0; i < sequences.size(); ++i) {
      if (sequences[i].id != id) continue;
      Sequence& one = sequences[i];
      one.ids.resize(one.named());
      if (!one.ids.empty()) ended.push_back({std::move(one.ids), one.has_extra_key});
      sequences.erase(sequences.begin() + static_cast<ptrdiff_t>(i));
      return;
    }
  }
};

}  // namespace pqcached::fuzz

#endif  // PQCACHED_TESTS_FUZZ_HANDLERS_MODEL_H_
