"""Images: from a file, bytes, URL, array or PIL image to a PIL image in RGB, as Transformers' ``load_image`` gives it.

Pillow is optional: it is imported by the first image.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from modelbay.errors import UsageError, one_line
from modelbay_runtime.multimodal.sources import MediaPolicy, read_bytes

#: Most pixels of one image, known from its header before anything is decoded: 8192 × 8192.
MAX_PIXELS = 2**26
#: What is read. Formats that start other programs, or that nobody sends, are not among them.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")


def read_image(source: Any, policy: MediaPolicy) -> Any:
    """One image, RGB, turned as its EXIF orientation says; of an animation the first frame.

    Args:
        source: a path, URL, bytes, PIL image, or uint8 array [height, width, 3].

    Raises:
        UsageError: it cannot be read or is not allowed, is no image, is cut off, or has too many pixels.
    """
    module = _pillow()
    if isinstance(source, np.ndarray):
        if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3:
            raise UsageError(f"image: an array must be uint8 [height, width, 3], got {source.dtype} {source.shape}.")
        _check_size(source.shape[1], source.shape[0])
        return module.fromarray(source)
    if isinstance(source, module.Image):
        return _decoded(source)
    data = read_bytes(source, "image", policy)
    if not data:
        raise UsageError("image: the file is empty.")
    module.init()
    try:
        image = module.open(io.BytesIO(data), formats=[name for name in FORMATS if name in module.OPEN])
    except module.UnidentifiedImageError as error:
        raise UsageError(f"image: {len(data)} bytes that are no image ({', '.join(FORMATS)}).") from error
    except (module.DecompressionBombError, module.DecompressionBombWarning) as error:  # where warnings are errors
        raise UsageError(f"image: more than {MAX_PIXELS:,} pixels, the most that is taken.") from error
    except Exception as error:  # a decoder's word on a broken header, of any type
        raise UsageError(f"image: the header is broken: {one_line(error)}.") from error
    return _decoded(image)


def _decoded(image: Any) -> Any:
    from PIL import ImageOps

    _check_size(*image.size)
    try:
        image.load()
        return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # decoders raise what they like on broken data
        raise UsageError(f"image: it cannot be decoded: {one_line(error)}.") from error


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise UsageError(f"image: it has no pixels ({width} × {height}).")
    if width * height > MAX_PIXELS:
        raise UsageError(
            f"image: {width} × {height} pixels; at most {MAX_PIXELS:,} are taken.", hint="Make it smaller."
        )


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UsageError("images need Pillow, which is not installed.", hint="pip install pillow") from error
    return Image
