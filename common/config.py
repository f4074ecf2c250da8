"""One dataclass per process holds its configuration; this reads it.

Order: flag, then environment (`PAGODA_<SERVICE>_<FIELD>`), then the service's section of one YAML file
(`--config`), then the default. Every value passes the same check, and an error names where it came from.
"""

import argparse
import dataclasses
import os
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import yaml

T = TypeVar("T")

# Of the one YAML file that all processes share.
SECTIONS: Final = ("launcher", "chat", "router", "scheduler", "shard", "ranks")


class ConfigError(ValueError):
    """A setting from outside is wrong; the message says where it came from and what is allowed."""


@dataclass(frozen=True)
class Bounds:
    """What `--help` says of an option beyond its default, and what its value is checked against."""

    help: str
    unit: str = ""
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()

    def describe(self) -> str:
        parts = [self.help.rstrip(".") + "."]
        if self.unit:
            parts.append(f"Unit: {self.unit}.")
        if self.minimum is not None and self.maximum is not None:
            parts.append(f"From {_number(self.minimum)} to {_number(self.maximum)}.")
        elif self.minimum is not None:
            parts.append(f"At least {_number(self.minimum)}.")
        return " ".join(parts).replace("%", "%%")


def _number(value: float | None) -> str:
    """A limit, exactly, and without a fraction of zero."""
    return str(value).removesuffix(".0")


