#ifndef PQCACHED_TESTS_TINYLM_TESTS_FAKE_CLIENT_H_
#define PQCACHED_TESTS_TINYLM_TESTS_FAKE_CLIENT_H_

// The part of pqcached/client.h that the test engine uses, in this process: rows in fp32, exact
// selection whatever the index, and the contract's refusals (gaps, unknown layers, rows after a
// build by ingest). One sequence at a time.

#include <pqcached/client.h>

#include <cstdint>
#include <string>
#include <vector>

struct FakeSidecar {
  uint64_t token_count = 0;
  uint64_t append_count = 0;  // calls
  bool is_built = false;
  std::vector<pqc_index> built;
  std::string fail_call;  // this call answers PQC_UNAVAILABLE
};

FakeSidecar& TheFakeSidecar();

#endif  // PQCACHED_TESTS_TINYLM_TESTS_FAKE_CLIENT_H_
