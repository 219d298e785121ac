"""Parse the command line into a config, with one flag per field, flag groups in `--help`, and presets."""

import argparse
import sys
import typing
from collections import ChainMap, defaultdict
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, make_dataclass
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
    """Parse the command line into a `config_class`, call `main` with the config, and exit with `main`'s return value.

    presets: field values that `--algorithm NAME` sets, keyed by NAME; command-line flags take precedence. Every rank
    calls this function.
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
    """Parse the command line (or `arguments`) into a config whose defaults come from the preset or from `defaults`.

    names: the fields to expose as flags (None: all fields). tyro reads types and help texts from `config_class` and its
    base classes; a help text that begins with [Title] opens a flag group. tyro exits with code 2 on an invalid flag.
    Raises InputError for an unknown preset.
    """
    if presets:
        algorithm = read_flag("algorithm", arguments) or next(iter(presets))
        refuse(algorithm not in presets, f"--algorithm {algorithm}: must be one of {', '.join(presets)}")
        defaults = presets[algorithm]
    # tyro prints group titles only for nested structs, so the flat config is converted to a nested struct.
    groups: dict[str, list[Any]] = defaultdict(list)
    type_info = StructTypeInfo.make(config_class, config_class(**defaults or {}), in_union_context=False)
    spec: Any = ConstructorRegistry.get_struct_spec(type_info)
    title = ""
    for field in spec.fields:
        text = " ".join((field.helptext() or "").split())
        if text.startswith("["):
            title, _, text = text[1:].partition("] ")
        if names is None or field.name in names:
            argument = tyro.conf.arg(
                help=text,
                # Each help text already explains a default of None or ().
                help_behavior_hint="" if field.default in (None, ()) else None,
                metavar=f"{{{','.join(presets)}}}" if presets and field.name == "algorithm" else None,
            )
            groups[title].append((field.name, Annotated[field.type, argument], field.default))
    try:
        flag_groups = tyro.cli(
            dict[str, Any],
            args=arguments,
            default={title: make_dataclass("Group", members)() for title, members in groups.items()},
            description=description,
            config=(tyro.conf.OmitArgPrefixes,),
            console_outputs=rank() == 0,
        )
    except BrokenPipeError:  # the pipe was closed early, for example by `--help | head`
        sys.exit(0)
    return config_class(**ChainMap(*map(asdict, flag_groups.values())))


def read_flag(name: str, arguments: Sequence[str] | None) -> str | None:
    """Return one flag's value, or None if the flag is absent.

    The default values used in the full parse depend on this flag's value.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--{name}", dest="value")
    return parser.parse_known_args(arguments)[0].value


def flag_name(name: str) -> str:
    """Return a field's flag, such as --num-steps for num_steps."""
    return f"--{name.replace('_', '-')}"
