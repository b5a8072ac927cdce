"""The page without a browser: its HTTP interface, called in this process."""

import pytest
from fastapi.testclient import TestClient

from zeropipe.app.server import create_app
from zeropipe.cli import main

client = TestClient(create_app(), base_url="http://localhost")


def ask(path, body):
    """ask("simulate", {...}) -> (status, answer)"""
    response = client.post(f"/api/{path}", json=body)
    return response.status_code, response.json()


def told(errors, field):
    return [error["message"] for error in errors["errors"] if error["field"] == field]


def upload(name, text):
    response = client.post("/api/uploads", params={"name": name}, content=text)
    return response.status_code, response.json()


def command_line(capsys, *args):
    """What `zeropipe compare` says about a mistake."""
    with pytest.raises(SystemExit):
        main(["compare", "1f1b", "--ranks", "4", "--microbatches", "8", *args])
    return capsys.readouterr().err.removeprefix("zeropipe: ").strip()
