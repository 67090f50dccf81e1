/* pqcached client: status codes, and the last failure of the calling thread. Included by client.h.
 *
 * Status codes (the wire has the same ones: proto/pqcached/v1/kv_cache.proto)
 *
 *   code                     meaning                             what the caller does
 *   PQC_OK                   the call did its work               -
 *   PQC_CANCELLED            a callback cancelled the build; an  repeats it if it is still wanted
 *                            operation was cancelled, or its
 *                            sequence or client was closed
 *   PQC_UNKNOWN              a status that no version defines    reports a bug
 *   PQC_INVALID_ARGUMENT     an argument breaks a documented     changes the field that the message
 *                            rule; positions leave a gap         names; never succeeds unchanged
 *   PQC_DEADLINE_EXCEEDED    no answer in time; the sidecar may  repeats reads, pqc_ingest and
 *                            still have done the work            pqc_append; else describes first:
 *                                                                a repeated create or fork makes
 *                                                                another sequence
 *   PQC_NOT_FOUND            no such sequence, cache or lease:   creates it again and ingests;
 *                            dropped, or evicted when memory     never succeeds on this handle. A
 *                            was short (the message says so)     cache that was dropped: closes
 *                                                                its handle and opens it again
 *   PQC_ALREADY_EXISTS       the index is built, or the group    uses the one that exists
 *                            key is in use
 *   PQC_PERMISSION_DENIED    the tenant belongs to other users   asks the operator; never succeeds
 *   PQC_RESOURCE_EXHAUSTED   memory or a limit; the message has  repeats when the retry time has
 *                            the shortfall in bytes              passed, or drops sequences, or
 *                                                                asks for less
 *   PQC_FAILED_PRECONDITION  the object's state does not allow   changes that state (resume, build
 *                            the call                            the index, open a client), repeats
 *   PQC_ABORTED              another call changes the sequence,  discards the call's outputs and
 *                            or an index is being built, or the  repeats it, at once or when the
 *                            rows changed during the call        other call has ended
 *   PQC_OUT_OF_RANGE         tokens that are not stored; too     stores the tokens, or passes more
 *                            many tokens; too small a capacity   room, and repeats
 *   PQC_UNIMPLEMENTED        not in this version                 does without; never succeeds
 *   PQC_INTERNAL             a bug, here or in the sidecar       reports it
 *   PQC_UNAVAILABLE          no connection, a worker that has    repeats after the retry time; when
 *                            ended, a draining sidecar, or a     that is 0, opens a new client
 *                            lost session
 *   PQC_DATA_LOSS            stored bytes fail their checksum    drops the sequence, ingests again
 *   PQC_UNAUTHENTICATED      the session has ended               opens a new client
 *
 * How far back the caller has to go when a call may succeed later. The retry time decides whether
 * and when; this table decides what is repeated.
 *
 *   code                        after a call outside of a step  in a step (pqc_step_*)
 *   PQC_ABORTED                 repeat the call                 abandon the step, begin it again
 *   PQC_DEADLINE_EXCEEDED       repeat the call                 likewise; repeat only the call for
 *                                                               a layer with PQC_STEP_NO_WAIT
 *   PQC_UNAVAILABLE, with a     repeat the call                 abandon the step, begin it again
 *     retry time
 *   PQC_RESOURCE_EXHAUSTED      repeat the call                 abandon the step, begin it again
 *   PQC_FAILED_PRECONDITION     change the state (resume, build the index), then as PQC_ABORTED
 *   PQC_NOT_FOUND,              drop the sequence, create it again, and ingest its rows: what other
 *     PQC_DATA_LOSS             sequences share or the engine keeps
 *   PQC_UNAVAILABLE without a   close the client, open a new one, and create all of its caches and
 *     retry time,               sequences again
 *     PQC_UNAUTHENTICATED
 *
 * Calls that close a handle (pqc_sequence_drop, pqc_sequence_detach, pqc_step_end) have closed it
 * whatever they return, and are not repeated. A build that is repeated after
 * PQC_DEADLINE_EXCEEDED or PQC_UNAVAILABLE may be PQC_ALREADY_EXISTS: it has succeeded.
 *
 * pqc_step_begin is a call outside of a step. pqc_step_end closes the step in any case, so nothing
 * has to be abandoned after it; no row of the step is stored then, and the step begins again at the
 * same positions. An error of rows of earlier steps ("rows of an earlier step") stays until
 * pqc_sequence_flush has returned it.
 *
 * Any call may return PQC_INVALID_ARGUMENT for NULL where a pointer is needed,
 * PQC_FAILED_PRECONDITION after its client was closed, PQC_RESOURCE_EXHAUSTED when this process is
 * out of memory or too many calls wait in the sidecar, PQC_DEADLINE_EXCEEDED, PQC_UNAVAILABLE,
 * PQC_UNAUTHENTICATED and PQC_INTERNAL. Calls on a sequence may return PQC_NOT_FOUND and, while it
 * is suspended, PQC_FAILED_PRECONDITION; calls that read rows, PQC_DATA_LOSS. The comments of
 * the calls list what they may return in addition.
 *
 * Example, which repeats a call for as long as that is worthwhile:
 *
 *     while (pqc_ingest(sequence, 0, 0, keys, values) != PQC_OK) {
 *       const uint32_t retry_ms = pqc_last_error_retry_ms();
 *       if (retry_ms == 0) {
 *         fprintf(stderr, "%s (field: %s)\n", pqc_last_error(), pqc_last_error_field());
 *         return 1;
 *       }
 *       wait_ms(retry_ms);
 *     }
 */
