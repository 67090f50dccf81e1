/* pqcached client: long calls that an engine begins and does not wait for, and the descriptor by
 * which its loop waits for events. The conventions of client.h hold.
 *
 * An operation is a call that is made on a thread of the client's own, of at most four that start
 * with the first operation. A call that begins one returns at once. The operation's own status is
 * that of the call in its plain form (pqc_sequence_flush, pqc_build_index, pqc_ingest), and so are
 * deadline and effect. Its end is an event of the client; it can also be polled, or waited for.
 *
 * Handles. An operation has its own reference to sequence and client, so both may be closed while
 * it is in progress:
 *   pqc_sequence_drop  cancels the sequence's operations, as pqc_operation_cancel does, and does
 *                      not wait for them; those that cannot be cancelled end with an error, mostly
 *                      PQC_NOT_FOUND.
 *   pqc_sequence_detach  does the same for the operations of its handle (attach.h).
 *   pqc_client_close   cancels all operations and waits until they have ended, mostly with
 *                      PQC_CANCELLED: at most until their deadlines, a build until its present
 *                      codebook is finished. Their handles remain valid, and the engine still
 *                      closes them.
 *
 * Exclusion (client.h, convention 6). A beginning is PQC_ABORTED while a call changes the sequence
 * or a step has it. From then on the sequence is reserved, so that other changes and steps are
 * PQC_ABORTED: by an ingest until its end, and by a build until it is running, which it is at once
 * unless two other builds of the client run. Then steps and rows go on (pqc_build_index).
 *
 * Example, the loop of an engine that builds an index while it serves other requests:
 *
 *     int fd = -1;
 *     pqc_status status = pqc_client_event_fd(client, &fd);
 *     if (status != PQC_OK) return status;
 *     watch_readable(loop, fd);
 *
 *     pqc_operation* operation = NULL;
 *     status = pqc_build_index_begin(sequence, &build, request, &operation);
 *     if (status != PQC_OK) return status;
 *
 *     while (serve_until_readable(loop, fd)) {
 *       pqc_event event = PQC_INIT(pqc_event);
 *       while (pqc_client_next_event(client, &event) == PQC_OK && event.kind != PQC_EVENT_NONE) {
 *         if (event.kind == PQC_EVENT_SESSION_LOST) return reopen_client();
 *         if (event.kind != PQC_EVENT_OPERATION) continue;
 *         uint32_t done = 0;
 *         status = pqc_operation_poll(event.operation, &done);
 *         finish_request(event.context, status);
 *         pqc_operation_close(event.operation, 0);
 *       }
 *     }
 */
#ifndef PQCACHED_OPERATION_H_
#define PQCACHED_OPERATION_H_

#include "pqcached/client.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- Operations */

/* A call that has begun. Closed once, by pqc_operation_close. */
typedef struct pqc_operation pqc_operation;

/* Begins pqc_sequence_flush. `context` is the engine's, and part of the operation's event.
 * *operation is set on PQC_OK, and NULL otherwise. Steps with the sequence go on; rows of steps
 * that end after the beginning may or may not be waited for.
 *
 * Errors: PQC_RESOURCE_EXHAUSTED  1024 operations of the client wait to begin, or the process can
 *                                 have no thread: repeat when some have ended */
PQC_API pqc_status pqc_sequence_flush_begin(pqc_sequence* sequence, void* context,
                                            pqc_operation** operation);

/* Begins pqc_build_index. *options is copied; its callback is called on a thread of the client,
 * must not close the client or the operation, and is not called after the operation's end. At most
 * two builds of a client run at once; others wait until one has ended.
 *
 * Errors: those of pqc_sequence_flush_begin, and
 *         PQC_INVALID_ARGUMENT  `options`, its size or its index
 *         PQC_ABORTED           another call changes the sequence, or a step has it */
PQC_API pqc_status pqc_build_index_begin(pqc_sequence* sequence, const pqc_build_options* options,
                                         void* context, pqc_operation** operation);

/* Begins pqc_ingest_with for several layers: layers [layer_count] from position `first_position`
 * on, each with any number of tokens; `options` (NULL = none) has names of tokens. Other than
 * pqc_enqueue_rows it does not copy the rows before it returns.
 *
 * Memory: the structs, their shapes and strides, and the names are copied. The rows, and the
 * `blocks` and `slots` of block tables, are read until the operation is done (pqc_operation_poll
 * sets `done`, or pqc_operation_close returns PQC_OK): until then the engine must neither change
 * nor free them, whatever happens to client and sequence.
 *
 * The layers are stored one after the other in the order of the array, each as a whole or not at
 * all. When one fails, those before it remain stored, and the field of the error begins with
 * "layers[i]". Beginning the same operation again is harmless.
 *
 * Errors: those of pqc_sequence_flush_begin, and
 *         PQC_INVALID_ARGUMENT  first_position, layers (layer, shape), options
 *         PQC_UNIMPLEMENTED     memory of a GPU
 *         PQC_ABORTED           another call changes the sequence, or a step has it */
