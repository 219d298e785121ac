"""The command line: flags in groups, presets, and the names of flags in other libraries."""

import argparse
import dataclasses
import sys
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

from minirl.errors import refuse
from minirl.ranks import launch
from minirl.ranks.process_group import rank

C = TypeVar("C")
# The names of flags in other libraries, and the flags here.
OTHER_NAMES = {
    "learning-rate": "--lr",
    "out-dir": "--run-name, a folder in ./runs or $MINIRL_RUNS",
    "output-dir": "--run-name, a folder in ./runs or $MINIRL_RUNS",
    "model-name-or-path": "--model",
    "dataset": "--data",
    "dataset-name": "--data",
    "reward-funcs": "--reward",
    "batch-size": "--prompts-per-step, times --group-size",
    "num-generations": "--group-size",
    "max-completion-length": "--max-new-tokens",
    "max-steps": "--num-steps",
    "num-train-epochs": "--num-steps; --num-epochs are passes over a step's rollouts",
    "beta": "--kl-coef",
    "epsilon": "--clip-low, and --clip-high",
    "report-to": "--wandb",
}


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
    groups: Collection[type] | None = None,
) -> C:
    """The config of the command line (or of `arguments`), with the values of its preset as defaults, or `defaults`.

    groups: the classes whose fields are flags; None: all.

    tyro reads types and comments from the classes of `config_class`. It exits with 2 on a wrong flag. Raises InputError
    for a flag that has another name here, and for an unknown preset.
    """
    _refuse_other_names(config_class, sys.argv[1:] if arguments is None else arguments)
    if presets:
        algorithm = early_value("algorithm", arguments) or next(iter(presets))
        refuse(algorithm not in presets, f"--algorithm {algorithm}: one of {', '.join(presets)}")
        defaults = presets[algorithm]
    try:
        parsed = tyro.cli(
            dict,
            args=arguments,
            default=_boxes(config_class, groups),
            description=description,
            registry=_rule_for_boxes(config_class(**defaults or {})),
            config=(tyro.conf.OmitArgPrefixes,),
            console_outputs=rank() == 0,
        )
    except BrokenPipeError:  # the reader of --help, for example `head`, has stopped reading
        sys.exit(0)
    return config_class(**{name: value for box in parsed.values() for name, value in box.items()})


def early_value(name: str, arguments: Sequence[str] | None) -> str | None:
    """The value of a flag on which defaults depend, on the command line or in `arguments`; None: it is not given."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument(f"--{name}")
    value: str | None = getattr(early.parse_known_args(arguments)[0], name)
    return value


class _Box(dict[str, type]):
    """The flags of one box of `--help`: the names of their fields, each with the class that declares it first."""


def _boxes(config_class: type, chosen: Collection[type] | None = None) -> dict[str, _Box]:
    """The boxes in the order of `--help`, by their titles: the first lines of the classes' docstrings.

    First come the config and the configs that it extends, then the groups of flags that the last of those inherits:
    all, or those that are `chosen`.
    """
    classes = [cls for cls in config_class.__mro__ if dataclasses.is_dataclass(cls)]
    configs = [cls for cls in classes if any(map(dataclasses.is_dataclass, cls.__bases__))]
    groups = [cls for cls in classes if cls not in configs and (chosen is None or cls in chosen)]
    boxes: dict[str, _Box] = {}
    for cls in [*configs, *reversed(groups)]:
        inherited = {name for base in cls.__mro__[1:] for name in getattr(base, "__dataclass_fields__", {})}
        new = [field.name for field in dataclasses.fields(cls) if field.name not in inherited]
        if new:
            title = (cls.__doc__ or cls.__name__).splitlines()[0]
            boxes.setdefault(title, _Box()).update(dict.fromkeys(new, cls))
    return boxes


def _rule_for_boxes(defaults: object) -> ConstructorRegistry:
    """A registry that has tyro parse each `_Box` into a dict of values. `defaults` is a config."""
    registry = ConstructorRegistry()
    config_class = type(defaults)

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        def fields_of(cls: type) -> dict[str, StructFieldSpec]:
            spec = registry.get_struct_spec(dataclasses.replace(info, type=cls, default=defaults))
            assert isinstance(spec, StructConstructorSpec)
            return {field.name: field for field in spec.fields}

        box = info.default
        if not isinstance(box, _Box):
            return None
        fields = {cls: fields_of(cls) for cls in {config_class, *box.values()}}
        shown = [_shown(fields[config_class][name], fields[owner][name]) for name, owner in box.items()]
        return StructConstructorSpec(dict, tuple(shown))

    return registry


def _shown(field: StructFieldSpec, first: StructFieldSpec) -> StructFieldSpec:
    """The field as `--help` shows it. Without a comment it has that of its `first` declaration."""

    def comment() -> str | None:
        texts = [part.helptext() if callable(part.helptext) else part.helptext for part in (field, first)]
        return texts[0] or texts[1]

    shown = tyro.conf.arg(
        metavar=_metavar(field.type),
        help_behavior_hint="" if field.default in (None, ()) else None,  # the comment says what "none" means
    )
    annotated: Any = Annotated[field.type, shown]
    return dataclasses.replace(field, type=annotated, helptext=comment)


def _refuse_other_names(config_class: Any, arguments: Sequence[str]) -> None:
    """Refuse a flag by its name in another library. Raises InputError with the name here."""
    own = {field.name.replace("_", "-") for field in dataclasses.fields(config_class)}
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        is_flag = argument.startswith("--") and name not in own
        refuse(is_flag and name in OTHER_NAMES, f"--{name}: no such flag; it is {OTHER_NAMES.get(name)}")


def _metavar(annotation: Any) -> str | None:
    """How --help shows a value of this type: TEXT, N or X; None where tyro shows it well (choices, on and off)."""
    if typing.get_origin(annotation) is typing.Annotated:
        own = [getattr(extra, "metavar", None) for extra in annotation.__metadata__]
        return next(filter(None, own), None) or _metavar(annotation.__origin__)
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return " ".join("..." if part is ... else str(_metavar(part)) for part in parts)
    if type(None) in parts:
        return _metavar(parts[0])
    return {str: "TEXT", int: "N", float: "X"}.get(annotation)


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"
