"""Requests whose constraints the shard compiles. They hold their places in the queue; others pass them."""

import asyncio
from collections.abc import Callable
from typing import Final

from scheduler.request import Request
from scheduler.shard_client import ConstraintRefusedError, ShardClient, ShardError

# Each takes a thread of the shard's gRPC server, which has more.
MAX_CONCURRENT: Final = 4
RETRY_DELAY_S: Final = 0.1


class Preparations:
    """One task for each request that is being prepared. All methods run on one event loop."""

    def __init__(self, shard: ShardClient, refuse: Callable[[Request, ConstraintRefusedError], None]) -> None:
        """`refuse` ends a request whose constraint the shard can't honour."""
        self._shard = shard
        self._refuse = refuse
        self._tasks: dict[Request, asyncio.Task[None]] = {}
        self._free = asyncio.Semaphore(MAX_CONCURRENT)

    def begin(self, request: Request, prepared: Callable[[], None]) -> None:
        """Holds the request back until its constraint is compiled, then calls `prepared`."""
        if request not in self._tasks:
            request.preparing = True
            self._tasks[request] = asyncio.create_task(self._prepare(request, prepared))

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if task := self._tasks.pop(request, None):
            task.cancel()

    async def _prepare(self, request: Request, prepared: Callable[[], None]) -> None:
        try:
            await self._compile(request)
        except ConstraintRefusedError as error:
            del self._tasks[request]
            self._refuse(request, error)
            return
        del self._tasks[request]
        request.preparing = False
        prepared()

    async def _compile(self, request: Request) -> None:
        """Tries for as long as the shard is away."""
        submit = request.submit
        while True:
            try:
                async with self._free:
                    return await self._shard.prepare_constraint(submit.constraint, submit.prior_outputs)
            except ShardError:
                await asyncio.sleep(RETRY_DELAY_S)
