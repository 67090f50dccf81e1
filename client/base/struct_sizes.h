// The smallest size of each struct of the C ABI that the library reads: the size that the struct
// had in version 0.1. Programs that were built with the headers of 0.1 or later pass at least this.
// The numbers never change; a new struct gets a line with its size in its first release.
//
// Structs that are members of others (pqc_tensor, pqc_index, pqc_positions) never grow and are not
// listed.
#ifndef PQCACHED_CLIENT_BASE_STRUCT_SIZES_H_
#define PQCACHED_CLIENT_BASE_STRUCT_SIZES_H_

#include <cstddef>

#include "pqcached/client.h"
#include "pqcached/gpu.h"
#include "pqcached/operation.h"
#include "pqcached/page_cache.h"

namespace pqcached::client {

// Has no value for other structs, so that reading one which is not listed does not compile.
template <class Struct>
inline constexpr size_t kMinimumBytes = Struct::is_not_listed_in_struct_sizes_h;

template <>
inline constexpr size_t kMinimumBytes<pqc_block_table> = 40;
template <>
inline constexpr size_t kMinimumBytes<pqc_client_options> = 96;
template <>
inline constexpr size_t kMinimumBytes<pqc_client_counts> = 40;
template <>
inline constexpr size_t kMinimumBytes<pqc_layer_group> = 88;
template <>
inline constexpr size_t kMinimumBytes<pqc_cache_spec> = 120;
// 128 in 0.1; programs built shortly before it have no group_key.
template <>
inline constexpr size_t kMinimumBytes<pqc_sequence_options> = 112;
template <>
inline constexpr size_t kMinimumBytes<pqc_sequence_info> = 56;
template <>
inline constexpr size_t kMinimumBytes<pqc_admission> = 56;
template <>
inline constexpr size_t kMinimumBytes<pqc_index_parameter> = 32;
template <>
inline constexpr size_t kMinimumBytes<pqc_row_options> = 48;
template <>
inline constexpr size_t kMinimumBytes<pqc_progress> = 72;
template <>
inline constexpr size_t kMinimumBytes<pqc_layer_rows> = 176;
template <>
inline constexpr size_t kMinimumBytes<pqc_query_samples> = 112;
template <>
inline constexpr size_t kMinimumBytes<pqc_build_options> = 104;
template <>
inline constexpr size_t kMinimumBytes<pqc_selection> = 104;
template <>
inline constexpr size_t kMinimumBytes<pqc_query> = 104;
template <>
inline constexpr size_t kMinimumBytes<pqc_attention> = 88;
template <>
inline constexpr size_t kMinimumBytes<pqc_partial> = 176;
template <>
inline constexpr size_t kMinimumBytes<pqc_step_item> = 32;
template <>
inline constexpr size_t kMinimumBytes<pqc_step_options> = 24;
template <>
inline constexpr size_t kMinimumBytes<pqc_step_positions> = 48;
template <>
inline constexpr size_t kMinimumBytes<pqc_step_attention> = 48;
template <>
inline constexpr size_t kMinimumBytes<pqc_page_options> = 24;
template <>
inline constexpr size_t kMinimumBytes<pqc_step_pages> = 40;
template <>
inline constexpr size_t kMinimumBytes<pqc_position_lists> = 32;
template <>
inline constexpr size_t kMinimumBytes<pqc_event> = 40;
template <>
inline constexpr size_t kMinimumBytes<pqc_gpu_options> = 120;
template <>
inline constexpr size_t kMinimumBytes<pqc_gpu_counts> = 72;
template <>
inline constexpr size_t kMinimumBytes<pqc_gpu_positions> = 32;
template <>
inline constexpr size_t kMinimumBytes<pqc_page_cache_spec> = 32;
template <>
inline constexpr size_t kMinimumBytes<pqc_page_source> = 48;
template <>
inline constexpr size_t kMinimumBytes<pqc_page_target> = 56;
template <>
inline constexpr size_t kMinimumBytes<pqc_page_key> = 32;

}  // namespace pqcached::client

#endif  // PQCACHED_CLIENT_BASE_STRUCT_SIZES_H_
