"""Prepare a byte-level training set: the source of Python's standard library as a Megatron indexed dataset.

    python examples/prepare_data.py --output runs/data/stdlib

Real text that every machine has. One document a file (folders of tests left out), one token a byte, each
document ended by EOD = 256: train with `--tokenizer-type NullTokenizer --vocab-size 257 --data-path OUTPUT`.
Writes OUTPUT.bin and OUTPUT.idx with Megatron's own builder, and OUTPUT.json: where the text came from, the
number of files and bytes, and the SHA-256 of the text, which differs between Python versions.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import sysconfig
from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder, get_bin_path, get_idx_path

EOD = 256
VOCAB_SIZE = 257
LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def source_files(folder: Path) -> list[Path]:
    """The .py files below folder in a fixed order, without tests and installed packages."""
    found = [(path.relative_to(folder).parts, path) for path in folder.rglob("*.py")]
    return [path for parts, path in sorted(found) if not LEFT_OUT.intersection(parts)]


def prepare(output: Path, folder: Path | None = None) -> dict:
    """Write the dataset unless it is there for this folder and Python already; what OUTPUT.json holds.

    folder    where the text comes from; the running Python's standard library by default.
    Raises ValueError if folder holds no text.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    origin = f"{folder.name} of Python {platform.python_version()}"
    source = {"origin": origin, "folder": str(folder.resolve())}
    summary_file = output.with_suffix(".json")
    if summary_file.exists():
        summary = json.loads(summary_file.read_text())
        if summary.items() >= source.items():
            return summary

    files = [path for path in source_files(folder) if path.stat().st_size]
    if not files:
        raise ValueError(f"folder: got {folder}, need one with Python sources below it")
    output.parent.mkdir(parents=True, exist_ok=True)
    summary_file.unlink(missing_ok=True)
    builder = IndexedDatasetBuilder(get_bin_path(str(output)), dtype=DType.optimal_dtype(VOCAB_SIZE))
    digest, size = hashlib.sha256(), 0
    for path in files:
        text = path.read_bytes()
        digest.update(text)
        size += len(text)
        tokens = numpy.append(numpy.frombuffer(text, dtype=numpy.uint8).astype(numpy.uint16), EOD)
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(get_idx_path(str(output)))
    summary = source | {"files": len(files), "bytes": size, "sha256": digest.hexdigest()}
    summary_file.write_text(json.dumps(summary, indent=2) + "\n")  # last: it says that the set is complete
    return summary


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True, help="path prefix of the .bin, .idx and .json")
    parser.add_argument("--folder", type=Path, help="other sources than the standard library's")
    options = parser.parse_args()
    print(json.dumps(prepare(options.output, options.folder)))
