"""A stranger's client: nothing but the .proto files and plain grpcio talk to the daemon.

wire_test.py DAEMON PROTO_DIR: starts the daemon on a unix socket in a temporary directory.
"""

import pathlib
import queue
import subprocess
import sys
import tempfile
import unittest

import grpc
import numpy as np

DAEMON, PROTO_DIR = sys.argv[1:3]
generated = tempfile.TemporaryDirectory()
subprocess.run(["protoc", f"-I{PROTO_DIR}", f"--python_out={generated.name}",
                *(str(p) for p in pathlib.Path(PROTO_DIR).glob("pqcached/v1/*.proto"))], check=True)
sys.path[:0] = [generated.name, str(pathlib.Path(__file__).resolve().parents[1])]

import children  # noqa: E402  (found in the line above)

from pqcached.v1 import admin_pb2, kv_cache_pb2, status_details_pb2, types_pb2  # noqa: E402  (generated above)

try:  # what strangers have: googleapis-common-protos
    from google.rpc.error_details_pb2 import BadRequest, RetryInfo
    from google.rpc.status_pb2 import Status
except ImportError:  # the same fields under names of our own
    Status = status_details_pb2.StatusDetails
    BadRequest = status_details_pb2.BadRequestDetail
    RetryInfo = status_details_pb2.RetryInfoDetail

TOKENS, KV_HEADS, QUERY_HEADS, DIM = 700, 2, 4, 64
TIMEOUT = 20


def tensor(array):
    names = {np.dtype(np.float32): types_pb2.DTYPE_FLOAT32, np.dtype(np.float16): types_pb2.DTYPE_FLOAT16}
    return types_pb2.Tensor(dtype=names[array.dtype], shape=array.shape, inline_data=array.tobytes())


class Caller:
    """Calls by method name, with the session's token as metadata."""

    def __init__(self, channel):
        self.channel = channel
        self.metadata = []

    def unary(self, service, method, request, answer_type):
        call = self.channel.unary_unary(f"/pqcached.v1.{service}/{method}",
                                        request_serializer=type(request).SerializeToString,
                                        response_deserializer=answer_type.FromString)
        return call(request, timeout=TIMEOUT, metadata=self.metadata)

    def open_session(self, requests):
        call = self.channel.stream_stream("/pqcached.v1.KvCache/Session",
                                          request_serializer=kv_cache_pb2.SessionRequest.SerializeToString,
                                          response_deserializer=kv_cache_pb2.SessionEvent.FromString)
        events = call(requests)
        self.metadata = [("pqcached-session", next(events).opened.session_token)]
        return events


class WireTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.endpoint = f"unix://{directory.name}/pqcached.sock"
        daemon = subprocess.Popen([DAEMON, "--listen", self.endpoint], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                  preexec_fn=children.end_with_parent)
        self.addCleanup(daemon.wait, TIMEOUT)
        self.addCleanup(daemon.terminate)
        channel = grpc.insecure_channel(self.endpoint)
        self.addCleanup(channel.close)
        # wait_for_ready lets gRPC itself retry until the daemon listens.
        grpc.channel_ready_future(channel).result(timeout=TIMEOUT)
        self.caller = Caller(channel)

        requests = queue.Queue()
        requests.put(kv_cache_pb2.SessionRequest(open=kv_cache_pb2.SessionOpen(client_name="stranger", protocol_version=1)))
        self.session = self.caller.open_session(iter(requests.get, None))
        self.addCleanup(self.session.cancel)

    def create_sequence(self):
        group = types_pb2.LayerGroup(kind=types_pb2.LAYER_KIND_SELECTED, layers=[0], kv_heads=KV_HEADS,
                                     query_heads=QUERY_HEADS, key_dim=DIM, value_dim=DIM, dtype=types_pb2.DTYPE_FLOAT32)
        cache = self.caller.unary("KvCache", "OpenCache", kv_cache_pb2.OpenCacheRequest(
            name="stranger", model_fingerprint="test", layer_groups=[group], capacity_bytes=64 << 20,
            default_index=types_pb2.IndexSpec(flat=types_pb2.FlatIndex())), kv_cache_pb2.OpenCacheResponse)
        return self.caller.unary("KvCache", "CreateSequence", kv_cache_pb2.CreateSequenceRequest(cache_id=cache.cache_id),
                                 kv_cache_pb2.CreateSequenceResponse).sequence_id

    def ingest(self, sequence_id, keys, values):
        chunk = kv_cache_pb2.IngestChunk(first_position=0, rows=kv_cache_pb2.LayerRows(
            layer=0, keys=tensor(keys), values=tensor(values)))
        call = self.caller.channel.stream_unary("/pqcached.v1.KvCache/Ingest",
                                                request_serializer=kv_cache_pb2.IngestRequest.SerializeToString,
                                                response_deserializer=kv_cache_pb2.IngestResponse.FromString)
        return call(iter([kv_cache_pb2.IngestRequest(header=kv_cache_pb2.IngestHeader(sequence_id=sequence_id)),
                          kv_cache_pb2.IngestRequest(chunk=chunk)]), timeout=TIMEOUT, metadata=self.caller.metadata)

    def top_k(self, sequence_id, queries, index):
        query = kv_cache_pb2.Query(sequence_id=sequence_id, layer=0, query_position=TOKENS - 1, queries=tensor(queries))
        selection = types_pb2.Selection(index=index, sink_tokens=4, window_tokens=16, token_count=4 + 16 + 50)
        return self.caller.unary("KvCache", "TopK", kv_cache_pb2.TopKRequest(
            items=[kv_cache_pb2.TopKItem(query=query, selection=selection)]), kv_cache_pb2.TopKResponse).items[0]

    def refused(self, code, call):
        """The field and the retry time in milliseconds of a refused call, by the details of google.rpc."""
        with self.assertRaises(grpc.RpcError) as caught:
            call()
        error = caught.exception
        self.assertEqual(code, error.code())
        status = Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
        self.assertEqual((code.value[0], error.details()), (status.code, status.message))  # as grpcio-status requires
        field, retry_ms = None, None
        for detail in status.details:
            name = detail.type_url.removeprefix("type.googleapis.com/google.rpc.")
            if name == "BadRequest":
                (violation,) = BadRequest.FromString(detail.value).field_violations
                field = violation.field
                self.assertEqual(f"{field}: {violation.description}", error.details())
            else:
                self.assertEqual("RetryInfo", name)
                retry_ms = RetryInfo.FromString(detail.value).retry_delay.ToMilliseconds()
        return field, retry_ms

    def test_refusals_have_the_details_of_google_rpc(self):
        def create(cache_id):
            return self.caller.unary("KvCache", "CreateSequence", kv_cache_pb2.CreateSequenceRequest(cache_id=cache_id),
                                     kv_cache_pb2.CreateSequenceResponse)
        queries = np.zeros((1, QUERY_HEADS, DIM), dtype=np.float32)
        flat = types_pb2.IndexSpec(flat=types_pb2.FlatIndex())
        self.assertEqual(("cache_id", None), self.refused(grpc.StatusCode.NOT_FOUND, lambda: create(999)))
        self.assertEqual(("items[0].query.sequence_id", None),
                         self.refused(grpc.StatusCode.NOT_FOUND, lambda: self.top_k(999, queries, flat)))
        with grpc.insecure_channel(self.endpoint + ".admin") as operators:
            Caller(operators).unary("Admin", "Drain", admin_pb2.DrainRequest(), admin_pb2.DrainResponse)
        self.assertEqual((None, 1000), self.refused(grpc.StatusCode.UNAVAILABLE, lambda: create(1)))

    def test_lists_sequences_and_ranks_exactly(self):
        random = np.random.default_rng(7)
        keys = random.standard_normal((TOKENS, KV_HEADS, DIM), dtype=np.float32)
        values = random.standard_normal((TOKENS, KV_HEADS, DIM), dtype=np.float32)
        queries = random.standard_normal((1, QUERY_HEADS, DIM), dtype=np.float32)
        sequence_id = self.create_sequence()
        self.assertEqual(TOKENS, self.ingest(sequence_id, keys, values).token_count)

        listed = self.caller.unary("Admin", "ListSequences", admin_pb2.ListSequencesRequest(),
                                   admin_pb2.ListSequencesResponse).sequences
        self.assertEqual([(sequence_id, TOKENS)], [(s.sequence_id, s.token_count) for s in listed])

        answer = self.top_k(sequence_id, queries, types_pb2.IndexSpec(flat=types_pb2.FlatIndex()))
        self.assertEqual((KV_HEADS, 50, 4, 16), (answer.kv_heads, answer.count, answer.sink_tokens, answer.window_tokens))
        found = np.array(answer.positions).reshape(KV_HEADS, 50)
        group = QUERY_HEADS // KV_HEADS
        for head in range(KV_HEADS):
            candidates = keys[4:TOKENS - 16, head].astype(np.float64)
            logits = candidates @ queries[0, head * group:(head + 1) * group].astype(np.float64).T / np.sqrt(DIM)
            weights = np.exp(logits - logits.max(axis=0))
            shared = (weights / weights.sum(axis=0)).sum(axis=1)
            expected = np.sort(np.argsort(-shared)[:50]) + 4
            np.testing.assert_array_equal(expected, found[head])

    def test_builds_an_index_and_finds_the_best_key_with_it(self):
        random = np.random.default_rng(8)
        keys = random.standard_normal((TOKENS, KV_HEADS, DIM), dtype=np.float32)
        needle = 333
        queries = np.repeat(keys[needle] * 4, QUERY_HEADS // KV_HEADS, axis=0)[np.newaxis]
        sequence_id = self.create_sequence()
        self.ingest(sequence_id, keys, keys)
        index = types_pb2.IndexSpec(pq=types_pb2.PqIndex(subspaces=4, bits=8))
        build = self.caller.channel.unary_stream("/pqcached.v1.KvCache/BuildIndex",
                                                 request_serializer=kv_cache_pb2.BuildIndexRequest.SerializeToString,
                                                 response_deserializer=kv_cache_pb2.BuildProgress.FromString)
        progress = list(build(kv_cache_pb2.BuildIndexRequest(sequence_id=sequence_id, index=index, sink_tokens=4),
                              timeout=TIMEOUT, metadata=self.caller.metadata))
        self.assertEqual(1, progress[-1].layers_done)
        answer = self.top_k(sequence_id, queries, index)
        for head in range(KV_HEADS):
            self.assertIn(needle, answer.positions[head * 50:(head + 1) * 50])

    def test_a_wrong_shape_is_refused_by_name(self):
        sequence_id = self.create_sequence()
        wrong = np.zeros((8, KV_HEADS, DIM + 8), dtype=np.float32)
        with self.assertRaises(grpc.RpcError) as raised:
            self.ingest(sequence_id, wrong, wrong)
        self.assertEqual(grpc.StatusCode.INVALID_ARGUMENT, raised.exception.code())
        self.assertIn("keys", raised.exception.details())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
