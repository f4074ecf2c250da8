"""Addresses are checked before they are used, and bound once."""

from concurrent import futures
from pathlib import Path

import grpc
import pytest

from common.rpc import SERVER_OPTIONS, AddressError, bind, check_address, split_host_port


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("localhost:50051", ("localhost", 50051)),
        ("[::1]:0", ("::1", 0)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
    ],
)
def test_host_and_port_are_split(address: str, expected: tuple[str, int]) -> None:
    assert split_host_port(address) == expected


@pytest.mark.parametrize(
    "address", ["", "localhost", ":1", "host:", "host:-1", "host:65536", "host:a", "host:²"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(AddressError, match="is not HOST:PORT"):
        split_host_port(address)


def test_a_unix_path_that_the_kernel_would_cut_is_refused() -> None:
    check_address("--option", "unix:/tmp/short")

    with pytest.raises(AddressError, match="at most 100 bytes"):
        check_address("--option", "unix:/" + "x" * 100)


def test_a_port_is_bound_once() -> None:
    servers = [grpc.server(futures.ThreadPoolExecutor(1), options=SERVER_OPTIONS) for _ in range(2)]
    port = bind(servers[0], "127.0.0.1:0")

    with pytest.raises(AddressError, match=f"127.0.0.1:{port}: can't be bound"):
        bind(servers[1], f"127.0.0.1:{port}")


def test_a_unix_socket_is_bound(tmp_path: Path) -> None:
    bind(grpc.server(futures.ThreadPoolExecutor(1)), f"unix:{tmp_path}/s")
