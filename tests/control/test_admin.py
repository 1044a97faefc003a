"""The admin server: a real client on a real socket."""

import json
import os
import stat
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from controlled import AB, ABC, D, plain_cache, ticking

from purecache.admin.bodies import BodyError, namespace
from purecache.admin.client import AdminClient, AdminError
from purecache.admin.server import AdminServer
from purecache.admin.tokens import VARIABLE, TokenError, is_right, read_token, token_of
from purecache.cli import main
from purecache.control import Operator, Pins

TOKEN = "a-token-of-the-tests"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """A ticking cache, and the server of its operator."""
    cache = plain_cache(ABC, D)
    operator = Operator(cache, pins=Pins(cache, share=1), timeout=120)
    file = tmp_path_factory.mktemp("admin") / "token"
    os.environ.pop(VARIABLE, None)
    server = AdminServer(operator, token_file=file)
    with ticking(cache):
        yield cache, server, file
    server.close()
    server.close()
    operator.close()


def client_of(server):
    return AdminClient(server.url, server.token, timeout=120)


def answer_of(url, body=None, **headers):
    """Status and JSON of a request, whatever the status."""
    request = Request(url, body, headers)
    try:
        with urlopen(request, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def test_looking_over_http(served):
    _, server, _ = served
    client = client_of(server)
    assert client.get("/v1/stats")["config"]["policy"] == "lru"
    assert "tokens 4 4" in client.get("/v1/tree?lines=50")
    assert len(client.get("/v1/hot?number=1")) == 1
    assert client.get("/v1/locks") == []


def test_asking_over_http(served):
    cache, server, _ = served
    client = client_of(server)
    pin = client.post("/v1/pin", tokens=AB, seconds=60)
    assert pin["pages"] == 2
    assert client.post("/v1/renew", name=pin["name"], seconds=90)["seconds_left"] > 60
    assert client.post("/v1/release", name=pin["name"]) is None
    assert client.post("/v1/open-session", session="s", tokens=AB, seconds=60, rank=0)["name"] == "session:s"
    assert client.post("/v1/close-session", session="s") == {"pin": True, "scheduler": False}
    assert client.post("/v1/resize", host_pages=5)["host_pages"] == 5
    assert client.post("/v1/offload", tokens=AB)["tokens_on_device"] == 4
    assert client.post("/v1/forget", tokens=D)["device_pages"] == 1
    assert client.post("/v1/forget-namespace", namespace=[["adapter", "x"], "y"])["device_pages"] == 0
    assert client.post("/v1/flush", tier="device")["freed"] == 3
    assert client.post("/v1/reset") is None
    assert cache.free_pages() == 8


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer wrong", "Basic {}", "Bearer {} {}", "Bearer ä"])
def test_without_the_token_nothing_is_told(served, header):
    _, server, _ = served
    headers = {} if header is None else {"Authorization": header.format(server.token, "x").encode().decode("latin-1")}
    for path, body in (("/v1/stats", None), ("/v1/reset", b"{}")):
        status, answer = answer_of(server.url + path, body, **headers)
        assert (status, set(answer)) == (401, {"error", "kind"})


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/v1/forget", b"{", 400, "no JSON"),
        ("/v1/forget", b"[" * 100_000, 400, "no JSON"),
        ("/v1/forget", b"[]", 400, "JSON object"),
        ("/v1/forget", b"{}", 400, "tokens is missing"),
        ("/v1/forget", b'{"tokens": [1.5]}', 400, "tokens: a list of token ids"),
        ("/v1/forget", b'{"tokens": [1], "all": true}', 400, "unknown fields"),
        ("/v1/forget", b'{"tokens": [1], "rank": -1}', 400, "rank: a whole number"),
        ("/v1/forget", b'{"tokens": [1], "rank": 7}', 409, "rank"),
        ("/v1/pin", b'{"tokens": [9, 9], "seconds": 5}', 409, "nothing of this prompt"),
        ("/v1/pin", b'{"tokens": [9, 9], "seconds": true}', 400, "seconds: a number"),
        ("/v1/release", b'{"name": ""}', 400, "name: a string"),
        ("/v1/flush", b'{"tier": "disk"}', 409, "a tier is one of"),
        ("/v1/resize", b'{"pool": "x", "host_pages": 1}', 400, "no pool named"),
        ("/v1/storage/clear", b"", 409, "no storage is attached"),
        ("/v1/nothing", b"", 404, "Not Found"),
        ("/v1/stats", b"", 405, "Method Not Allowed"),
    ],
)
def test_mistakes_are_told(served, path, body, status, text):
    _, server, _ = served
    got, answer = answer_of(server.url + path, body, Authorization=f"Bearer {server.token}")
    assert (got, text in answer["error"]) == (status, True), answer


