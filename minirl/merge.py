"""Make one model of a run's adapters and their base: `python -m minirl.merge RUN FOLDER`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import tyro

from minirl.errors import refuse
from minirl.files.json_files import read_json_object
from minirl.model.folders import file_of, has_adapters
from minirl.model.weights import kept_tensors, load_replica, named_parameters, save_folder
from minirl.ranks import launch
from minirl.run.run_folder import newest_checkpoint


@dataclass(frozen=True)
class Config:
    """Merge adapters into their base."""

    # A run's folder or name, or a folder with adapters.
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    # The new folder of the model.
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    dtype: Literal["float32", "bfloat16"] = "float32"  # of its weights


def merge(source: Path, output: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder with the model of a folder of adapters, in this dtype.

    Each weight is summed in fp32 and rounded once. Raises InputError if `output` exists or `source` has no adapters.
    """
    refuse(output.exists(), f"{output}: exists; name a new folder")
    refuse(
        not has_adapters(source),
        f"{source}: no adapter_config.json there; name a run or a folder with adapters",
    )
    model = load_replica(source, dtype=dtype, scalar_head=None)
    config = read_json_object(file_of(source, "config.json"))
    kept = kept_tensors(model.config, source)
    save_folder(output, named_parameters(model), config=config, tokenizer_from=source, kept=kept)


def main() -> None:
    """The command."""
    config = tyro.cli(Config, prog="python -m minirl.merge")
    source = Path(newest_checkpoint(config.run, flag="RUN"))
    merge(source, config.folder, getattr(torch, config.dtype))
    print(f"{source} and its base are merged in {config.folder}")


if __name__ == "__main__":
    launch.run(main)
