#include "client/ctl/report.h"

#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>

#include "client/ctl/table.h"

namespace pqcached::ctl {
namespace {

std::string Count(const Json& value) { return std::to_string(Number(value)); }
std::string Bytes(const Json& value) { return FormatBytes(Number(value)); }

std::string Fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", digits, value);
  return text;
}

void AddItem(const std::string& item, std::string* list) {
  if (!list->empty()) list->append(", ");
  list->append(item);
}

std::string Join(const Json& items) {
  std::string text;
  for (const Json& item : items) AddItem(item.get<std::string>(), &text);
  return text;
}

// Converts, for example, "LAYER_STATE_READY" to "ready".
std::string EnumName(const std::string& value, const std::string& prefix) {
  std::string name = value.starts_with(prefix) ? value.substr(prefix.size()) : value;
  for (char& letter : name) {
    if (letter >= 'A' && letter <= 'Z') letter = static_cast<char>(letter - 'A' + 'a');
  }
  return name;
}

std::string IndexNames(const Json& indexes) {
  std::string text;
  for (const Json& index : indexes) AddItem(IndexName(index), &text);
  return text.empty() ? "-" : text;
}

size_t StoredLayers(const Json& cache) {
  size_t layers = 0;
  for (const Json& group : cache.at("layer_groups")) {
    if (group.at("kind") != "LAYER_KIND_NONE") layers += group.at("layers").size();
  }
  return layers;
}

std::string Segments(const Json& sequence) {
  Table table({"SEGMENT", "TOKENS", "SLOTS", "STATE", "GENERATIONS"});
  for (const Json& segment : sequence.at("segments")) {
    std::string generations;
    for (const Json& generation : segment.at("codebook_generations")) {
      const uint64_t number = Number(generation);
      AddItem(number == UINT32_MAX ? "-" : std::to_string(number), &generations);
    }
    table.Add(
        {Count(segment.at("segment_id")),
         Count(segment.at("tokens").at("begin")) + ".." + Count(segment.at("tokens").at("end")),
         Count(segment.at("slot_capacity")), EnumName(segment.at("state"), "SEGMENT_STATE_"),
         generations.empty() ? "-" : generations});
  }
  return table.empty() ? "" : "\n" + table.ToText();
}

std::string Layers(const Json& sequence) {
  Table table({"LAYER", "ROWS", "INDEXES"});
  for (const Json& layer : sequence.at("layers")) {
    std::string states;
    for (const Json& state : layer.at("index_states")) {
      AddItem(EnumName(state, "LAYER_STATE_"), &states);
    }
    table.Add(
        {Count(layer.at("layer")), Count(layer.at("row_count")), states.empty() ? "-" : states});
  }
  return table.empty() ? "" : "\n" + table.ToText();
}

uint64_t Seconds(const Json& seconds) { return static_cast<uint64_t>(seconds.get<double>()); }

// Returns the reasons why a sequence is kept, and the time since its last use.
std::string StateOf(const Json& sequence) {
  std::string state = sequence.at("is_cached_prefix").get<bool>() ? "cached" : "in use";
  if (sequence.at("pin_left_seconds").get<double>() > 0) {
    AddItem("pinned " + FormatSeconds(Seconds(sequence.at("pin_left_seconds"))), &state);
  }
  AddItem("idle " + FormatSeconds(Seconds(sequence.at("idle_seconds"))), &state);
  return state;
}

// Returns the default index of a cache of rows, or the number of pages of a page cache.
std::string ContentOf(const Json& cache) {
  if (cache.contains("pages")) return Count(cache.at("pages").at("page_count")) + " pages";
  return cache.contains("default_index") ? IndexName(cache.at("default_index")) : "default";
}

std::string ReportPages(const Json& pages) {
  const uint64_t hits = Number(pages.at("hits"));
  return "pages      " + Count(pages.at("page_count")) + " of " + Bytes(pages.at("bytes")) + ", " +
         std::to_string(hits) + " of " + std::to_string(hits + Number(pages.at("misses"))) +
         " keys found, " + Count(pages.at("evicted_pages")) + " evicted\n";
}

}  // namespace

