"""Which schedulers there are: addresses that stay, and names whose addresses come and go."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from common.rpc import split_host_port

PREFIX: Final = "dns:"
# Of one name, in the order of the resolver; more are left out.
MAX_ADDRESSES: Final = 256

_log = logging.getLogger(__name__)

# From host and port to IP addresses; raises OSError.
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True)
class Endpoint:
    """Where a scheduler is, and whose certificate it shows: None, that of the address's host."""

    address: str
    server_name: str | None = None


async def resolve(host: str, port: int) -> list[str]:
    """Asks the system's resolver, on a thread.

    Raises:
        OSError: it doesn't know.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class Discovery:
    """The schedulers of `--scheduler-addresses`, where `dns:HOST:PORT` is all that are behind a name.

    Attributes:
        names: Whether there is anything to ask a resolver for.
    """

    def __init__(self, entries: Sequence[str], resolve: Resolve = resolve) -> None:
        self._static = [Endpoint(entry) for entry in entries if not entry.startswith(PREFIX)]
        self._found: dict[str, list[Endpoint]] = {
            entry.removeprefix(PREFIX): [] for entry in entries if entry.startswith(PREFIX)
        }
        self.names = bool(self._found)
        self._resolve = resolve
        self._problems: dict[str, str] = {}

    @property
    def endpoints(self) -> dict[str, Endpoint]:
        """All that are known, by address."""
        found = [endpoint for endpoints in self._found.values() for endpoint in endpoints]
        return {endpoint.address: endpoint for endpoint in [*found, *self._static]}

    async def refresh(self) -> None:
        """Asks for every name. One that can't be resolved keeps the addresses that it had."""
        await asyncio.gather(*map(self._refresh, self._found))

    async def _refresh(self, name: str) -> None:
        host, port = split_host_port(name)
        try:
            addresses = await self._resolve(host, port)
        except OSError as error:
            problem = str(error)
        else:
            problem = "" if len(addresses) <= MAX_ADDRESSES else f"more than {MAX_ADDRESSES} addresses"
            self._found[name] = [
                Endpoint(f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}", host)
                for ip in addresses[:MAX_ADDRESSES]
            ]
        if problem != self._problems.get(name, ""):
            _log.warning("--scheduler-addresses %s%s: %s", PREFIX, name, problem or "resolved again")
            self._problems[name] = problem
