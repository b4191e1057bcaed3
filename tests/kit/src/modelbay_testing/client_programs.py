"""Programs that talk to a server, in environments of their own: what they need stays out of the one that runs tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from modelbay_testing.assets import AssetUnavailableError, once, run_program

#: LangChain's classes for OpenAI, the command `llm`, and lm-evaluation-harness, which wants a tokenizer and no torch.
PYTHON_CLIENTS = ("langchain-openai==1.7.4", "llm==0.36", "lm_eval[api]==0.4.13", "transformers==5.24.0")
NODE_CLIENT = "openai@6"


def clients_python() -> Path:
    """The interpreter of a virtual environment that holds `PYTHON_CLIENTS` (some 600 MB, made once).

    Run them as ``python -m llm``: the environment was moved after it was made, so its scripts name another place.

    Raises:
        AssetUnavailableError: the package index cannot be reached.
    """

    def fill(folder: Path) -> None:
        run_program([sys.executable, "-m", "venv", "--without-pip", str(folder)], folder, "a virtual environment")
        pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
        run_program([*pip, "install", "--quiet", *PYTHON_CLIENTS], folder, " ".join(PYTHON_CLIENTS))

    return once("python-clients-1", fill) / "bin" / "python"


def node_client_dir() -> Path:
    """A directory whose ``node_modules`` hold the package openai, for Node.

    Raises:
        AssetUnavailableError: no Node of version 20 or later, no npm, or no registry.
    """
    node_program()

    def fill(folder: Path) -> None:
        npm = shutil.which("npm")
        if npm is None:
            raise AssetUnavailableError(f"{NODE_CLIENT} needs npm to be fetched, and npm is not on PATH.")
        run_program(
            [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", ".", NODE_CLIENT], folder, NODE_CLIENT
        )

    return once("node-client-1", fill)


def node_program() -> str:
    """The path of ``node``.

    Raises:
        AssetUnavailableError: there is none, or it is older than 20.
    """
    node = shutil.which("node")
    if node is None:
        raise AssetUnavailableError("node is not on PATH.")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    if not said.startswith("v") or int(said[1:].partition(".")[0]) < 20:
        raise AssetUnavailableError(f"node is {said or 'not usable'}, and the package openai needs 20 or later.")
    return node
