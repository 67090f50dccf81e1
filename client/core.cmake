# All of the client except what it loads at run time, for libpqcached_client and tests. Needs only
# kernels and kvstore/read.
set(sources
  arguments.cc
  cache.cc
  client.cc
  deadline.cc
  decoder.cc
  error.cc
  error_calls.cc
  gpu.cc
  gpu_calls.cc
  handles.cc
  handover.cc
  ingest_gpu.cc
  layer_rows.cc
  library.cc
  local/broker.cc
  local/image.cc
  local/ingest.cc
  local/link.cc
  local/mapping.cc
  local/read.cc
  local/sequence.cc
  local/session.cc
  local/staging.cc
  local/step_slots.cc
  local/view.cc
  local/workers.cc
  merge.cc
  offload.cc
  pack.cc
  query.cc
  rows.cc
  rpc_library.cc
  sender.cc
  sequences.cc
  step.cc
  step_calls.cc
  step_gpu.cc
  step_layer.cc
  step_ready.cc
)
list(TRANSFORM sources PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
add_library(pqcached_client_core OBJECT ${sources})
target_include_directories(pqcached_client_core PUBLIC ${CMAKE_CURRENT_LIST_DIR}/include)
target_link_libraries(pqcached_client_core
  PUBLIC pqcached_base pqcached_kernels pqcached_kvstore_read Threads::Threads ${CMAKE_DL_LIBS} PRIVATE pqcached_options)
set_target_properties(pqcached_client_core PROPERTIES POSITION_INDEPENDENT_CODE ON)