uint64_t Number(const Json& value) {
  if (value.is_number()) return value.get<uint64_t>();
  if (value.is_string()) {
    return std::strtoull(value.get_ref<const std::string&>().c_str(), nullptr, 10);
  }
  return 0;
}

std::string IndexName(const Json& index_spec) {
  if (index_spec.contains("pq")) {
    const Json& pq = index_spec.at("pq");
    return "pq m=" + Count(pq.at("subspaces")) + " b=" + Count(pq.at("bits")) +
           (pq.contains("layout") && pq.at("layout") == "LAYOUT_CONTIGUOUS" ? " contiguous" : "");
  }
  if (!index_spec.contains("typed")) return index_spec.contains("flat") ? "flat" : "default";
  const Json& typed = index_spec.at("typed");
  std::string name = typed.at("type");
  for (const auto& [parameter, value] : typed.at("parameters").items()) {
    name += " " + parameter + "=";
    name +=
        value.contains("name") ? value.at("name").get<std::string>() : Count(value.at("number"));
  }
  return name;
}

std::string ReportCaches(const Json& list_caches, const Json& list_sequences) {
  Table caches({"CACHE", "TENANT", "NAME", "FINGERPRINT", "LAYERS", "INDEX", "CAPACITY", "USED",
                "FREE", "SEQUENCES", "CACHED"});
  for (const Json& cache : list_caches.at("caches")) {
    caches.Add({Count(cache.at("cache_id")), cache.at("tenant"), cache.at("name"),
                cache.at("model_fingerprint"), std::to_string(StoredLayers(cache)),
                ContentOf(cache),
                Bytes(cache.at("capacity_bytes")) + (cache.value("grows", false) ? ", grows" : ""),
                Bytes(cache.at("used_bytes")), Bytes(cache.at("free_bytes")),
                Count(cache.at("sequence_count")), Count(cache.at("cached_prefix_count"))});
  }
  if (caches.empty()) return "no caches\n";
  Table sequences({"SEQUENCE", "CACHE", "CLIENT", "TOKENS", "INDEXES", "ROWS", "INDEX BYTES",
                   "CODEBOOKS", "USED", "STATE"});
  for (const Json& sequence : list_sequences.at("sequences")) {
    sequences.Add({Count(sequence.at("sequence_id")), Count(sequence.at("cache_id")),
                   sequence.at("client_name"), Count(sequence.at("token_count")),
                   IndexNames(sequence.at("indexes")), Bytes(sequence.at("row_bytes")),
                   Bytes(sequence.at("index_bytes")), Bytes(sequence.at("codebook_bytes")),
                   Bytes(sequence.at("used_bytes")), StateOf(sequence)});
  }
  return caches.ToText() + "\n" + (sequences.empty() ? "no sequences\n" : sequences.ToText());
}

std::string ReportSequence(const Json& describe_sequence) {
  const Json& sequence = describe_sequence.at("sequence");
  std::string text;
  text += "sequence   " + Count(sequence.at("sequence_id")) + "\n";
  text += "cache      " + Count(sequence.at("cache_id")) + "\n";
  text += "client     " + sequence.at("client_name").get<std::string>() + "\n";
  text += "tokens     " + Count(sequence.at("token_count")) + "\n";
  text += "indexes    " + IndexNames(sequence.at("indexes")) + "\n";
  text += "rows       " + Bytes(sequence.at("row_bytes")) + "\n";
  text += "index      " + Bytes(sequence.at("index_bytes")) + "\n";
  text += "codebooks  " + Bytes(sequence.at("codebook_bytes")) + "\n";
  text += "in pool    " + Bytes(sequence.at("used_bytes")) + "\n";
  text += "state      " + StateOf(sequence) + "\n";
  if (const std::string key = sequence.at("group_key"); !key.empty()) {
    text += "group key  " + key + "\n";
  }
  return text + Segments(sequence) + Layers(sequence);
}

