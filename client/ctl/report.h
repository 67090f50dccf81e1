// Formats parsed answers of Admin as human-readable text. Pure; thread-safe.
//
// The JSON has the proto's field names; 64-bit integers are strings.
#ifndef PQCACHED_CLIENT_CTL_REPORT_H_
#define PQCACHED_CLIENT_CTL_REPORT_H_

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace pqcached::ctl {

using Json = nlohmann::json;

// Returns a number, or the number in a string; 0 when the value is neither.
uint64_t Number(const Json& value);
// Returns, for example, "pq m=4 b=8", "flat" or "default".
std::string IndexName(const Json& index_spec);

std::string ReportCaches(const Json& list_caches, const Json& list_sequences);
std::string ReportSequence(const Json& describe_sequence);
std::string ReportServer(const Json& server_info);
std::string ReportSessions(const Json& list_sessions);
std::string ReportIndexTypes(const Json& list_index_types);
// Reports the limits of tenants and what they use, as rows of ListTenantLimits.
std::string ReportLimits(const Json& tenants);
std::string ReportLeases(const Json& list_leases);
std::string ReportStats(const Json& stats);
// Formats the state of the supervisor, as ReadSupervisor returns it.
std::string ReportSupervisor(const Json& supervisor);
std::string ReportErased(const std::string& tenant, const Json& answer);
std::string ReportDrain(const Json& drain);
std::string ReportSelfTest(const Json& self_test);
// Formats the answer of Admit.
std::string ReportAdmission(const Json& admission);
std::string ReportPing(const std::string& endpoint, const Json& server_info, double milliseconds);

}  // namespace pqcached::ctl

#endif  // PQCACHED_CLIENT_CTL_REPORT_H_
