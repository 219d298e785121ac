"""The token ids that end a completion."""

import json
from pathlib import Path


def find_stop_ids(folder: Path, eos_id: int | None) -> frozenset[int]:
    """Return `eos_id` of the tokenizer and the stop ids of config.json and generation_config.json."""
    stop_ids = {eos_id}
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.is_file():
            # One id, a list of ids, or null.
            listed = json.loads(path.read_text()).get("eos_token_id")
            stop_ids.update(listed if isinstance(listed, list) else [listed])
    return frozenset(stop_id for stop_id in stop_ids if stop_id is not None)
