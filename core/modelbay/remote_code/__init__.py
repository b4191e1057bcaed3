"""Code of trusted model repositories, as importable packages: ``modelbay.remote_code.h<hash>.<module>``.

Those packages are no part of the installation: `modelbay.trust` writes them to a cache directory, which is on this
package's path, so that a pickle of a remote class finds it again in another process.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$MODELBAY_CACHE/remote_code``, else below ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    base = os.environ.get("MODELBAY_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "modelbay")
    return Path(os.path.abspath(os.path.expanduser(base))) / "remote_code"


__path__ = [*__path__, str(cache_directory())]
