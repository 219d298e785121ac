"""The command line: flags in groups, presets, and refusals that name the flag."""

import argparse
import dataclasses
import inspect
import io
import sys
import tokenize
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import tyro

from minirl.errors import refuse
from minirl.ranks import watchdog
from minirl.ranks.process_group import rank

C = TypeVar("C")
# What other libraries call a flag: what it is here.
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
MAX_NUMBER = 2**63 - 1  # of a flag: tensors hold no greater int, and no greater float means anything


def run_script(
    main: Callable[[C], int],
    config_class: type[C],
    *,
    description: str,
    presets: Mapping[str, dict[str, Any]] | None = None,
) -> typing.NoReturn:
    """Read the command line into a `config_class` and run `main` on it; the process ends with its exit code.

    presets: what `--algorithm NAME` sets; flags that are given win. Every rank calls it.
    """
    preset = chosen_preset("--algorithm", presets) if presets else {}
    watchdog.run(lambda: main(parse(config_class, description=description, preset=preset)))


def chosen_preset(
    flag: str, presets: Mapping[str, dict[str, Any]], arguments: Sequence[str] | None = None
) -> dict[str, Any]:
    """The preset that the command line (or `arguments`) names with `flag`, by default the first."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument(flag, dest="name", default=next(iter(presets)))
    name = early.parse_known_args(arguments)[0].name
    return presets.get(name, {})


def parse(
    config_class: type[C],
    *,
    description: str,
    preset: Mapping[str, Any],
    arguments: Sequence[str] | None = None,
) -> C:
    """The config of the command line (or of `arguments`), with the preset's values as defaults.

    tyro shows one box of `--help` per dataclass, so each class that `config_class` inherits from becomes one: its
    docstring is the title. Its fields are put into the flat config afterwards. Exits with 2 on a wrong flag, and raises
    InputError for one that has another name here.
    """
    _refuse_other_names(config_class, sys.argv[1:] if arguments is None else arguments)
    defaults = config_class(**preset)
    groups = [
        _group(owner, names, config_class, defaults)
        for owner, names in _fields_by_class(config_class).items()
    ]
    everything: Any = dataclasses.make_dataclass(
        "Flags",
        [(name, group, dataclasses.field(default_factory=group)) for name, group in groups],
    )
    try:
        parsed = tyro.cli(
            everything,
            args=arguments,
            description=description,
            config=(tyro.conf.OmitArgPrefixes,),
            console_outputs=rank() == 0,
        )
    except BrokenPipeError:  # the reader of --help, `head` for example, has enough
        sys.exit(0)
    values: dict[str, Any] = {}
    for name, _ in groups:
        values |= vars(getattr(parsed, name))
    return config_class(**values)


def _refuse_other_names(config_class: Any, arguments: Sequence[str]) -> None:
    """Refuse a flag by the name that another library gives it. Raises InputError with the name here."""
    own = {field.name.replace("_", "-") for field in dataclasses.fields(config_class)}
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("_", "-")
        is_flag = argument.startswith("--") and name not in own
        refuse(is_flag and name in OTHER_NAMES, f"--{name}: no such flag; it is {OTHER_NAMES.get(name)}")


def _fields_by_class(config_class: type) -> dict[type, list[str]]:
    """The names of a config's fields under the class that declares them first, in the order of --help.

    First the config and the configs that it extends, then the groups of flags that the last of those collects.
    """
    classes = [cls for cls in config_class.__mro__ if dataclasses.is_dataclass(cls)]
    configs = [cls for cls in classes if any(map(dataclasses.is_dataclass, cls.__bases__))]
    groups = [cls for cls in classes if cls not in configs]
    found: dict[type, list[str]] = {}
    for cls in [*configs, *reversed(groups)]:
        inherited = {name for base in cls.__mro__[1:] for name in vars(base).get("__annotations__", {})}
        new = [name for name in vars(cls).get("__annotations__", {}) if name not in inherited]
        if new:
            found[cls] = new
    return found


def _group(owner: type, names: Sequence[str], config_class: type, defaults: Any) -> tuple[str, Any]:
    """A dataclass of these fields, with the config's defaults and the comments behind them as help."""
    types = typing.get_type_hints(config_class, include_extras=True)
    helps: dict[str, str] = {}
    for cls in reversed(config_class.__mro__):  # a field that is declared again may have another comment
        helps |= field_comments(cls)
    fields = []
    for name in names:
        default = getattr(defaults, name)
        shown = tyro.conf.arg(
            help=helps.get(name, ""),
            metavar=_metavar(types[name]),
            help_behavior_hint="" if default in (None, ()) else None,
        )
        annotated: Any = typing.Annotated[types[name], shown]
        fields.append((name, annotated, dataclasses.field(default=default)))
    group: Any = dataclasses.make_dataclass(owner.__name__, fields)
    title = (owner.__doc__ or owner.__name__).splitlines()[0]
    group.__doc__ = ""
    return owner.__name__, typing.Annotated[group, tyro.conf.arg(name=title)]


