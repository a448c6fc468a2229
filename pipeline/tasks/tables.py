"""Rows of Parquet files and of a directory written by `datasets.Dataset.save_to_disk`, by pyarrow alone."""

import json
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError

STATE, SPLITS = "state.json", "dataset_dict.json"


def is_table(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".parquet"


def read_table(path: Path) -> list[dict[str, Any]]:
    """The rows in order. Raises ConfigError for a torn file, for several splits, and where pyarrow is missing."""
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise ConfigError(f"{path}: reading it needs pyarrow; pip install 'ngu-rl[data]'") from None
    rows = []
    for file in _files(path):
        try:
            if file.suffix == ".parquet":
                table = pq.ParquetFile(file).read()
            else:
                with pa.memory_map(str(file)) as source:
                    table = pa.ipc.open_stream(source).read_all()
            rows += table.to_pylist()
        except (OSError, pa.ArrowException) as e:
            raise ConfigError(f"{file}: not a readable Parquet or Arrow file: {' '.join(str(e).split())}") from None
    return rows


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    if (path / SPLITS).is_file():
        splits = ", ".join(sorted(p.name for p in path.iterdir() if p.is_dir()))
        raise ConfigError(f"{path}: several splits ({splits}); name one of these directories")
    if (path / STATE).is_file():
        try:
            return [path / entry["filename"] for entry in json.loads((path / STATE).read_text())["_data_files"]]
        except (ValueError, LookupError, TypeError) as e:
            raise ConfigError(f"{path / STATE}: not the state of a data set: {type(e).__name__}: {e}") from None
    files = sorted(path.glob("*.parquet"))
    if not files:
        raise ConfigError(f"{path}: not a readable data set: a directory without {STATE} and without .parquet files")
    splits = sorted({file.stem.partition("-")[0] for file in files if "-of-" in file.stem})
    if len(splits) > 1:
        raise ConfigError(f"{path}: files of several splits ({', '.join(splits)}); give each split its own directory")
    return files
