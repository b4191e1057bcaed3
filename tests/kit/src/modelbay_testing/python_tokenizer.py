"""A tokenizer that exists as Python code alone, with the vocabulary of a real one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def python_twin(source: Path, folder: Path) -> Path:
    """Write to ``folder`` the WordPiece tokenizer in ``source`` (which has a vocab.txt) as Transformers' Python class.

    The two classes of Transformers give the same ids, but for characters on whose category Python and Rust differ.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source / "vocab.txt", folder / "vocab.txt")
    said = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    kept = {key: said[key] for key in ("do_lower_case", "tokenize_chinese_chars", "strip_accents") if key in said}
    config = {**kept, "tokenizer_class": "BertTokenizerLegacy"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "bert"}', encoding="utf-8")
    return folder
