"""Requests to a server that answers, closes idle connections, breaks off, hangs, or is not there."""

import json
import re
import socket
import threading
import time

import pytest

from eagle3_utils.states.extraction.connection import Connection, ServerBrokeOff, ServerUnreachable, generate_body

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class RawServer:
    """Treats every request as told: answer, answer and close, close, or hang. Counts connections."""

    def __init__(self, manners: list[str]):
        self.manners, self.num_connections = manners, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while self.manners:
            connection, _ = self._listener.accept()
            self.num_connections += 1
            with connection:
                while self.manners:
                    if not read_request(connection):
                        break
                    manner = self.manners.pop(0)
                    if manner.startswith("answer"):
                        connection.sendall(ANSWER)
                    if manner == "hang":
                        time.sleep(0.3)
                    if manner != "answer":
                        break
        self._listener.close()


def read_request(connection: socket.socket) -> bool:
    """Whether a whole request came, whose head and body may arrive apart, and not the client's end."""
    received = b""
    while part := connection.recv(1 << 16):
        received += part
        head, end, body = received.partition(b"\r\n\r\n")
        if end and len(body) == int(re.search(rb"Content-Length: (\d+)", head)[1]):
            return True
    return False


def test_a_connection_is_kept_and_made_again_when_the_server_closed_it_idle():
    server = RawServer(["answer", "answer and close", "answer"])
    connection = Connection(server.url, 5.0)
    assert connection.post("/generate", b"{}") == (200, b"{}")
    connection.post("/generate", b"{}")
    assert server.num_connections == 1
    time.sleep(0.05)
    assert connection.post("/generate", b"{}") == (200, b"{}")
    assert server.num_connections == 2


def test_what_went_wrong_is_told_apart():
    with pytest.raises(ServerBrokeOff):
        Connection(RawServer(["close"]).url, 5.0).post("/generate", b"{}")
    with pytest.raises(TimeoutError):
        Connection(RawServer(["hang"]).url, 0.05).post("/generate", b"{}")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ServerUnreachable, match="refused"):
        Connection(f"http://127.0.0.1:{port}", 5.0).post("/generate", b"{}")


def test_an_abandoned_request_ends():
    connection, ended = Connection(RawServer(["hang"]).url, 60.0), []

    def ask():
        with pytest.raises(ServerBrokeOff):
            connection.post("/generate", b"{}")
        ended.append(True)

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(0.05)
    connection.abandon()
    thread.join(0.2)
    assert ended == [True]
    Connection("http://127.0.0.1:1", 1.0).abandon()  # never opened: nothing to do


def test_the_body_is_json():
    body = json.loads(generate_body("hs-1-a", [3, 1, 2]))
    assert body == {"rid": "hs-1-a", "input_ids": [3, 1, 2], "sampling_params": {"max_new_tokens": 0, "temperature": 0}}
