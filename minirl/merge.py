"""Make one model of a run's adapters and their base: `python -m minirl.merge RUN FOLDER`."""

import argparse
import sys
from pathlib import Path

import torch

from minirl.errors import InputError, refuse
from minirl.files.json_files import read_json_object
from minirl.files.redaction import escaped
from minirl.model.families import read_config
from minirl.model.folders import file_of, has_adapters
from minirl.model.weights import kept_tensors, load_replica, named_parameters, save_folder
from minirl.run.run_folder import newest_checkpoint


def merge(source: Path, output: Path, dtype: torch.dtype) -> None:
    """Write a Hugging Face folder with the model of a folder of adapters, in this dtype.

    Each weight is summed in fp32 and rounded once. Raises InputError if `output` exists or `source` has no adapters.
    """
    refuse(output.exists(), f"{output}: exists; name a new folder")
    refuse(
        not has_adapters(source),
        f"{source}: no adapter_config.json there; name a run or a folder with adapters",
    )
    model = load_replica(source, dtype=dtype, scalar_head=read_config(source).scalar_head)
    config = read_json_object(file_of(source, "config.json"))
    kept = kept_tensors(model.config, source)
    save_folder(output, named_parameters(model), config=config, tokenizer_from=source, kept=kept)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m minirl.merge", description="Merge adapters into their base."
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder or name, or a folder with adapters")
    parser.add_argument("output", metavar="FOLDER", type=Path, help="the new folder of the model")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of its weights (default: float32)",
    )
    return parser.parse_args()


def main() -> int:
    """The command."""
    given = arguments()
    try:
        source = Path(newest_checkpoint(given.run, flag="RUN"))
        merge(source, given.output, getattr(torch, given.dtype))
    except InputError as error:
        print(f"error: {escaped(str(error))}", file=sys.stderr)
        return error.exit_code
    print(f"{source} and its base are merged in {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
