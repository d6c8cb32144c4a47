"""Commands on a machine that reaches the network only through a proxy, as in many clusters."""

import os
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from heddle.cli import main


class _Nothing(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def url() -> Iterator[str]:
    """A server on this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Nothing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def proxies_of_now() -> Iterator[None]:
    """urllib keeps the proxies of its first request in a process: other tests would get this one's."""
    urllib.request.install_opener(None)
    yield
    urllib.request.install_opener(None)


@pytest.mark.parametrize("proxy", ["http_proxy", "HTTP_PROXY", "all_proxy"])
@pytest.mark.parametrize("without", ["", "example.com", "*"])
def test_this_machine_is_not_asked_for_through_a_proxy(
    url: str, proxy: str, without: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The proxy has another loopback interface: the demo waited there for its engines until it gave up. What a command
    starts, and the clients with which it plays, are told, too.
    """
    monkeypatch.setenv(proxy, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", without)
    monkeypatch.setenv("NO_PROXY", without)
    assert main(["fleet", "show", "--controller", url]) == 1
    assert f"what answers at {url} is not a controller" in capsys.readouterr().err
    assert httpx.get(url).json() == {}
    assert os.environ["no_proxy"].startswith(without)
