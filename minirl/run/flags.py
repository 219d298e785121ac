"""The command line: the fields of a config as flags, and presets of their values."""

import argparse
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tyro

from minirl.errors import refuse
from minirl.ranks import launch
from minirl.ranks.process_group import rank

C = TypeVar("C")


def run_script(
    main: Callable[[C], int],
    config_class: type[C],
    *,
    description: str,
    presets: Mapping[str, dict[str, Any]] | None = None,
) -> typing.NoReturn:
    """Read the command line into a `config_class` and run `main` on it; the process ends with its exit code.

    presets: the values that `--algorithm NAME` sets; flags on the command line win. Every rank calls it.
    """
    launch.run(lambda: main(parse(config_class, description=description, presets=presets)))


def parse(
    config_class: type[C],
    *,
    description: str,
    presets: Mapping[str, dict[str, Any]] | None = None,
    defaults: Mapping[str, Any] | None = None,
    arguments: Sequence[str] | None = None,
) -> C:
    """The config of the command line (or of `arguments`), with the values of its preset as defaults, or `defaults`.

    tyro reads types and comments from the classes of `config_class`. It exits with 2 on a wrong flag. Raises InputError
    for an unknown preset.
    """
    if presets:
        algorithm = early_value("algorithm", arguments) or next(iter(presets))
        refuse(algorithm not in presets, f"--algorithm {algorithm}: one of {', '.join(presets)}")
        defaults = presets[algorithm]
    return tyro.cli(
        config_class,
        args=arguments,
        default=config_class(**defaults or {}),
        description=description,
        config=(tyro.conf.OmitArgPrefixes,),
        console_outputs=rank() == 0,
    )


def early_value(name: str, arguments: Sequence[str] | None) -> str | None:
    """The value of a flag on which defaults depend, on the command line or in `arguments`; None: it is not given."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument(f"--{name}")
    value: str | None = getattr(early.parse_known_args(arguments)[0], name)
    return value


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"
