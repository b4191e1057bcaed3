"""Images and audio from whatever a caller or client gives: what is read is what Transformers would read, and hostile
input is refused by name."""

from __future__ import annotations

import base64
import http.server
import io
import struct
import threading
import wave
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from modelbay.errors import UsageError
from modelbay_runtime.multimodal import audio as audio_module
from modelbay_runtime.multimodal import download as download_module
from modelbay_runtime.multimodal import images as images_module
from modelbay_runtime.multimodal.audio import read_audio, resample
from modelbay_runtime.multimodal.images import read_image
from modelbay_runtime.multimodal.sources import MediaPolicy, read_bytes

OPEN = MediaPolicy()
CLOSED = MediaPolicy(local=None)


def picture(width: int = 8, height: int = 5, mode: str = "RGB") -> Image.Image:
    draw = np.random.default_rng(3)
    return Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8)).convert(mode)


def encoded(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def header_of_a_png(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, in 70 bytes."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


# ---- images ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF"])
def test_an_image_is_what_transformers_loads(form: str, tmp_path: Path) -> None:
    """From a path, bytes, a data URL, a file URL and a PIL image alike."""
    from transformers.image_utils import load_image

    data = encoded(picture(), form)
    path = tmp_path / "an image.bin"
    path.write_bytes(data)
    wanted = load_image(str(path))
    url = f"data:image/{form.lower()};base64,{base64.b64encode(data).decode()}"
    sources = (path, str(path), data, url, path.as_uri(), Image.open(io.BytesIO(data)))
    for found in [read_image(source, OPEN) for source in sources]:
        assert found.mode == "RGB"
        assert np.array_equal(np.array(found), np.array(wanted))


def test_exif_orientation_is_followed_as_in_transformers(tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    (tmp_path / "turned.png").write_bytes(encoded(picture(8, 5), exif=exif))
    found = read_image(tmp_path / "turned.png", OPEN)
    assert found.size == (5, 8)
    assert np.array_equal(np.array(found), np.array(load_image(str(tmp_path / "turned.png"))))


def test_of_an_animation_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "blue")]
    found = read_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), OPEN)
    assert found.getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1", "CMYK", "I;16"])
def test_other_modes_become_rgb(mode: str) -> None:
    image = picture().convert("L").convert("I;16") if mode == "I;16" else picture(mode=mode)
    assert read_image(image, OPEN).mode == "RGB"


def test_arrays_are_rows_of_pixels() -> None:
    pixels = np.array(picture())
    assert np.array_equal(np.array(read_image(pixels, OPEN)), pixels)
    with pytest.raises(UsageError, match=r"uint8 \[height, width, 3\], got float64 \(5, 8, 3\)"):
        read_image(pixels / 255, OPEN)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "empty"),
        (b"GIF89a", "image"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image"),
        (encoded(picture(64, 64))[:200], "cannot be decoded"),
        (encoded(picture(64, 64), "JPEG")[:900], "cannot be decoded: image file is truncated"),
        (header_of_a_png(8, 5), "cannot be decoded"),
        (header_of_a_png(8193, 8192), "at most 67,108,864"),
        (header_of_a_png(12_000, 12_000), "at most 67,108,864|more than 67,108,864 pixels"),
        (header_of_a_png(2**31 - 1, 2**31 - 1), "67,108,864 pixels"),
        (header_of_a_png(0, 5), "image"),
        (np.zeros((3, 3), np.uint8), "array must be"),
        (3, "got int"),
        (None, "got NoneType"),
        ("no/such/file.png", "is not a file"),
        (".", "is not a file"),
        ("/dev/zero", "is not a file"),
        ("a\0b", "cannot be read|is not a file"),
        ("ftp://host/a.png", "no http, https, data or file URL"),
        ("data:image/png;base64,???", "not base64"),
        ("data:image/png;base64", "no comma"),
        ("file://elsewhere/a.png", "names a host"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_image_is_refused(data: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        read_image(data, OPEN)
    assert "\n" not in str(caught.value)


def test_a_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images_module, "MAX_PIXELS", 99)
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("it was decoded"))
    with pytest.raises(UsageError, match="10 × 10 pixels; at most 99"):
        read_image(Image.new("RGB", (10, 10)), OPEN)


@pytest.mark.parametrize("seed", range(60))
def test_broken_bytes_raise_usage_errors_only(seed: int) -> None:
    draw = np.random.default_rng(seed)
    form = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")[seed % 6]
    data = bytearray(encoded(picture(40, 30), form))
    for place in draw.integers(0, len(data), 1 + seed % 7):
        data[place] = draw.integers(256)
    try:
        assert read_image(bytes(data[: draw.integers(1, len(data) + 1)]), OPEN).mode == "RGB"
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017


# ---- files of a server ----------------------------------------------------------------------------------------------


def test_a_client_names_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(picture()))
    for source in (str(tmp_path / "a.png"), (tmp_path / "a.png").as_uri(), tmp_path / "a.png", "~/a.png"):
        with pytest.raises(UsageError, match="files of the server are not read for requests"):
            read_image(source, CLOSED)