std::string ReportServer(const Json& server_info) {
  std::string text;
  text += "version        " + server_info.at("version").get<std::string>() + "\n";
  text += "protocol       " + Count(server_info.at("protocol_version")) + "\n";
  text += "boot_id        " + server_info.at("boot_id").get<std::string>() + "\n";
  text += "uptime         " + FormatSeconds(Number(server_info.at("uptime_seconds"))) + "\n";
  text += "kernels        " + server_info.at("kernel_level").get<std::string>() + " (of " +
          Join(server_info.at("kernel_levels")) + ")\n";
  text += "threads        " + Count(server_info.at("threads")) + "\n";
  text += "message limit  " + Bytes(server_info.at("max_message_bytes")) + "\n";
  text += "capabilities   " + Join(server_info.at("capabilities")) + "\n";
  Table config({"KEY", "VALUE"});
  for (const auto& [key, value] : server_info.at("config").items()) {
    config.Add({key, value.is_string() ? value.get<std::string>() : value.dump()});
  }
  return config.empty() ? text : text + "\n" + config.ToText();
}

std::string ReportLeases(const Json& list_leases) {
  Table leases({"LEASE", "SEQUENCE", "CLIENT", "PID", "AGE", "BYTES", "VERSIONS", "STATE"});
  for (const Json& lease : list_leases.at("leases")) {
    const auto age = static_cast<uint64_t>(lease.at("age_seconds").get<double>());
    leases.Add({Count(lease.at("lease_id")), Count(lease.at("sequence_id")),
                lease.at("client_name"), Count(lease.at("peer_pid")), FormatSeconds(age),
                Bytes(lease.at("bytes")), Count(lease.at("version_count")),
                lease.at("revoked").get<bool>() ? "revoked" : "held"});
  }
  return leases.empty() ? "no leases\n" : leases.ToText();
}

std::string ReportSessions(const Json& list_sessions) {
  Table sessions({"SESSION", "TENANT", "CLIENT", "PID", "AGE", "SEQUENCES", "STATE"});
  for (const Json& session : list_sessions.at("sessions")) {
    const auto age = static_cast<uint64_t>(session.at("age_seconds").get<double>());
    sessions.Add({Count(session.at("session_number")), session.at("tenant"),
                  session.at("client_name"), Count(session.at("peer_pid")), FormatSeconds(age),
                  Count(session.at("sequence_count")),
                  session.at("detached").get<bool>() ? "waits for its client" : "open"});
  }
  return sessions.empty() ? "no sessions\n" : sessions.ToText();
}

namespace {

// Returns, for example, "1 to 16, powers of two" or "pairs, contiguous".
std::string ValuesOf(const Json& parameter) {
  std::string names;
  for (const Json& name : parameter.at("names")) {
    names += (names.empty() ? "" : ", ") + name.get<std::string>();
  }
  if (!names.empty()) return names;
  return Count(parameter.at("least")) + " to " + Count(parameter.at("most")) +
         (parameter.at("power_of_two").get<bool>() ? ", powers of two" : "");
}

}  // namespace

std::string ReportIndexTypes(const Json& list_index_types) {
  std::string text;
  for (const Json& type : list_index_types.at("types")) {
    text += type.at("name").get<std::string>() + ": " + type.at("text").get<std::string>() + "\n";
    Table table({"PARAMETER", "DEFAULT", "VALUES", "MEANING"});
    for (const Json& parameter : type.at("parameters")) {
      const Json& value = parameter.at("default_value");
      table.Add(
          {parameter.at("name"),
           value.contains("name") ? value.at("name").get<std::string>() : Count(value.at("number")),
           ValuesOf(parameter), parameter.at("text")});
    }
    if (!table.empty()) text += table.ToText();
  }
  return text;
}

