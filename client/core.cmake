# All of the client except what it loads at run time, for libpqcached_client and tests. Needs only
# kernels and kvstore/read.
set(sources
  abi/attach.cc
  abi/cache.cc
  abi/cache_events.cc
  abi/client.cc
  abi/decoder.cc
  abi/error.cc
  abi/gpu.cc
  abi/load.cc
  abi/merge.cc
  abi/operations.cc
  abi/page_cache.cc
  abi/query.cc
  abi/rows.cc
  abi/rpc_library.cc
  abi/enqueue.cc
  abi/progress.cc
  abi/model.cc
  abi/reorder.cc
  abi/sequences.cc
  abi/step.cc
  base/arguments.cc
  base/call_log.cc
  base/deadline.cc
  base/error.cc
  base/events.cc
  base/library.cc
  base/load.cc
  base/operations.cc
  base/pack.cc
  base/partials.cc
  base/tensors.cc
  base/token_names.cc
  gpu/decode.cc
  gpu/gpu.cc
  gpu/ingest.cc
  gpu/load.cc
  gpu/merge.cc
  gpu/pages.cc
  gpu/step.cc
  local/broker.cc
  local/image.cc
  local/ingest.cc
  local/page_transfer.cc
  local/link.cc
  local/mapping.cc
  local/layer_source.cc
  local/sequence.cc
  local/session.cc
  local/staging.cc
  local/step_slots.cc
  local/workers.cc
  step/decode.cc
  step/decode_attention.cc
  step/decode_rows.cc
  step/handles.cc
  step/handover.cc
  step/layer.cc
  step/layer_rows.cc
  step/mapped_reads.cc
  step/offload.cc
  step/pages.cc
  step/positions.cc
  step/preparer.cc
  step/ready.cc
  step/remote_lists.cc
  step/remote_reads.cc
  step/sender.cc
  step/step.cc
)
list(TRANSFORM sources PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
add_library(pqcached_client_core OBJECT ${sources})
target_include_directories(pqcached_client_core PUBLIC ${CMAKE_CURRENT_LIST_DIR}/include)
target_link_libraries(pqcached_client_core
  PUBLIC pqcached_base pqcached_kernels pqcached_kvstore_read Threads::Threads ${CMAKE_DL_LIBS} PRIVATE pqcached_options)
set_target_properties(pqcached_client_core PROPERTIES POSITION_INDEPENDENT_CODE ON)
