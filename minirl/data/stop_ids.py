"""The token ids that end a completion."""

import json
from pathlib import Path


def find_stop_ids(folder: Path, eos: int | None) -> frozenset[int]:
    """Every id that the tokenizer, config.json or generation_config.json lists as end of sequence."""
    ids = {eos}
    for name in ("config.json", "generation_config.json"):
        if (folder / name).is_file():
            listed = json.loads((folder / name).read_text()).get("eos_token_id")
            ids |= set(listed) if isinstance(listed, list) else {listed}
    return frozenset(i for i in ids if i is not None)
