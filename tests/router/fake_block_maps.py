"""A scheduler that has a block map and nothing else."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from common.rpc import bind
from common.tls import ServerTls
from pagoda.scheduler.v1 import scheduler_pb2 as pb


class FakeBlockMaps:
    """Answers with `block_map`, once `may_answer` is set; counts the calls."""

    def __init__(self, block_map: pb.GetBlockMapResponse) -> None:
        self.block_map = block_map
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.calls = 0
        self.address = ""
        self._server = grpc.server(ThreadPoolExecutor(4))

    def _answer(self, request: pb.GetBlockMapRequest, context: Any) -> pb.GetBlockMapResponse:
        self.calls += 1
        self.may_answer.wait(30)
        return self.block_map

    @contextmanager
    def serving(self, tls: ServerTls | None = None) -> Iterator["FakeBlockMaps"]:
        method = grpc.unary_unary_rpc_method_handler(
            self._answer,
            request_deserializer=pb.GetBlockMapRequest.FromString,
            response_serializer=pb.GetBlockMapResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(
            "pagoda.scheduler.v1.SchedulerService", {"GetBlockMap": method}
        )
        self._server.add_generic_rpc_handlers((handler,))
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1:0', tls)}"
        self._server.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Goes away."""
        self.may_answer.set()
        self._server.stop(0).wait()
