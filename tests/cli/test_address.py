"""Addresses that processes of one cluster share, and no other cluster."""

import socket
from contextlib import closing

import pytest

from cli.address import CannotListen, bind_address, reserve_address

HOST = "127.0.0.1"


def apis(port: int) -> socket.socket:
    """A socket of an API process."""
    return bind_address(HOST, port, shared=True, setting="--port")


def test_a_reserved_address_is_shared_by_the_clusters_own_processes_alone() -> None:
    """Another cluster gets an address of its own, and is refused this one, before anybody listens and after."""
    with (
        closing(reserve_address(HOST, 0, setting="--port")) as reserved,
        closing(reserve_address(HOST, 0, setting="--port")),
    ):
        port = reserved.getsockname()[1]
        with pytest.raises(CannotListen, match="pass another --port"):
            reserve_address(HOST, port, setting="--port")
        with closing(apis(port)) as one, closing(apis(port)) as other:
            for listener in (one, other):
                listener.listen()
            with pytest.raises(CannotListen, match="pass another --port"):
                reserve_address(HOST, port, setting="--port")


def test_an_address_is_reserved_again_while_old_connections_end() -> None:
    with closing(reserve_address(HOST, 0, setting="--port")) as reserved:
        port = reserved.getsockname()[1]
        with closing(apis(port)) as listener:
            listener.listen()
            client = socket.create_connection((HOST, port))
            served, _ = listener.accept()
            # Its side closes first and waits.
            served.close()
            client.close()
    reserve_address(HOST, port, setting="--port").close()


def test_an_address_of_one_process_is_nobody_elses() -> None:
    with closing(bind_address(HOST, 0, shared=False, setting="--port")) as alone:
        alone.listen()
        with pytest.raises(CannotListen):
            reserve_address(HOST, alone.getsockname()[1], setting="--port")
