import http.client
import json
import socket
import threading

import pytest

from mizzen.watch.server import Server

pytest.importorskip("plotly")


@pytest.fixture
def server(written):
    written.step(1)
    written.watcher.read_all()
    with Server(written.watcher) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def test_the_page_has_a_strict_policy_and_a_new_nonce_each_time(server):
    answer, page = ask(server, f"/{server.token}/")
    policy = dict(each.strip().split(" ", 1) for each in answer.headers["Content-Security-Policy"].split(";"))
    assert answer.status == 200
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert policy["script-src"] == policy["style-src-elem"] and policy["script-src"].startswith("'nonce-")
    assert policy["connect-src"] == "'self'" and "unsafe-inline" not in policy["script-src"]
    nonce = policy["script-src"].removeprefix("'nonce-").removesuffix("'")
    assert page.count(f'nonce="{nonce}"') == page.count("<script nonce") + page.count("<style nonce")
    again, _ = ask(server, f"/{server.token}/")
    assert again.headers["Content-Security-Policy"] != answer.headers["Content-Security-Policy"]
    assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-store"


def test_the_data_since_a_revision(server):
    _, body = ask(server, f"/{server.token}/data?since=0")
    told = json.loads(body)
    assert told["runs"][0]["latest"]["loss"] == 1.0
    _, body = ask(server, f"/{server.token}/data?since={told['revision']}")
    assert json.loads(body)["runs"][0]["series"] == {}
    for wrong in ("", "since=", "since=x", "since=-1", "since=1e9", "since=%00", "since=" + "9" * 5000):
        assert ask(server, f"/{server.token}/data?{wrong}")[0].status == 400


@pytest.mark.parametrize(
    "path", ["/", "/data", "/wrong/", "/plotly.js", "/../", "//", "/%2e%2e/etc/passwd", "//[::", "/%"]
)
def test_without_the_token_nothing_is_there(server, path):
    assert ask(server, path)[0].status == 404


def test_with_the_token_nothing_else_is_there(server):
    for path in ("x", "../", "page.js", "data/", "..%2f..%2fetc%2fpasswd", "/etc/passwd"):
        assert ask(server, f"/{server.token}/{path}")[0].status == 404


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::", "a:b:c", "localhost:x"]
)
def test_another_name_is_refused(server, host):
    assert ask(server, f"/{server.token}/", Host=host)[0].status == 404


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1234", "LOCALHOST:1"])
def test_our_own_names_are_taken_from_any_port(server, host):
    assert ask(server, f"/{server.token}/", Host=host)[0].status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_can_be_written(server, method):
    assert ask(server, f"/{server.token}/data", method)[0].status == 501


def test_it_listens_on_loopback_alone_and_tokens_differ(server, written):
    assert server.server_address[0] == "127.0.0.1"
    assert server.socket.family == socket.AF_INET
    with Server(written.watcher) as other:
        assert other.token != server.token and len(other.token) >= 32
