/* The example of operation.h, compiled as C99. It is not run, because it needs a sidecar. */
#include "pqcached/operation.h"

typedef struct engine_loop engine_loop;
void watch_readable(engine_loop* loop, int fd);
int serve_until_readable(engine_loop* loop, int fd);
void finish_request(void* request, pqc_status status);
pqc_status reopen_client(void);
pqc_status operation_h_example(pqc_client* client, pqc_sequence* sequence, pqc_build_options build,
                               engine_loop* loop, void* request);

// clang-format off
pqc_status operation_h_example(pqc_client* client, pqc_sequence* sequence, pqc_build_options build,
                               engine_loop* loop, void* request) {
  // [example]
  int fd = -1;
  pqc_status status = pqc_client_event_fd(client, &fd);
  if (status != PQC_OK) return status;
  watch_readable(loop, fd);

  pqc_operation* operation = NULL;
  status = pqc_build_index_begin(sequence, &build, request, &operation);
  if (status != PQC_OK) return status;

  while (serve_until_readable(loop, fd)) {
    pqc_event event = PQC_INIT(pqc_event);
    while (pqc_client_next_event(client, &event) == PQC_OK && event.kind != PQC_EVENT_NONE) {
      if (event.kind == PQC_EVENT_SESSION_LOST) return reopen_client();
      if (event.kind != PQC_EVENT_OPERATION) continue;
      uint32_t done = 0;
      status = pqc_operation_poll(event.operation, &done);
      finish_request(event.context, status);
      pqc_operation_close(event.operation, 0);
    }
  }
  // [/example]
  return status;
}
// clang-format on
