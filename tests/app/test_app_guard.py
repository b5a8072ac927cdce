"""Who may ask, and with what: names of the page, pages of other sites, and bodies made to hurt."""

import json

import pytest
from app_client import client, told
from fastapi.testclient import TestClient

from zeropipe.app import guard
from zeropipe.app.server import create_app

ONE = {"schedules": [{"name": "1f1b"}]}


def asked(host, origin=None, app=client):
    headers = {"Host": host} if origin is None else {"Host": host, "Origin": origin}
    return app.post("/api/simulate", json=ONE, headers=headers)


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:8420", "page.localhost", "127.0.0.1:8420", "192.168.1.7", "[::1]:8420", "[fe80::1]"],
)
def test_the_page_answers_under_addresses_and_localhost(host):
    assert asked(host).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8420", "localhost.evil.example", "127.0.0.1.evil.example", "", "[::1", "a b"]
)
def test_a_name_that_may_point_anywhere_is_refused(host):
    """DNS rebinding: a page of evil.example reads from this machine once its name points here."""
    for path in ("/", "/static/main.js", "/api/schedules"):
        assert client.get(path, headers={"Host": host}).status_code == 403
    [message] = told(asked(host).json(), "")
    assert message.startswith(f"Host {host!r} is not a name of this page: start it with --allow-host")
    assert "\n" not in message


def test_names_are_allowed_by_hand():
    app = TestClient(create_app(hosts=["gpu7.lab.example", "Box"]))
    assert [asked(host, app=app).status_code for host in ("gpu7.lab.example:80", "box", "BOX.")] == [200, 200, 200]
    assert asked("other.example", app=app).status_code == 403
    assert asked("localhost", app=app).status_code == 200


def test_a_page_of_another_site_is_refused():
    assert asked("localhost:8420", "http://localhost:8420").status_code == 200
    for origin in ("https://evil.example", "http://localhost:3000", "null", ""):
        response = asked("localhost:8420", origin)
        assert (response.status_code, "not allowed" in response.text) == (403, True), origin
    behind = TestClient(create_app(hosts=["page.example"]))  # a proxy that names its own backend
    assert asked("127.0.0.1:8420", "https://page.example", behind).status_code == 200


DEEP = 100_000
BODIES = {
    "deep lists": b'{"schedules": ' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep tables": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep, inside its limits": b'{"ranks": ' + b"[" * 400 + b"]" * 400 + b"}",
    "a long number": b'{"schedules": [{"name": "1f1b"}], "ranks": ' + b"9" * 5000 + b"}",
    "a long fraction": b'{"schedules": [{"name": "1f1b"}], "costs": {"f": 1.' + b"0" * 9000 + b"}}",
    "a large number": b'{"schedules": [{"name": "1f1b"}], "costs": {"f": 1' + b"0" * 390 + b"}}",
    "not a number": b'{"schedules": [{"name": "1f1b"}], "costs": {"f": NaN}}',
    "many unknown fields": json.dumps({f"field {n}": n for n in range(20_000)}).encode(),
    "many choices": json.dumps({"schedules": [{"name": "x" * 100}] * 5000}).encode(),
    "many wrong links": json.dumps({**ONE, "costs": {"edges": {str(n): {"p2p": "x"} for n in range(20_000)}}}).encode(),
    "many wrong costs": json.dumps({**ONE, "costs": {"f": ["x"] * 60_000}}).encode(),
    "too long a name": json.dumps({"schedules": [{"name": "z" * 100_000}]}).encode(),
    "not text": b'{"schedules": "\xff"}',
    "half a letter": b'{"schedules": [{"name": "\\ud800"}]}',
    "nothing": b"",
}


@pytest.mark.parametrize("path", ["simulate", "chart", "files/svg"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_hostile_body_is_refused_in_short_lines(path, body):
    response = client.post(f"/api/{path}", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 413, 422), response.text[:300]
    errors = response.json()["errors"]
    assert 1 <= len(errors) <= 64
    for error in errors:
        assert error["message"]
        assert len(error["message"]) < 400
        assert "\n" not in error["message"]
        assert "Traceback" not in error["message"]


FILES = {
    "dotted keys": ("a.toml", ".".join(["a"] * 20_000) + " = 1", "a key has more than"),
    "quoted dotted keys": ("a.toml", '."".'.join(["a"] * 10_000) + " = 1", "a key has more than"),
    "deep tables": ("a.toml", "f = " + "[" * 30_000 + "]" * 30_000, "nested too deeply"),
    "deep lists": ("a.json", "[" * 300_000 + "]" * 300_000, "nested too deeply"),
    "a long number": ("a.toml", "f = " + "9" * 6000, "too long"),
    "a long number in JSON": ("a.json", '{"f": ' + "9" * 6000 + "}", "too long"),
    "a large TOML": ("a.toml", "# " + "x" * 2**21, "write it as JSON"),
    "a number beyond a float": ("a.toml", "f = 1e400", "f=inf"),
    "a large stage": ("a.csv", "99999999999F0,0B0\n", "too large"),
    "many commas": ("a.csv", "," * 3_000_000, "up to 2,000,000"),
}


@pytest.mark.parametrize(("name", "text", "word"), FILES.values(), ids=FILES)
def test_a_hostile_file_is_refused_in_one_short_line(name, text, word):
    response = client.post("/api/uploads", params={"name": name}, content=text)
    assert response.status_code == 422, response.text[:300]
    [message] = told(response.json(), "file")
    assert word in message
    assert len(message) < 300


def test_files_that_come_at_the_same_time_have_a_bound(monkeypatch):
    monkeypatch.setattr(guard, "MAX_HELD_BYTES", 10)
    response = client.post("/api/uploads", params={"name": "a.csv"}, content="0F0,0B0\n0F1")
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")
    assert client.post("/api/uploads", params={"name": "a.csv"}, content="0F0,0B0").status_code == 200
