"""The token ids that end a completion."""

from pathlib import Path

from minirl.errors import refuse
from minirl.files.json_files import read_json_object
from minirl.model.folders import file_of


def find_stop_ids(folder: Path, eos_id: int | None) -> frozenset[int]:
    """Return `eos_id` of the tokenizer and the stop ids of config.json and generation_config.json.

    Raises InputError naming the file that cannot be read.
    """
    stop_ids = {eos_id}
    for name in ("config.json", "generation_config.json"):
        path = file_of(folder, name)
        # One id, a list of ids, or null.
        listed = read_json_object(path).get("eos_token_id") if path.is_file() else None
        ids = listed if isinstance(listed, list) else [listed]
        is_right = all(i is None or (type(i) is int and i >= 0) for i in ids)
        refuse(not is_right, f"{path}: eos_token_id is {listed!r}; expected a token id or a list of them")
        stop_ids.update(ids)
    return frozenset(stop_id for stop_id in stop_ids if stop_id is not None)
