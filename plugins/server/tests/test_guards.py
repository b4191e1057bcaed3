"""Keys, origins, TLS, back-pressure, logs: who gets in, how many at once, and what is written down."""

from __future__ import annotations

import asyncio
import logging
import ssl
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from modelbay.errors import UsageError
from modelbay_server.settings import ServerSettings, model_sources, parse_bytes

KEY = "sk-secret-4711"
BODY = {"prompt": "The quick", "max_tokens": 2}


def test_with_a_key_nothing_is_open_but_health_and_the_page(
    serve: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    (tmp_path / "index.html").write_text("<h1>page</h1>")
    (tmp_path / "app.js").write_text("1")
    server = serve((tiny, "tiny"), api_key=KEY, page=tmp_path)
    for path in ("/health", "/ready", "/", "/index.html", "/app.js"):
        assert server.get(path).status_code == 200, path
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/v1/modelbay/explain", "/no/such"):
        assert server.get(path).status_code == 401, path
    for given in ("", KEY, "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}", "Bearer ü"):
        response = server.post("/v1/completions", BODY, headers={"Authorization": given.encode("latin-1")})
        assert response.status_code == 401, given
        assert response.json()["error"]["code"] == "invalid_api_key"
    assert server.post("/v1/completions", BODY, headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    assert server.get("/v1/models", headers={"Authorization": f"bearer {KEY}"}).status_code == 200


def test_settings_do_not_show_the_key() -> None:
    assert KEY not in repr(ServerSettings(api_key=KEY))


@pytest.mark.parametrize("key", ["", "a b", "ü", "a\nb"])
def test_a_key_that_no_header_could_carry_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match="API key"):
        ServerSettings(api_key=key)


def test_other_origins_may_not_call_unless_they_were_allowed(serve: Callable[..., Any], tiny: Path) -> None:
    origin, asked = "https://app.example", {"Access-Control-Request-Method": "POST"}
    closed = serve((tiny, "tiny"))
    assert "access-control-allow-origin" not in closed.get("/v1/models", headers={"Origin": origin}).headers
    opened = serve((tiny, "tiny"), allowed_origins=(origin,), api_key=KEY)
    preflight = httpx.options(opened.url + "/v1/completions", headers={"Origin": origin, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == origin
    refused = opened.post("/v1/completions", BODY, headers={"Origin": origin})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, origin)
    # What openai's client for JavaScript sends, and reads: browsers ask for each header beforehand.
    named = "authorization,content-type,x-stainless-lang,x-stainless-retry-count,openai-organization,user-agent"
    asks = {"Origin": origin, **asked, "Access-Control-Request-Headers": named}
    preflight = httpx.options(opened.url + "/v1/chat/completions", headers=asks)
    assert preflight.status_code == 200, preflight.text
    assert set(named.split(",")) <= set(preflight.headers["access-control-allow-headers"].lower().split(","))
    assert "retry-after" in refused.headers["access-control-expose-headers"].lower()
    assert "access-control-allow-credentials" not in preflight.headers
    other = httpx.options(opened.url + "/v1/completions", headers={"Origin": "https://evil.example", **asked})
    assert "access-control-allow-origin" not in other.headers


def test_more_requests_than_it_takes_get_429_and_are_told_when_to_come_back(
    serve: Callable[..., Any], tiny: Path
) -> None:
    server = serve((tiny, "tiny"), max_concurrent_requests=1)
    with server.paused(), ThreadPoolExecutor() as clients:
        first = clients.submit(server.post, "/v1/completions", BODY)
        server.wait_for(lambda: server.state.limiter.in_flight == 1)
        response = server.post("/v1/completions", BODY)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert server.get("/health").status_code == 200
        server.resume()
        assert first.result().status_code == 200
    server.wait_until_idle()
    assert server.post("/v1/completions", BODY).status_code == 200


def test_no_text_and_no_key_is_logged(serve: Callable[..., Any], tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = "Hoppelhase"
    with caplog.at_level(logging.DEBUG):
        server = serve((tiny, "tiny"), log_requests=True, api_key=KEY)
        sent = {"Authorization": f"Bearer {KEY}"}
        server.post("/v1/completions", {"prompt": secret, "max_tokens": 2}, headers=sent)
        server.post("/v1/completions", {"prompt": [secret, 5]}, headers=sent)
        server.post("/v1/chat/completions", {"messages": [{"role": secret, "content": 5}]}, headers=sent)
        server.get("/v1/models", params={"q": secret}, headers={"Authorization": "Bearer wrong-" + secret})
    ours = [record for record in caplog.records if not record.name.startswith(("httpx", "httpcore"))]
    lines = [record.getMessage() for record in ours if record.name == "modelbay_server"]
    assert any("POST /v1/completions 200" in line for line in lines)
    assert any("401" in line for line in lines)
    assert not [record for record in ours if secret in record.getMessage() or KEY in record.getMessage()]


def test_requests_are_not_logged_unless_asked_for(
    serve: Callable[..., Any], tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="modelbay_server"):
        serve((tiny, "tiny")).post("/v1/completions", BODY)
    assert not [record for record in caplog.records if "/v1/completions" in record.getMessage()]


def test_a_fault_of_ours_is_a_500_that_tells_nothing_and_the_server_goes_on(
    serve: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = serve((tiny, "tiny"))

    def broken(*args: Any, **kwargs: Any) -> None:
        raise KeyError(args[1])  # what a client sent

    monkeypatch.setattr("modelbay_server.routes.completions.read_prompts", broken)
    response = server.post("/v1/completions", {"prompt": "Hoppelhase"})
    assert response.status_code == 500
    assert response.json()["error"]["code"] == "internal_error"
    assert "Hoppelhase" not in response.text + caplog.text
    assert "KeyError" in caplog.text
    monkeypatch.undo()
    assert server.post("/v1/completions", BODY).status_code == 200


def test_tls(serve: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost", "-days", "2",
               "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is not installed, and makes the certificate")
    server = serve((tiny, "tiny"), ssl_certfile=str(certificate), ssl_keyfile=str(key))
    context = ssl.create_default_context(cafile=str(certificate))
    assert httpx.get(server.url + "/health", verify=context).json() == {"status": "ok"}
    with pytest.raises(UsageError, match="both"):
        ServerSettings(ssl_certfile=str(certificate))


def test_the_page_and_the_routes_do_not_hide_each_other(serve: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>page</h1>")
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "models").write_text("not this one")
    server = serve((tiny, "tiny"), page=tmp_path)
    assert "<h1>" in server.get("/").text
    assert server.get("/v1/models").json()["object"] == "list"
    assert server.get("/../settings.py").status_code == 404
    assert server.get("/nothing.js").status_code == 404
    assert serve((tiny, "tiny"), page=tmp_path / "absent").get("/").status_code == 404


def test_a_body_that_never_arrives_is_given_up(serve: Callable[..., Any], tiny: Path) -> None:
    server = serve((tiny, "tiny"), body_timeout=0.3)

    async def half() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        writer.write(b"Content-Length: 100\r\n\r\n{")
        await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return answer

    assert b"408" in asyncio.run(half()).partition(b"\r\n")[0]


def test_names_of_models() -> None:
    [one] = model_sources(["org/model"], [], {})
    assert (one.reference, one.names) == ("org/model", ("org/model",))
    [aliased] = model_sources(["org/model"], ["a", "b"], {})
    assert aliased.names == ("a", "b")
    first, second = model_sources(["x", "y"], ["a", "b"], {"dtype": "float32"})
    assert (first.names, second.names, second.kwargs) == (("a",), ("b",), {"dtype": "float32"})
    for models, names in (([], []), (["x", "y"], ["a"]), (["x", "x"], []), (["x"], ["a", "a"]), (["x"], [""])):
        with pytest.raises(UsageError):
            model_sources(models, names, {})


def test_sizes() -> None:
    assert [parse_bytes(text) for text in ("8GiB", "1.5 kb", "100", "2M")] == [8 * 2**30, 1500, 100, 2_000_000]
    for text in ("", "x", "-1", "0", "8 apples", "1e9", "9" * 400, "9" * 30 + "GiB"):
        with pytest.raises(UsageError):
            parse_bytes(text)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"host": ""}, "--host must not be empty"),
        ({"host": " "}, "--host must not be empty"),
        ({"shutdown_timeout": float("nan")}, "--shutdown-timeout must be at most 1,000,000 seconds, got nan"),
        ({"shutdown_timeout": float("inf")}, "--shutdown-timeout must be at most 1,000,000 seconds, got inf"),
    ],
)
def test_settings_that_make_no_sense(setting: dict[str, Any], message: str) -> None:
    """An empty host, as of a variable that is not set, would listen on every address."""
    with pytest.raises(UsageError, match=message):
        ServerSettings(**setting)


def test_the_command_line_is_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    from modelbay.cli.main import run

    for argv in ([], ["x", "--model", "x"], [str(tmp_path / "absent")], ["x", "--ssl-certfile", __file__],
                 ["x", "--model-memory", "much"], ["x", "--api-key", "a b"], ["x", "--port", "99999"]):  # fmt: skip
        assert run(["serve", *argv]) in (1, 2), argv
    assert threading.active_count() < 50