// Each cell is "used/limit".
std::string ReportLimits(const Json& tenants) {
  Table table({"TENANT", "SESSIONS", "CACHES", "STAGING", "BUILDS", "CALLS", "WEIGHT", "POOL",
               "GUARANTEED"});
  for (const Json& tenant : tenants) {
    const Json& limits = tenant.at("limits");
    const bool used = tenant.contains("used");
    const auto cell = [&](const char* name, bool bytes) {
      const uint64_t limit = Number(limits.at(name));
      const auto text = [&](uint64_t value) {
        return bytes ? FormatBytes(value) : std::to_string(value);
      };
      std::string shown = limit == UINT64_MAX ? "any" : text(limit);
      return used ? text(Number(tenant.at("used").at(name))) + "/" + shown : shown;
    };
    table.Add({tenant.at("tenant"), cell("sessions", false), cell("caches", false),
               cell("staging_bytes", true), cell("builds", false), cell("calls", false),
               Count(limits.at("weight")), cell("pool_bytes", true),
               Bytes(limits.at("guaranteed_bytes"))});
  }
  return table.ToText();
}

std::string ReportStats(const Json& stats) {
  std::string text;
  text += "uptime     " + FormatSeconds(Number(stats.at("uptime_seconds"))) + "\n";
  text += "sessions   " + Count(stats.at("session_count")) + "\n";
  text += "caches     " + Count(stats.at("cache_count")) + "\n";
  text += "sequences  " + Count(stats.at("sequence_count")) + "\n";
  text += "pools      " + Bytes(stats.at("pool_used_bytes")) + " used + " +
          Bytes(stats.at("pool_free_bytes")) + " free = " + Bytes(stats.at("pool_capacity_bytes")) +
          "\n";
  text += "shared     " + Bytes(stats.at("shared_bytes")) + " by several sequences\n";
  text += "leases     " + Count(stats.at("lease_count")) + ", " +
          Count(stats.at("revoked_lease_count")) + " of them revoked\n";
  text += "staging    " + Bytes(stats.at("staging_bytes")) + "\n";
  text += "builds     " + Count(stats.at("builds_in_flight")) + " in flight\n";
  text += "longest    " + Bytes(stats.at("largest_free_bytes")) + " free in one piece, " +
          Fixed(stats.at("fragmentation").get<double>() * 100, 0) +
          " % of the free bytes in other pieces\n";
  text += "cached     " + Count(stats.at("cached_prefix_count")) + " sequences, " +
          Count(stats.at("pinned_count")) + " pinned\n";
  text += "evicted    " + Count(stats.at("evicted_sequences")) + " sequences, " +
          Bytes(stats.at("evicted_bytes")) + "\n";
  text += "prefixes   " + Count(stats.at("matched_tokens")) + " of " +
          Count(stats.at("prompt_tokens")) + " tokens found\n";
  if (stats.contains("pages")) text += ReportPages(stats.at("pages"));
  text += "memory     " + Bytes(stats.at("memory_available_bytes")) + " available to the sidecar\n";
  if (stats.at("draining").get<bool>()) text += "draining   admits no new sequences\n";
  Table memory({"MEMORY OF", "FOR", "PROMISED", "ALLOCATED"});
  for (const Json& account : stats.at("memory")) {
    const std::string tenant = account.at("tenant");
    memory.Add({tenant.empty() ? "-" : tenant, EnumName(account.at("use"), "MEMORY_USE_"),
                Bytes(account.at("promised_bytes")), Bytes(account.at("allocated_bytes"))});
  }
  if (!memory.empty()) text += "\n" + memory.ToText();
  Table calls({"CALL", "STATUS", "COUNT", "MEAN ms", "MAX ms"});
  for (const Json& rpc : stats.at("rpcs")) {
    uint64_t total = 0;
    for (const auto& [status, count] : rpc.at("count_by_status").items()) total += Number(count);
    const double mean =
        total ? rpc.at("seconds_total").get<double>() / static_cast<double>(total) : 0;
    for (const auto& [status, count] : rpc.at("count_by_status").items()) {
      calls.Add({rpc.at("method"), status, Count(count), Fixed(mean * 1e3, 2),
                 Fixed(rpc.at("seconds_max").get<double>() * 1e3, 2)});
    }
  }
  return calls.empty() ? text : text + "\n" + calls.ToText();
}