PQC_API pqc_status pqc_ingest_begin(pqc_sequence* sequence, uint64_t first_position,
                                    const pqc_layer_rows* layers, uint32_t layer_count,
                                    const pqc_row_options* options, void* context,
                                    pqc_operation** operation);

/* Sets *done to 1 and returns the operation's own status, with its message, field and retry time,
 * when the operation has ended; sets it to 0 and returns PQC_OK otherwise. Never waits. May be
 * repeated. */
PQC_API pqc_status pqc_operation_poll(pqc_operation* operation, uint32_t* done);

/* Waits until the operation has ended, and returns its own status as pqc_operation_poll does. The
 * operation goes on when the time runs out. timeout_ms: 0 = that of the client, PQC_TIMEOUT_POLL =
 * no wait.
 *
 * Errors: PQC_DEADLINE_EXCEEDED  about the field "timeout_ms": it has not ended in time */
PQC_API pqc_status pqc_operation_wait(pqc_operation* operation, uint32_t timeout_ms);

/* Asks the operation to end early. It never waits; the operation ends as usual, with its event. One
 * that has not begun ends with PQC_CANCELLED; a build does at the end of its present codebook,
 * unless it is too late (pqc_build_callback), and an ingest between two layers. A flush that has
 * begun is not cancelled, nor is an operation that has ended. */
PQC_API pqc_status pqc_operation_cancel(pqc_operation* operation);

/* Closes the handle: cancels the operation, waits until it has ended, at most timeout_ms as
 * pqc_operation_wait does, and removes its event if that is still pending. NULL does nothing. No
 * other call may use the handle.
 *
 * Errors: PQC_DEADLINE_EXCEEDED  the operation has not ended in time: the handle remains open, and
 *                                is to be closed again */
PQC_API pqc_status pqc_operation_close(pqc_operation* operation, uint32_t timeout_ms);

/* ---- Events */

typedef enum pqc_event_kind {
  PQC_EVENT_NONE = 0,
  PQC_EVENT_OPERATION = 1, /* an operation has ended: `operation`, `context` */
  /* Another call shortened or dropped the sequence, or its lease has expired: steps that have it
   * fail, and the next step begins with a new lease. `sequence_id` */
  PQC_EVENT_SEQUENCE_REVOKED = 2,
  PQC_EVENT_SEQUENCE_SUSPENDED = 3, /* by another client, or by the sidecar. `sequence_id` */
  PQC_EVENT_NEW_WORKER = 4,  /* the sidecar's worker was replaced, and the client has attached to
                                 the new one: steps that had no worker may begin again */
  PQC_EVENT_SESSION_LOST = 5 /* the session is lost: open a new client */
} pqc_event_kind;

typedef struct pqc_event {
  size_t struct_size;
  pqc_event_kind kind;
  pqc_operation* operation; /* NULL for other kinds */
  void* context;            /* of the operation */
  uint64_t sequence_id;     /* as pqc_sequence_id; 0 for other kinds */
} pqc_event;

/* Sets *fd to the client's event descriptor, for poll, epoll and the like: it is readable as long
 * as events are pending, which pqc_client_next_event takes. It belongs to the client, which closes
 * it in pqc_client_close: neither read nor close it. Every call gives the same descriptor.
 *
 * Ends of operations are events on both paths, and are kept from the client's beginning on. Events
 * of the other kinds are those of the local path that occur after the first call of this function;
 * those of a sequence need a lease on it, which the client acquires with the first read or step.
 *
 * Events of one kind that have the same subject (an operation, a sequence, the session) are one
 * event until it is taken. So events need no room that grows, and none is lost.
 *
 * Errors: PQC_RESOURCE_EXHAUSTED  the process has no descriptor left */
PQC_API pqc_status pqc_client_event_fd(pqc_client* client, int* fd);

/* Takes the oldest pending event; its kind is PQC_EVENT_NONE when there is none. Never waits. */
PQC_API pqc_status pqc_client_next_event(pqc_client* client, pqc_event* event);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_OPERATION_H_ */