#ifndef PQCACHED_STATUS_H_
#define PQCACHED_STATUS_H_

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define PQC_API __attribute__((visibility("default")))
#else
#define PQC_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define PQC_ABI_VERSION 1u

/* Value of a cleared struct whose struct_size is set: pqc_selection s = PQC_INIT(pqc_selection); */
#ifdef __cplusplus
#define PQC_INIT(type)                         \
  ([] {                                        \
    type pqc_init_value{};                     \
    pqc_init_value.struct_size = sizeof(type); \
    return pqc_init_value;                     \
  }())
#else
#define PQC_INIT(type) \
  { .struct_size = sizeof(type) }
#endif

/* See the table at the top. The numbers are those of gRPC. */
typedef enum pqc_status {
  PQC_OK = 0,
  PQC_CANCELLED = 1,
  PQC_UNKNOWN = 2,
  PQC_INVALID_ARGUMENT = 3,
  PQC_DEADLINE_EXCEEDED = 4,
  PQC_NOT_FOUND = 5,
  PQC_ALREADY_EXISTS = 6,
  PQC_PERMISSION_DENIED = 7,
  PQC_RESOURCE_EXHAUSTED = 8,
  PQC_FAILED_PRECONDITION = 9,
  PQC_ABORTED = 10,
  PQC_OUT_OF_RANGE = 11,
  PQC_UNIMPLEMENTED = 12,
  PQC_INTERNAL = 13,
  PQC_UNAVAILABLE = 14,
  PQC_DATA_LOSS = 15,
  PQC_UNAUTHENTICATED = 16
} pqc_status;

/* Returns the library's PQC_ABI_VERSION: an engine that was compiled with another one must not go
 * on. Never fails. */
PQC_API uint32_t pqc_abi_version(void);
/* Returns the name of a status: "OK", "INVALID_ARGUMENT", ..., or "UNKNOWN_STATUS" for a number
 * that is none. The string is static. Never fails. */
PQC_API const char* pqc_status_name(pqc_status status);
/* Returns the message of the calling thread's last failure, "" when its last call succeeded. At
 * most 1281 bytes. The string belongs to the library and is valid until the thread's next call that
 * returns a status. Never fails. */
PQC_API const char* pqc_last_error(void);
/* Returns the path of the refused field in the words of this header: "items[2].query_position",
 * "selection.ratio". "" when the failure is about no field, or there is none. Valid as long as
 * pqc_last_error's. Never fails. */
PQC_API const char* pqc_last_error_field(void);
/* Returns the retry time in milliseconds, after which the call may succeed, or, in a step, the same
 * step that is begun again (see the second table at the top); 0 when that is not worthwhile, and
 * when there was no failure. Never fails. */
PQC_API uint32_t pqc_last_error_retry_ms(void);

#ifdef __cplusplus
}
#endif

#endif /* PQCACHED_STATUS_H_ */