def option(
    help: str,  # noqa: A002
    *,
    default: Any = dataclasses.MISSING,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A dataclass field that is also a flag, an environment variable and a YAML key."""
    bounds = Bounds(help, unit, minimum, maximum, choices)
    return dataclasses.field(default=default, metadata={"bounds": bounds})


def load(
    cls: type[T],
    service: str,
    argv: Sequence[str] | None = None,
    environ: Mapping[str, str] = os.environ,
    prog: str | None = None,
) -> T:
    """Reads `cls` for `service`; on a wrong setting prints one line and exits with status 2."""
    parser = _parser(cls, service, prog or f"python -m {service}")
    if strange := _unknown_variables(cls, service, environ):
        print(f"{parser.prog}: no option has these variables, so they do nothing: {strange}", file=sys.stderr)
    flags = vars(parser.parse_args(argv))
    flags.pop("config", None)
    config_file = config_path(service, argv, environ)
    try:
        section = _yaml_section(Path(config_file), service, cls) if config_file else {}
        return cls(**_merge(cls, service, flags, environ, section))
    except ConfigError as error:
        _exit(parser, str(error))


def config_path(
    service: str, argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """The YAML file that `load` reads for `service`, if one is named."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=environ.get(f"PAGODA_{service.upper()}_CONFIG"))
    path: str | None = parser.parse_known_args(argv)[0].config
    return path or None


def _unknown_variables(cls: type[Any], service: str, environ: Mapping[str, str]) -> str:
    """Those that look like options of `service` and aren't.

    They are no error: for a Service named `pagoda-shard`, Kubernetes sets `PAGODA_SHARD_PORT` and its like.
    """
    prefix = f"PAGODA_{service.upper()}_"
    known = {prefix + name.upper() for name in ("config", *(field.name for field in dataclasses.fields(cls)))}
    return ", ".join(sorted(name for name in environ if name.startswith(prefix) and name not in known))


def _exit(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    parser.exit(2, f"{parser.prog}: {message}\n")


def _parser(cls: type[Any], service: str, prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description=(cls.__doc__ or "").strip().splitlines()[0],
        epilog=f"Each option also as PAGODA_{service.upper()}_<NAME> and in the YAML section '{service}'.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with one section per process.")
    for field in dataclasses.fields(cls):
        bounds: Bounds = field.metadata["bounds"]
        required = field.default is dataclasses.MISSING
        default = "Required." if required else _default(field.default)
        text = f"{bounds.describe()} {default}"
        flag = "--" + field.name.replace("_", "-")
        if _scalar_type(cls, field.name) is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
        else:
            metavar = "{" + ",".join(bounds.choices) + "}" if bounds.choices else field.name.upper()
            parser.add_argument(flag, metavar=metavar, help=text)
    return parser


def _default(value: object) -> str:
    """Nothing for None: the option's own text says what its absence means."""
    if value is None:
        return ""
    return f"Default: {','.join(map(str, value)) if isinstance(value, tuple) else value}."


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one mapping, where the safe loader silently takes the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            name = key.value.replace("-", "_")
            if name in seen:
                line = key.start_mark.line + 1
                raise ConfigError(f"'{key.value}' stands there twice, the second time on line {line}")
            seen.add(name)
        return super().construct_mapping(node, deep)


def _yaml_section(path: Path, service: str, cls: type[Any]) -> dict[str, Any]:
    try:
        document = yaml.load(path.read_text(), StrictLoader)  # noqa: S506
    except ConfigError as error:
        raise ConfigError(f"--config {path}: {error}") from error
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # On one line, as all that ends a process.
        raise ConfigError(f"--config {path}: not YAML: {' '.join(str(error).split())}") from error
    sections = {} if document is None else document
    if isinstance(sections, dict) and (
        strange := [key for key in sections if key not in (*SECTIONS, service)]
    ):
        raise ConfigError(f"--config {path}: unknown section '{strange[0]}'; there are {', '.join(SECTIONS)}")
    section = sections.get(service, {}) if isinstance(sections, dict) else None
    if not isinstance(section, dict):
        raise ConfigError(f"--config {path}: '{service}' must be a mapping of option names to values")
    names = {field.name for field in dataclasses.fields(cls)}
    values = {str(key).replace("-", "_"): value for key, value in section.items()}
    if unknown := sorted(values.keys() - names):
        raise ConfigError(f"--config {path}: unknown option '{unknown[0]}' in '{service}'")
    return values


def _merge(
    cls: type[Any],
    service: str,
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    section: Mapping[str, Any],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        flag = "--" + field.name.replace("_", "-")
        variable = f"PAGODA_{service.upper()}_{field.name.upper()}"
        if field.name in flags:
            source, raw = flag, flags[field.name]
        elif variable in environ:
            source, raw = variable, environ[variable]
        elif field.name in section:
            source, raw = f"'{field.name}' in the YAML section '{service}'", section[field.name]
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{flag} (or {variable}) is required: {field.metadata['bounds'].help}")
        else:
            continue
        values[field.name] = _convert(cls, field.name, raw, source, field.metadata["bounds"])
    return values


def _scalar_type(cls: type[Any], name: str) -> Any:
    hint = typing.get_type_hints(cls)[name]
    if isinstance(hint, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def _convert(cls: type[Any], name: str, raw: Any, source: str, bounds: Bounds) -> Any:
    kind = _scalar_type(cls, name)
    if raw is None and type(None) in typing.get_args(typing.get_type_hints(cls)[name]):
        return None
    if typing.get_origin(kind) is tuple:
        items = raw if isinstance(raw, list) else str(raw).split(",")
        return tuple(str(item).strip() for item in items if str(item).strip())
    value = _scalar(kind, raw, source)
    if bounds.choices and value not in bounds.choices:
        raise ConfigError(f"{source}: {raw!r} is not one of {', '.join(bounds.choices)}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        too_low = bounds.minimum is not None and not value >= bounds.minimum
        too_high = bounds.maximum is not None and not value <= bounds.maximum
        if too_low or too_high:
            limit = bounds.minimum if too_low else bounds.maximum
            unit = bounds.unit.removesuffix("s") if limit == 1 else bounds.unit
            words = f"at {'least' if too_low else 'most'} {_number(limit)} {unit}"
            raise ConfigError(f"{source}: {raw} must be {words.rstrip()}")
    return value


def _scalar(kind: Any, raw: Any, source: str) -> Any:
    if kind is bool:
        if isinstance(raw, bool):
            return raw
        if str(raw).lower() in ("1", "true", "yes", "on"):
            return True
        if str(raw).lower() in ("0", "false", "no", "off"):
            return False
        raise ConfigError(f"{source}: {raw!r} is not true or false")
    if kind in (int, float):
        try:
            return kind(str(raw))
        except ValueError:
            noun = "a whole number" if kind is int else "a number"
            raise ConfigError(f"{source}: {raw!r} is not {noun}") from None
    return kind(str(raw))