def test_a_client_names_files_below_the_allowed_directory_alone(tmp_path: Path) -> None:
    allowed, secret = tmp_path / "media", tmp_path / "secret.png"
    allowed.mkdir()
    secret.write_bytes(encoded(picture()))
    (allowed / "a.png").write_bytes(encoded(picture()))
    (allowed / "link.png").symlink_to(secret)
    policy = MediaPolicy.of((), str(allowed), untrusted=True)
    assert read_image((allowed / "a.png").as_uri(), policy).mode == "RGB"
    names = ("link.png", "../secret.png", "../absent.png", "%2e%2e/secret.png")
    for url in [f"file://{allowed}/{name}" for name in names] + [str(secret)]:
        with pytest.raises(UsageError, match="only files below allowed_local_media_path"):
            read_image(url, policy)
    assert MediaPolicy.of((), str(allowed), untrusted=False).local == "all"


def test_large_files_are_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    path.write_bytes(b"0" * 100)
    small = MediaPolicy(max_bytes=50)
    for source in (path, b"0" * 100, "data:;base64," + "A" * 100, "data:," + "A" * 200):
        with pytest.raises(UsageError, match="larger than"):
            read_bytes(source, "image", small)


# ---- hosts ----------------------------------------------------------------------------------------------------------


class Handler(http.server.BaseHTTPRequestHandler):
    answers: dict[str, tuple[int, dict[str, str], bytes]] = {}

    def do_GET(self) -> None:
        status, headers, body = self.answers.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def host() -> Iterator[Callable[..., str]]:
    """``host({path: (status, headers, body)})`` -> "http://127.0.0.1:port"."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()

    def serve(answers: dict[str, tuple[int, dict[str, str], bytes]]) -> str:
        Handler.answers = answers
        return f"http://127.0.0.1:{server.server_port}"

    try:
        yield serve
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


LOCAL = MediaPolicy(frozenset({"127.0.0.1"}), None, 10_000)


def test_an_allowed_host_is_asked(host: Callable[..., str]) -> None:
    data = encoded(picture())
    base = host({
        "/a.png": (200, {"Content-Length": str(len(data))}, data),
        "/moved": (302, {"Location": "/a.png"}, b""),
    })  # fmt: skip
    assert read_bytes(f"{base}/a.png", "image", LOCAL) == data
    assert read_bytes(f"{base}/moved", "image", LOCAL) == data
    assert np.array_equal(np.array(read_image(f"{base}/a.png", LOCAL)), np.array(picture()))


@pytest.mark.parametrize(
    ("path", "match"),
    [
        ("/absent", "answers 404"),
        ("/elsewhere", "media of localhost are not fetched"),
        ("/file", "must be http"),
        ("/circle", "more than 3 redirects"),
        ("/large", "larger than"),
        ("/larger", "larger than"),
        ("/short", "sent 3 of 9 bytes"),
    ],
)
def test_what_a_host_answers_is_bounded(path: str, match: str, host: Callable[..., str]) -> None:
    base = host({
        "/elsewhere": (302, {"Location": "http://localhost/a.png"}, b""),
        "/file": (302, {"Location": "file:///etc/passwd"}, b""),
        "/circle": (302, {"Location": "/circle"}, b""),
        "/large": (200, {"Content-Length": "20000"}, b"0" * 20_000),
        "/larger": (200, {}, b"0" * 20_000),
        "/short": (200, {"Content-Length": "9"}, b"012"),
    })  # fmt: skip
    with pytest.raises(UsageError, match=match):
        read_bytes(f"{base}{path}", "image", LOCAL)


def test_a_slow_host_is_left(host: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module, "TOTAL_TIMEOUT", -1.0)
    with pytest.raises(UsageError, match="took more than"):
        read_bytes(host({"/a": (200, {}, b"a")}) + "/a", "image", LOCAL)


@pytest.mark.parametrize(
    ("url", "match"),
    [
        ("http://example.com/a.png", "media of example.com are not fetched"),
        ("https://allowed.org.evil.net/a.png", "evil.net are not fetched"),
        ("http://allowed.org@evil.net/a.png", "without user"),
        ("http://evil.net\\@allowed.org/a.png", "without user, spaces or backslashes"),
        ("http://allowed.org /a.png", "spaces"),
        ("http://allowed.org\t/a.png", "spaces"),
        ("http:///a.png", "must be http"),
        ("http://[::1/a.png", "cannot be read"),
        ("http://allowed.org:99999/a.png", "cannot be read"),
    ],
)
def test_no_other_host_is_asked(url: str, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download_module.urllib.request, "build_opener", lambda *_: pytest.fail("it was asked"))
    with pytest.raises(UsageError, match=match):
        read_bytes(url, "image", MediaPolicy.of(["Allowed.org"], None, untrusted=True))
    with pytest.raises(UsageError):
        read_bytes(url, "image", OPEN)


# ---- audio ----------------------------------------------------------------------------------------------------------


def wav(samples: np.ndarray, rate: int = 16_000, width: int = 2) -> bytes:
    """samples: [n] or [n, channels] in -1 to 1."""
    full = 2 ** (8 * width - 1)
    whole = np.clip(np.round(samples * full), -full, full - 1).astype(np.int64)
    if width == 1:
        content = (whole + 128).astype(np.uint8).tobytes()
    else:
        content = b"".join(int(value).to_bytes(width, "little", signed=True) for value in whole.reshape(-1))
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(samples.shape[1] if samples.ndim == 2 else 1)
        out.setsampwidth(width)
        out.setframerate(rate)
        out.writeframes(content)
    return file.getvalue()


def tone(count: int = 400, channels: int = 1) -> np.ndarray:
    found = np.random.default_rng(1).uniform(-1, 1, (count, channels)).astype(np.float32)
    return found if channels > 1 else found[:, 0]


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_wav_is_what_soundfile_reads_and_transformers_makes_of_it(width: int, channels: int, tmp_path: Path) -> None:
    import soundfile

    data = wav(tone(channels=channels), 22_050, width)
    wanted, rate = soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)
    found, found_rate = read_audio(data, OPEN)
    assert (found_rate, found.dtype, found.shape) == (rate, np.float32, (400,))
    assert np.array_equal(found, wanted.T.mean(axis=0) if channels > 1 else wanted[:, 0])


@pytest.mark.parametrize("form", ["FLAC", "OGG", "WAV"])
def test_other_formats_are_read_with_soundfile(form: str, tmp_path: Path) -> None:
    import soundfile

    file = io.BytesIO()
    soundfile.write(file, tone(), 16_000, format=form, subtype="FLOAT" if form == "WAV" else None)
    wanted, _ = soundfile.read(io.BytesIO(file.getvalue()), dtype="float32")
    (tmp_path / "a.audio").write_bytes(file.getvalue())
    assert np.array_equal(read_audio(tmp_path / "a.audio", OPEN)[0], wanted)


def test_samples_with_their_rate_are_taken_as_they_are() -> None:
    samples, rate = read_audio((tone().astype(np.float64), 8_000), OPEN)
    assert (samples.dtype, rate) == (np.float32, 8_000)
    assert np.array_equal(samples, tone())


@pytest.mark.parametrize(
    ("source", "match"),
    [
        (b"", "0 bytes that cannot be read as audio"),
        (b"RIFF", "cannot be read as audio: Format not recognised.$"),
        (encoded(picture()), "cannot be read as audio"),
        (wav(tone())[:300], "cut off: 256 of 800 bytes"),
        (wav(tone())[:30], "broken"),
        (wav(tone(0)), "empty"),
        (wav(tone(16), rate=10), "a rate of 10 Hz"),
        (wav(tone(4, 9)), "9 channels"),
        (tone(), "no rate"),
        ((tone(4, 2), 16_000), r"mono, \[n\], got \(4, 2\)"),
        ((np.full(9, np.nan, np.float32), 16_000), "no numbers"),
        ((np.array([0.0, np.inf]), 16_000), "no numbers"),
        ((np.arange(9), 16_000), "samples must be float"),
        ((tone(), 0), "a rate of 0 Hz"),
        ((tone(), 16_000.5), "whole number"),
        ((tone(), "16000"), r"\(samples, rate in Hz\)"),
        ((tone(), True), r"\(samples, rate in Hz\)"),
        ((tone(), float("nan")), r"rate in Hz"),
        ((tone(),), r"\(samples, rate in Hz\)"),
        ((np.zeros(0), 16_000), "empty"),
        ((np.zeros(1_800_001, np.float32), 1_000), "1,800 seconds; at most 1800"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_no_audio_is_refused(source: Any, match: str) -> None:
    with pytest.raises(UsageError, match=match):
        read_audio(source, OPEN)


def test_audio_that_is_too_long_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audio_module, "MAX_SECONDS", 0.01)
    monkeypatch.setattr(wave.Wave_read, "readframes", lambda *_: pytest.fail("it was decoded"))
    with pytest.raises(UsageError, match="seconds; at most"):
        read_audio(wav(tone()), OPEN)


def test_resampling_gives_what_transformers_gives(tmp_path: Path) -> None:
    pytest.importorskip("soxr", reason="soxr, which resampling needs, is not installed")
    from transformers.audio_utils import load_audio

    (tmp_path / "a.wav").write_bytes(wav(tone(2_000, 2), 22_050))
    wanted = load_audio(str(tmp_path / "a.wav"), sampling_rate=16_000, backend="soundfile")
    samples, rate = read_audio(tmp_path / "a.wav", OPEN)
    assert np.array_equal(resample(samples, rate, 16_000), wanted)


def test_without_soxr_another_rate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "soxr", None)
    assert resample(tone(), 16_000, 16_000) is not None
    with pytest.raises(UsageError, match=r"22050 Hz and the model takes 16000 Hz.*pip install soxr"):
        resample(tone(), 22_050, 16_000)


@pytest.mark.parametrize("seed", range(40))
def test_broken_audio_raises_usage_errors_only(seed: int) -> None:
    draw = np.random.default_rng(seed)
    data = bytearray(wav(tone(50), width=1 + seed % 4))
    for place in draw.integers(0, 60, 1 + seed % 5):
        data[place] = draw.integers(256)
    try:
        assert read_audio(bytes(data), OPEN)[0].ndim == 1
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017
