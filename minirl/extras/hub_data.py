"""Read rows from Parquet files, dataset folders and Hub datasets with `datasets` (`pip install -e '.[data]'`)."""

import os
from collections.abc import Iterator
from typing import Any

from minirl.errors import InputError, refuse

# Fields with nested objects, whose missing keys Arrow pads with nulls. Chat templates would render the nulls.
PADDED_FIELDS = {"prompt", "tools"}


def dataset_objects(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (origin, fields) for each row. The origin is "source row N", and fields are Python values.

    source: a Parquet file, or NAME[:CONFIG[:SPLIT]], where NAME is a folder or a Hub id. One rank downloads and
    prepares data that is not cached yet; the other ranks wait for file locks and then read the cache. Raises
    InputError, naming the source and, if SPLIT is missing or unknown, the available splits.
    """
    refuse(
        source.endswith((".jsonl", ".json", ".parquet")) and not os.path.exists(source), f"no file {source}"
    )
    try:
        import datasets
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise InputError(
            f"{source}: without the `datasets` package, only JSON can be read; "
            "install the package with: pip install -e '.[data]'"
        ) from None
    name, _, rest = source.partition(":")
    config, _, split = rest.partition(":")
    try:
        if os.path.isfile(source):
            splits = {split: datasets.Dataset(ParquetFile(source).read())}
        else:
            splits = datasets.load_dataset(name, config or None)
    except Exception as error:  # the exception's type depends on the installed version of `datasets`
        reason = " ".join(str(error.__cause__ or error).split())
        raise InputError(
            f"{source} cannot be loaded; expected a file or a dataset NAME[:CONFIG[:SPLIT]]: {reason}"
        ) from None
    # If SPLIT is left out, the dataset must have exactly one split.
    split = split or "".join(splits)
    refuse(
        split not in splits,
        f"{source} has the splits {', '.join(splits)}; choose one, such as {name}:{config}:{next(iter(splits))}",
    )
    for number, row in enumerate(splits[split].to_list(), 1):
        for field in PADDED_FIELDS & row.keys():
            row[field] = _without_nulls(row[field])
        yield f"{source} row {number}", row


def _without_nulls(value: Any) -> Any:
    """Return a nested value with all null fields removed from its objects."""
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return value
