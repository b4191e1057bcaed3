"""Audio: from a file, bytes, URL or samples to mono float32 at the rate that the model takes.

WAV is read with the standard library; other formats with soundfile, and another rate is reached with soxr, the two that
Transformers' ``load_audio`` uses, in the same way, so that the numbers are the same. Both are optional.
"""

from __future__ import annotations

import io
import math
import wave
from typing import Any

import numpy as np

from modelbay.errors import UsageError, one_line
from modelbay_runtime.multimodal.sources import MediaPolicy, read_bytes

#: Longest piece of audio, in seconds.
MAX_SECONDS = 30 * 60
#: Rates that make sense, in Hz, and channels that are averaged to one.
RATES, MAX_CHANNELS = (1_000, 384_000), 8

Audio = tuple[np.ndarray, int]


def read_audio(source: Any, policy: MediaPolicy) -> Audio:
    """Mono float32 samples [n] and their rate in Hz.

    Args:
        source: a path, URL, bytes, or (samples, rate) with float samples [n].

    Raises:
        UsageError: it cannot be read or is not allowed, is no audio, is empty or too long, or has samples that are no
            numbers.
    """
    if isinstance(source, tuple):
        return _given(source)
    if isinstance(source, np.ndarray):
        raise UsageError("audio: samples alone have no rate; give (samples, rate in Hz).")
    data = read_bytes(source, "audio", policy)
    samples, rate = _read_wav(data) if _is_pcm_wav(data) else _read_with_soundfile(data)
    samples = samples.mean(axis=1) if samples.shape[1] > 1 else samples[:, 0]
    return _checked(np.ascontiguousarray(samples, np.float32)), rate


def resample(samples: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    """Samples [n] at another rate: [ceil(n * wanted / rate)].

    Raises:
        UsageError: the rates differ, and soxr is not installed.
    """
    if rate == wanted:
        return samples
    try:
        import soxr
    except ImportError as error:
        raise UsageError(
            f"audio: its rate is {rate} Hz and the model takes {wanted} Hz, which needs soxr to convert.",
            hint=f"pip install soxr, or give audio with {wanted} Hz.",
        ) from error
    length = math.ceil(len(samples) * wanted / rate)
    found = soxr.resample(samples, rate, wanted, quality="soxr_hq")
    found = np.pad(found, (0, max(0, length - len(found))))[:length]
    return np.ascontiguousarray(found, np.float32)


def _given(source: tuple[Any, ...]) -> Audio:
    if len(source) != 2 or isinstance(source[1], bool) or not isinstance(source[1], int | float | np.number):
        raise UsageError("audio: a tuple must be (samples, rate in Hz).")
    try:
        samples, rate = np.asarray(source[0]), int(source[1])
    except (ValueError, OverflowError, TypeError) as error:
        raise UsageError(f"audio: a tuple must be (samples, rate in Hz): {error}.") from error
    if rate != source[1]:
        raise UsageError(f"audio: the rate must be a whole number of Hz, got {source[1]!r}.")
    if samples.ndim != 1:
        raise UsageError(f"audio: samples must be mono, [n], got {samples.shape}.", hint="Average the channels.")
    if samples.dtype.kind != "f":
        raise UsageError(f"audio: samples must be float, -1 to 1, got {samples.dtype}.")
    _check_length(len(samples), 1, rate)
    return _checked(np.ascontiguousarray(samples, np.float32)), rate


def _check_length(frames: int, channels: int, rate: int) -> None:
    """Before anything is decoded."""
    if not RATES[0] <= rate <= RATES[1]:
        raise UsageError(f"audio: a rate of {rate} Hz; {RATES[0]} to {RATES[1]} are taken.")
    if not 1 <= channels <= MAX_CHANNELS:
        raise UsageError(f"audio: {channels} channels; 1 to {MAX_CHANNELS} are taken.")
    if frames < 1:
        raise UsageError("audio: it is empty.")
    if frames > MAX_SECONDS * rate:
        raise UsageError(f"audio: {frames / rate:,.0f} seconds; at most {MAX_SECONDS} are taken.", hint="Cut it.")


def _checked(samples: np.ndarray) -> np.ndarray:
    if not np.isfinite(samples).all():
        raise UsageError("audio: some of its samples are no numbers (NaN or infinite).")
    return samples


def _is_pcm_wav(data: bytes) -> bool:
    """RIFF with a plain PCM header: what the standard library reads in every version."""
    at = data.find(b"fmt ", 12, 4096)
    is_wav = data[:4] == b"RIFF" and data[8:12] == b"WAVE" and at > 0
    return is_wav and data[at + 8 : at + 10] == b"\x01\x00"


def _read_wav(data: bytes) -> tuple[np.ndarray, int]:
    """[frames, channels] in -1 to 1, as soundfile gives them."""
    try:
        with wave.open(io.BytesIO(data)) as file:
            frames, channels, width = file.getnframes(), file.getnchannels(), file.getsampwidth()
            _check_length(min(frames, len(data)), channels, file.getframerate())
            content, rate = file.readframes(min(frames, len(data))), file.getframerate()
    except UsageError:
        raise
    except Exception as error:  # of any type, on a broken header
        raise UsageError(f"audio: the WAV file is broken: {str(error) or 'it ends too early'}.") from error
    if len(content) < frames * channels * width:
        raise UsageError(f"audio: the WAV file is cut off: {len(content)} of {frames * channels * width} bytes.")
    return _scaled(content, width).reshape(-1, channels), rate


def _scaled(content: bytes, width: int) -> np.ndarray:
    """Little-endian PCM of 1 (unsigned) to 4 bytes."""
    if width == 1:
        return (np.frombuffer(content, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:
        padded = np.zeros((len(content) // 3, 4), np.uint8)
        padded[:, 1:] = np.frombuffer(content, np.uint8).reshape(-1, 3)
        return (padded.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
    if width not in (2, 4):
        raise UsageError(f"audio: a WAV file of {8 * width} bits per sample; 8, 16, 24 and 32 are read.")
    return (np.frombuffer(content, f"<i{width}") / 2.0 ** (8 * width - 1)).astype(np.float32)


def _read_with_soundfile(data: bytes) -> tuple[np.ndarray, int]:
    try:
        import soundfile
    except ImportError as error:
        raise UsageError(
            "audio: it is no PCM WAV file, and other formats need soundfile, which is not installed.",
            hint="pip install soundfile",
        ) from error
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            _check_length(file.frames, file.channels, file.samplerate)
            return file.read(dtype="float32", always_2d=True), file.samplerate
    except (soundfile.SoundFileError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        reason = getattr(error, "error_string", None) or one_line(error)  # its own text names an object in memory
        raise UsageError(f"audio: {len(data)} bytes that cannot be read as audio: {reason.rstrip('.')}.") from error
