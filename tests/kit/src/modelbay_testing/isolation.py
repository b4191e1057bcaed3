"""A fresh virtual environment that holds built wheels and only what they declare.

Installing torch once per environment would cost minutes, so the declared dependencies (and theirs) are linked from
the environment that runs the tests; everything that is not declared, directly or not, stays out of sight.
"""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def build_wheel(project: str | Path, folder: str | Path) -> Path:
    """Build the wheel of the distribution in ``project`` into ``folder``, with the build tools installed here."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    before = set(Path(folder).glob("*.whl"))
    _run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(project)])
    return (set(Path(folder).glob("*.whl")) - before).pop()


@dataclass(frozen=True, slots=True)
class FreshVenv:
    """A virtual environment made by `fresh_venv`."""

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / ("Scripts" if os.name == "nt" else "bin")

    @property
    def python(self) -> Path:
        return self.bin / "python"

    def run(
        self, *command: str | Path, check: bool = True, timeout: float = 300, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command whose first word is looked up in the environment; stdin is closed.

        Raises:
            AssertionError: it failed and ``check`` is set; carries its output.
        """
        words = [str(self.bin / command[0]), *map(str, command[1:])]
        return _run(words, check=check, timeout=timeout, env={**_clean_environ(), **(env or {})})

    def pip(self, *arguments: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run the outer pip on this environment."""
        words = ["-m", "pip", "--python", str(self.python), "--disable-pip-version-check", *map(str, arguments)]
        return _run([sys.executable, *words], check=check, env=_clean_environ())


def fresh_venv(folder: str | Path, wheels: Sequence[Path], extras: Iterable[str] = ()) -> FreshVenv:
    """Make a virtual environment in ``folder`` and install ``wheels`` by pip, without an index.

    pip itself checks that every declared dependency is there in a version that fits.

    Args:
        wheels: wheel files; those that others of them require must be among them.
        extras: extras whose dependencies are linked too.
    """
    venv = FreshVenv(Path(folder))
    _run([sys.executable, "-m", "venv", "--without-pip", str(venv.root)])
    linked = venv.root / "linked"
    linked.mkdir()
    for distribution in _declared(wheels, set(extras)):
        _link(distribution, linked)
    (_site_packages(venv) / "linked.pth").write_text(f"{linked}\n", encoding="utf-8")
    venv.pip("install", "--no-index", "--quiet", *wheels)
    return venv


def _declared(wheels: Sequence[Path], extras: set[str]) -> Iterator[importlib.metadata.Distribution]:
    """The installed distributions that these wheels require, directly or through one another."""
    metadata = {canonicalize_name(wheel.name.partition("-")[0]): _requires(wheel) for wheel in wheels}
    pending = [requirement for required in metadata.values() for requirement in _active(required, extras)]
    seen: set[str] = set(metadata)
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        if name in seen and not requirement.extras:
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        pending += _active(distribution.requires or [], requirement.extras)
        if name not in seen:
            seen.add(name)
            yield distribution


def _requires(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def _active(requires: Iterable[str], extras: Iterable[str]) -> list[Requirement]:
    """The requirements whose markers hold here, with one of the extras or with none."""
    parsed = [Requirement(text) for text in requires]
    environments = [{"extra": extra} for extra in ["", *extras]]
    return [r for r in parsed if r.marker is None or any(r.marker.evaluate(env) for env in environments)]


def _link(distribution: importlib.metadata.Distribution, folder: Path) -> None:
    """Link a distribution's packages; a namespace package is linked one level further down, since others share it."""
    names: set[Path] = set()
    for file in distribution.files or []:
        top = Path(file.parts[0])
        if top.name in ("..", "__pycache__") or top.suffix == ".pth":
            continue
        whole = top.suffix == ".dist-info" or len(file.parts) == 1 or _exists(distribution, top / "__init__.py")
        names.add(top if whole else top / file.parts[1])
    for name in names:
        target = folder / name
        target.parent.mkdir(exist_ok=True)
        if not target.is_symlink():
            target.symlink_to(Path(str(distribution.locate_file(name))))


def _exists(distribution: importlib.metadata.Distribution, name: Path) -> bool:
    return Path(str(distribution.locate_file(name))).exists()


def _site_packages(venv: FreshVenv) -> Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    return Path(venv.run("python", "-c", code).stdout.strip())


def _clean_environ() -> dict[str, str]:
    """The environment without what would let this process's packages or settings into the child."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith(("MODELBAY_", "PYTEST_"))}


def _run(
    words: list[str], *, check: bool = True, timeout: float = 600, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, env=env, check=False
    )
    output = f"{' '.join(words)}\nexit code {result.returncode}\n{result.stdout}\n{result.stderr}"
    assert not check or result.returncode == 0, output
    return result