std::string ReportSupervisor(const Json& supervisor) {
  const std::string state = supervisor.at("state");
  const std::string last_end = supervisor.at("last_end");
  std::string text;
  if (state == "given_up") {
    text = "NOT_SERVING: " + Count(supervisor.at("failed_recoveries")) +
           " workers failed to recover the memory that is kept; run `pqcachectl recover` with "
           "--retry or --discard\n";
  } else if (state == "serving") {
    text = "worker " + Count(supervisor.at("worker_pid")) + " serves\n";
  } else {
    text = "NOT_SERVING: the supervisor is " + state + ", start " + Count(supervisor.at("starts")) +
           "\n";
  }
  if (!last_end.empty()) text += "the last worker ended by " + last_end + "\n";
  if (const std::string folder = supervisor.at("set_aside"); !folder.empty()) {
    text += "files that were not recovered are in " + folder + "\n";
  }
  return text;
}

std::string ReportErased(const std::string& tenant, const Json& answer) {
  std::string text = "tenant " + tenant + ": ended " + Count(answer.at("ended_sessions")) +
                     " sessions; dropped " + Count(answer.at("dropped_sequences")) +
                     " sequences and " + Count(answer.at("dropped_cached_prefixes")) +
                     " cached prefixes (" + Bytes(answer.at("erased_bytes")) + "); removed " +
                     Count(answer.at("removed_files")) + " files that were set aside (" +
                     Bytes(answer.at("removed_bytes")) + ")\n";
  if (Number(answer.at("remaining_bytes")) > 0) {
    text += "calls in progress still use " + Bytes(answer.at("remaining_bytes")) +
            ": repeat the command\n";
  }
  for (const Json& folder : answer.at("unreadable_folders")) {
    text += "pool_directory/" + folder.get<std::string>() +
            " cannot be read and may contain data of the tenant: delete it\n";
  }
  return text;
}

std::string ReportDrain(const Json& drain) {
  if (!drain.at("draining").get<bool>()) return "not draining: admits new sequences\n";
  return "draining: " + Count(drain.at("session_count")) + " sessions with " +
         Count(drain.at("sequence_count")) + " sequences left, " +
         Count(drain.at("calls_in_flight")) + " calls in flight\n";
}

std::string ReportSelfTest(const Json& self_test) {
  Table checks({"CHECK", "RESULT", "MS", "WHAT"});
  for (const Json& check : self_test.at("checks")) {
    checks.Add({check.at("name"), check.at("passed").get<bool>() ? "passed" : "FAILED",
                Fixed(check.at("seconds").get<double>() * 1e3, 1), check.at("detail")});
  }
  return checks.ToText() + (self_test.at("passed").get<bool>() ? "all passed\n" : "FAILED\n");
}

std::string ReportAdmission(const Json& admission) {
  const std::string verdict = EnumName(admission.at("verdict"), "VERDICT_");
  const std::string needs = ": needs " + Bytes(admission.at("needed_bytes")) +
                            ", the cache may hold " + Bytes(admission.at("limit_bytes"));
  const std::string shortfall = Bytes(admission.at("shortfall_bytes"));
  if (verdict == "fits_now") return "fits now" + needs + "\n";
  if (verdict == "after_eviction") {
    return "fits after eviction" + needs + "; " + Bytes(admission.at("bytes_to_evict")) +
           " of cached prefixes would be evicted\n";
  }
  if (verdict == "later") {
    return "fits later" + needs + "; " + shortfall +
           " short until other sequences are released; retry in " +
           Count(admission.at("retry_after_ms")) + " ms\n";
  }
  return "exceeds the capacity" + needs + "; " + shortfall + " over the limit\n";
}

std::string ReportPing(const std::string& endpoint, const Json& server_info, double milliseconds) {
  return "pqcached " + server_info.at("version").get<std::string>() + " at " + endpoint + ": up " +
         FormatSeconds(Number(server_info.at("uptime_seconds"))) + ", " + Fixed(milliseconds, 2) +
         " ms\n";
}

}  // namespace pqcached::ctl
