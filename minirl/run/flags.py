"""The command line: the fields of a config as flags, grouped in `--help`, and presets of their values."""

import argparse
import sys
import typing
from collections import ChainMap, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, fields, make_dataclass
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, StructTypeInfo

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
    names: Container[str] | None = None,
    arguments: Sequence[str] | None = None,
) -> C:
    """Return the config of the command line (or of `arguments`), with its preset's values, or `defaults`, as defaults.

    names: the fields that are flags; None: all fields. tyro reads types and help texts from the classes of
    `config_class`; a help text that begins with [Title] opens a group. tyro exits with 2 on a wrong flag. Raises
    InputError for an unknown preset.
    """
    if presets:
        algorithm = peek_flag("algorithm", arguments) or next(iter(presets))
        refuse(algorithm not in presets, f"--algorithm {algorithm}: one of {', '.join(presets)}")
        defaults = presets[algorithm]
        missing = sorted(defaults.keys() - {field.name for field in fields(config_class)})  # type: ignore[arg-type]
        refuse(
            missing, f"--algorithm {algorithm}: sets {', '.join(missing)}, which the script's Config lacks"
        )
    # tyro shows titles over nested structures, so the flags are nested for tyro; the config is flat.
    groups: dict[str, list[Any]] = defaultdict(list)
    info = StructTypeInfo.make(config_class, config_class(**defaults or {}), in_union_context=False)
    spec: Any = ConstructorRegistry.get_struct_spec(info)
    title = ""
    for field in spec.fields:
        text = " ".join((field.helptext() or "").split())
        if text.startswith("["):
            title, _, text = text[1:].partition("] ")
        if names is None or field.name in names:
            argument = tyro.conf.arg(
                help=text,
                # The help of a flag without a value says what it means.
                help_behavior_hint="" if field.default in (None, ()) else None,
                metavar=f"{{{','.join(presets)}}}" if presets and field.name == "algorithm" else None,
            )
            groups[title].append((field.name, Annotated[field.type, argument], field.default))
    try:
        values = tyro.cli(
            dict[str, Any],
            args=arguments,
            default={title: make_dataclass("Group", members)() for title, members in groups.items()},
            description=description,
            config=(tyro.conf.OmitArgPrefixes,),
            console_outputs=rank() == 0,
        )
    except BrokenPipeError:  # the reader of --help has seen enough, as `head` has
        sys.exit(0)
    return config_class(**ChainMap(*map(asdict, values.values())))


def peek_flag(name: str, arguments: Sequence[str] | None) -> str | None:
    """Return the value of a flag on which defaults depend, from the command line or `arguments`; None without it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="value")
    return parser.parse_known_args(arguments)[0].value


def flag_name(name: str) -> str:
    """Return the flag of a field."""
    return f"--{name.replace('_', '-')}"