def _metavar(annotation: Any) -> str | None:
    """How --help shows a value of this type: TEXT, N or X; None where tyro shows it well (choices, on and off)."""
    if typing.get_origin(annotation) is typing.Annotated:
        own = [getattr(extra, "metavar", None) for extra in annotation.__metadata__]
        return next(filter(None, own), None) or _metavar(annotation.__origin__)
    parts = typing.get_args(annotation)
    if typing.get_origin(annotation) is tuple:
        return f"{_metavar(parts[0])} ..."
    if type(None) in parts:
        return _metavar(parts[0])
    return {str: "TEXT", int: "N", float: "X"}.get(annotation)


def field_comments(cls: type) -> dict[str, str]:
    """The comment on each annotated line of a class, or the string under it; {} where its source is out of reach."""
    if not dataclasses.is_dataclass(cls):
        return {}
    try:
        source = inspect.getsource(cls)
    except (OSError, TypeError):
        return {}
    found: dict[str, str] = {}
    field = ""
    for line in _token_lines(source):
        if len(line) > 1 and line[0].type == tokenize.NAME and line[1].string == ":":
            field = line[0].string
        elif line[0].type != tokenize.STRING:
            field = ""  # the next string is of something else
        if field and line[-1].type == tokenize.COMMENT:
            found[field] = line[-1].string.lstrip("# ")
        elif field and line[0].type == tokenize.STRING:
            found[field] = line[0].string.strip('"')
    return found


def _token_lines(source: str) -> list[list[tokenize.TokenInfo]]:
    """The tokens of each line with code, without those that only say where lines and blocks end."""
    skipped = (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: dict[int, list[tokenize.TokenInfo]] = {}
    for token in tokenize.generate_tokens(io.StringIO(inspect.cleandoc(source)).readline):
        if token.type not in skipped:
            lines.setdefault(token.start[0], []).append(token)
    return list(lines.values())


def check_numbers(config: Any, *, positive: Sequence[str]) -> None:
    """Refuse numbers that are negative or not finite, and 0 in the fields that must be `positive`.

    Of several numbers in one field each may be negative. Raises InputError.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        flag = f"{flag_of(field.name)} {value}"
        for number in value if isinstance(value, tuple) else (value,):
            is_number = isinstance(number, int | float)
            refuse(is_number and not abs(number) <= MAX_NUMBER, f"{flag}: must be finite and below 2**63")
        if isinstance(value, int | float):
            refuse(value < 0, f"{flag}: must not be negative")
            refuse(field.name in positive and value == 0, f"{flag}: must be greater than 0")


def check_texts(config: Any) -> None:
    """Refuse empty texts, also one of several, where the default is not empty. Raises InputError."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        texts = value if isinstance(value, tuple) else (value,)
        is_empty = any(isinstance(text, str) and not text.strip() for text in texts)
        refuse(is_empty and value != field.default, f"{flag_of(field.name)}: is empty; leave it out")


def check_needed(
    config: Any, *, needs: Mapping[str, str | tuple[object, str]], preset: Mapping[str, Any] | None = None
) -> None:
    """Refuse flags that have no effect. Raises InputError naming the flag and what it needs.

    needs[field]: the field that must be on, or whether the flag has an effect and the words for what it needs. A value
    that is the default's, or that of the `preset`, was not given and is not refused.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name not in needs or value in (field.default, (preset or {}).get(field.name, field.default)):
            continue
        needed = needs[field.name]
        if isinstance(needed, str):
            needed = (getattr(config, needed) not in (0, "none", None), flag_of(needed))
        has_effect, what = needed
        refuse(not has_effect, f"{flag_of(field.name)} {value}: has no effect without {what}")


def flag_of(name: str) -> str:
    """The flag of a field."""
    return f"--{name.replace('_', '-')}"
