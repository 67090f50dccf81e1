// An engine whose calls a test records. Usage: pqcached_conform_engine ENDPOINT BREAK, where BREAK
// names the clause that it breaks; "none" breaks none. No break is undefined behaviour.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "pqcached/client.h"
#include "pqcached/progress.h"

namespace {

constexpr uint64_t kTokens = 256;
constexpr uint32_t kHeads = 1, kDim = 32, kLayer = 0;

void Must(pqc_status status) {
  if (status == PQC_OK) return;
  std::fprintf(stderr, "%s: %s\n", pqc_status_name(status), pqc_last_error());
  std::exit(1);
}

pqc_tensor Rows(std::vector<float>& numbers, const uint64_t* shape) {
  pqc_tensor rows = PQC_INIT(pqc_tensor);
  rows.ptr = numbers.data();
  rows.dtype = PQC_F32;
  rows.ndim = 3;
  rows.shape = shape;
  return rows;
}

pqc_client* OpenClient(const char* endpoint) {
  pqc_client_options options = PQC_INIT(pqc_client_options);
  options.endpoint = endpoint;
  pqc_client* client = nullptr;
  Must(pqc_client_open(&options, &client));
  return client;
}

pqc_cache* OpenCache(pqc_client* client) {
  pqc_layer_group group = PQC_INIT(pqc_layer_group);
  group.kind = PQC_LAYERS_SELECTED;
  group.layers = &kLayer;
  group.layer_count = 1;
  group.kv_heads = group.query_heads = kHeads;
  group.key_dim = group.value_dim = kDim;
  group.dtype = PQC_F32;
  pqc_cache_spec spec = PQC_INIT(pqc_cache_spec);
  spec.name = "conform";
  spec.model_fingerprint = "conform-1";
  spec.groups = &group;
  spec.group_count = 1;
  spec.capacity_bytes = 8u << 20;
  pqc_cache* cache = nullptr;
  Must(pqc_cache_open(client, &spec, &cache));
  return cache;
}

pqc_step* BeginStep(pqc_client* client, pqc_sequence* sequence, uint64_t position) {
  pqc_step_item item = PQC_INIT(pqc_step_item);
  item.sequence = sequence;
  item.query_position = position;
  pqc_step* step = nullptr;
  Must(pqc_step_begin(client, &item, 1, nullptr, &step));
  return step;
}

// Decodes one token.
void Step(pqc_client* client, pqc_sequence* sequence, std::vector<float>& numbers) {
  pqc_step* step = BeginStep(client, sequence, kTokens);
  const uint64_t shape[] = {1, kHeads, kDim};
  pqc_layer_rows rows = PQC_INIT(pqc_layer_rows);
  rows.layer = kLayer;
  rows.keys = rows.values = Rows(numbers, shape);
  Must(pqc_step_end(step, &rows, 1, nullptr));
}

// Builds the index when the words of a refusal, and not its status, say that there is none.
void DecideByMessage(pqc_sequence* sequence, std::vector<float>& numbers) {
  const uint64_t shape[] = {1, kHeads, kDim};
  pqc_query query = PQC_INIT(pqc_query);
  query.query_position = kTokens;
  query.queries = Rows(numbers, shape);
  pqc_selection selection = PQC_INIT(pqc_selection);
  selection.window_tokens = 1;
  selection.ratio = 0.5;
  pqc_positions best = PQC_INIT(pqc_positions);
  if (pqc_topk(sequence, &query, &selection, &best) == PQC_OK) std::exit(1);
  if (!std::strstr(pqc_last_error(), "index")) std::exit(1);
  const pqc_build_options build = PQC_INIT(pqc_build_options);
  Must(pqc_build_index(sequence, &build));
}

void UseInChild(pqc_client* client) {
  const pid_t child = fork();
  if (child == 0) {
    pqc_client_counts counts = PQC_INIT(pqc_client_counts);
    pqc_client_count(client, &counts);  // reads counters, and nothing of gRPC
    _exit(0);
  }
  waitpid(child, nullptr, 0);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string_view broken = argv[2];
  pqc_client* client = OpenClient(argv[1]);
  pqc_cache* cache = OpenCache(client);
  pqc_sequence* sequence = nullptr;
  Must(pqc_sequence_create(cache, &sequence));

  std::vector<float> numbers(kTokens * kHeads * kDim, 0.5f);
  const uint64_t shape[] = {kTokens, kHeads, kDim};
  const pqc_tensor rows = Rows(numbers, shape);
  Must(pqc_ingest(sequence, kLayer, 0, &rows, &rows));
  Step(client, sequence, numbers);

  if (broken == "position") pqc_ingest(sequence, kLayer, 4 * kTokens, &rows, &rows);
  if (broken == "struct size") {
    pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
    info.struct_size = 3;
    pqc_sequence_describe(sequence, &info);
  }
  if (broken == "retry") {
    for (int i = 0; i < 5; ++i) pqc_cache_drop(cache);  // a sequence is there
  }
  if (broken == "message") DecideByMessage(sequence, numbers);
  if (broken == "capacity") {
    for (int i = 0; i < 2; ++i) {
      pqc_fetch_blocks(sequence, kLayer, {0, kTokens}, PQC_KEY, numbers.data(), 1);
    }
  }
  if (broken == "change in a step") {
    pqc_step* step = BeginStep(client, sequence, kTokens + 1);
    pqc_sequence_truncate(sequence, 1);
    pqc_step_abandon(step);
  }
  if (broken == "no result") {
    pqc_sequence_options options = PQC_INIT(pqc_sequence_options);
    options.at_least_tokens = 1;  // of a prompt without tokens
    pqc_sequence* created = nullptr;
    pqc_sequence_create_with(cache, &options, &created, nullptr);
    pqc_sequence_info info = PQC_INIT(pqc_sequence_info);
    pqc_sequence_describe(created, &info);
  }
  if (broken == "fork") UseInChild(client);
  if (broken != "flush") Must(pqc_sequence_flush(sequence));
  if (broken == "client closed") {
    pqc_client_close(client);
    client = nullptr;
    pqc_sequence_flush(sequence);
  }
  pqc_sequence_drop(sequence);
  if (broken != "left open") pqc_cache_close(cache);
  pqc_client_close(client);
  return 0;
}