def test_parameters_of_a_query_are_checked(served):
    _, server, _ = served
    headers = {"Authorization": f"Bearer {server.token}"}
    assert answer_of(server.url + "/v1/tree?lines=x", **headers)[0] == 400
    assert answer_of(server.url + "/v1/tree?rows=1", **headers)[0] == 400


def test_a_cache_that_does_not_tick_is_told_in_time(tmp_path):
    operator = Operator(plain_cache(), timeout=0.05)
    server = AdminServer(operator, token_file=tmp_path / "token")
    status, answer = answer_of(server.url + "/v1/stats", Authorization=f"Bearer {server.token}")
    assert (status, answer["kind"]) == (503, "TooLateError")
    server.close()
    operator.close()


def test_the_token_is_in_a_file_for_its_owner_and_in_no_log(served, caplog):
    _, server, file = served
    assert file.read_text().strip() == server.token
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_token(file) == server.token
    assert server.token not in caplog.text


def test_a_token_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, TOKEN)
    assert token_of(tmp_path / "token") == read_token() == TOKEN
    assert not (tmp_path / "token").exists()
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(TokenError, match="16 or more") as raised:
        token_of()
    assert "short" not in str(raised.value)
    monkeypatch.delenv(VARIABLE)
    (tmp_path / "token").write_text("")
    with pytest.raises(TokenError, match="can't be written"):
        token_of(tmp_path / "token" / "below-a-file")
    with pytest.raises(TokenError, match="no token"):
        read_token(tmp_path / "none")


def test_a_file_that_is_there_already_is_replaced_not_written_to(monkeypatch, tmp_path):
    monkeypatch.delenv(VARIABLE, raising=False)
    (tmp_path / "other").write_text("mine")
    (tmp_path / "token").symlink_to(tmp_path / "other")
    token = token_of(tmp_path / "token")
    assert (tmp_path / "other").read_text() == "mine"
    assert (tmp_path / "token").read_text().strip() == token


@pytest.mark.parametrize("shown", [None, "", "Bearer", f"Bearer {TOKEN}x", TOKEN, f"Basic {TOKEN}"])
def test_only_the_token_is_right(shown):
    assert not is_right(shown, TOKEN)
    assert is_right(f"bearer {TOKEN}", TOKEN)


def test_other_machines_are_not_served_by_mistake():
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.org"):
        with pytest.raises(ValueError, match="other machines"):
            AdminServer(None, host=host)


def test_a_port_in_use_is_an_error(served, tmp_path):
    _, server, _ = served
    with pytest.raises(OSError, match="in use"):
        AdminServer(Operator.__new__(Operator), port=int(server.url.rpartition(":")[2]), token_file=tmp_path / "token")


def test_namespaces_in_json():
    assert namespace([["adapter", "x"], 3, None]) == (("adapter", "x"), 3, None)
    assert namespace("tenant") == "tenant"
    for wrong in (1.5, {}, [["a"]], [[1, 2]], [["a", [1]]]):
        with pytest.raises(BodyError):
            namespace(wrong)


def test_a_client_says_what_is_wrong(served):
    _, server, _ = served
    with pytest.raises(AdminError, match="401: show the token"):
        AdminClient(server.url, "wrong").get("/v1/stats")
    with pytest.raises(AdminError, match="can't be reached"):
        AdminClient("http://127.0.0.1:9", "x").get("/v1/stats")
    with pytest.raises(AdminError, match="begins with http"):
        AdminClient("file:///etc/passwd", "x")


def test_inspecting_a_running_process(served, capsys):
    _, server, file = served
    assert main(["inspect", server.url, "--token-file", str(file), "--lines", "5"]) == 0
    shown = capsys.readouterr().out
    for part in ("device_pages: 8", "rank 0, kv", "no locks, no transfers", "no storage attached"):
        assert part in shown
    assert main(["inspect", server.url, "--token-file", str(file), "--json", "--show", "locks", "hot"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"locks", "hot"}
    assert main(["inspect", server.url, "--token-file", str(file.with_name("none"))]) == 2
    assert "no token" in capsys.readouterr().err
