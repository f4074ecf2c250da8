"""A setting comes from flag, environment, YAML or default, in this order, and passes one check."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from common.config import config_path, load, option


@dataclass(frozen=True)
class Example:
    """An example process."""

    name: str = option("Its name", default="none")
    size: int = option("Its size", default=4, unit="tokens", minimum=1, maximum=8)
    share: float = option("Its share", default=0.5, minimum=0)
    limit: int | None = option("Its limit", default=None, minimum=1)
    mode: str = option("Its mode", default="auto", choices=("auto", "cpu"))
    peers: tuple[str, ...] = option("Its peers", default=())
    capacity: int | None = option("Its capacity", default=None, unit="bytes", minimum=1, maximum=2**46)
    quick: bool = option("Whether it is quick", default=False)


@dataclass(frozen=True)
class Demanding:
    """A process with a required option."""

    model: str = option("Model folder")


def read(*flags: str, **environ: str) -> Example:
    return load(Example, "example", flags, environ)


@pytest.fixture
def yaml_file(tmp_path: Path) -> Path:
    path = tmp_path / "pagoda.yaml"
    path.write_text("example:\n  size: 2\n  peers: [a, b]\n  quick: true\nrouter:\n  unknown: 1\n")
    return path


def test_the_default_is_last(yaml_file: Path) -> None:
    flag, variable, file = ("--size", "8"), {"PAGODA_EXAMPLE_SIZE": "7"}, ("--config", str(yaml_file))

    assert read(*flag, *file, **variable).size == 8
    assert read(*file, **variable).size == 7
    assert read(*file).size == 2
    assert read().size == 4


def test_the_file_can_be_named_in_the_environment(yaml_file: Path) -> None:
    environ = {"PAGODA_EXAMPLE_CONFIG": str(yaml_file)}

    assert read(**environ).peers == ("a", "b")
    assert config_path("example", ["--size", "3"], environ) == str(yaml_file)
    assert config_path("example", ["--config", "other.yaml"], environ) == "other.yaml"
    assert config_path("example", [], {}) is None


def test_types_are_converted() -> None:
    config = read("--peers", "a, b,", "--quick", "--share", "1e-3", "--limit", "9", "--mode", "cpu")

    assert config == Example(peers=("a", "b"), quick=True, share=0.001, limit=9, mode="cpu")
    assert read("--no-quick", PAGODA_EXAMPLE_QUICK="yes") == Example()
    assert read(PAGODA_EXAMPLE_QUICK="on").quick


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--size", "9"], "--size: 9 must be at most 8 tokens"),
        (["--size", "0"], "--size: 0 must be at least 1 token"),
        (["--size", "4.5"], "--size: '4.5' is not a whole number"),
        (["--capacity", str(2**46 + 1)], "--capacity: 70368744177665 must be at most 70368744177664 bytes"),
        (["--share", "much"], "--share: 'much' is not a number"),
        (["--share", "nan"], "--share: nan must be at least 0"),
        (["--mode", "gpu"], "--mode: 'gpu' is not one of auto, cpu"),
        (["--siz", "3"], "unrecognized arguments: --siz 3"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml: No such file or directory"),
    ],
)
def test_a_wrong_flag_ends_the_process_with_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        read(*flags)

    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("example: {colour: red}", "unknown option 'colour' in 'example'"),
        ("example: {size: large}", "'size' in the YAML section 'example': 'large' is not a whole number"),
        ("example: {quick: 7}", "'quick' in the YAML section 'example': 7 is not true or false"),
        ("example: [size]", "'example' must be a mapping"),
        ("- example", "'example' must be a mapping"),
        ("example: {", "not YAML"),
        ("[]", "'example' must be a mapping"),
        ("0", "'example' must be a mapping"),
        ("exmaple: {size: 2}", "unknown section 'exmaple'; there are launcher, chat, router"),
        (
            "example: {size: 2}\nexample: {quick: true}",
            "'example' stands there twice, the second time on line 2",
        ),
        ("example:\n  size: 2\n  size: 3", "'size' stands there twice, the second time on line 3"),
        ("example: {my-size: 2, my_size: 3}", "'my_size' stands there twice"),
        ("example: {my_size: 2, my-size: 3}", "'my-size' stands there twice"),
        ("example: {[size]: 2}", "not YAML"),
        ("example: [\n", "while parsing a flow node expected the node content"),
        ("router: {size: 2, size: 3}", "'size' stands there twice"),
    ],
)
def test_a_wrong_file_is_named(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(text)

    with pytest.raises(SystemExit):
        read("--config", str(path))

    assert message in capsys.readouterr().err


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.touch()

    assert read("--config", str(path)) == Example()


def test_a_wrong_variable_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(PAGODA_EXAMPLE_SIZE="99")

    assert "PAGODA_EXAMPLE_SIZE: 99 must be at most 8 tokens" in capsys.readouterr().err


def test_an_unknown_variable_is_named_and_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    strange = {"PAGODA_EXAMPLE_SISE": "2", "PAGODA_EXAMPLE_PORT": "tcp://10.0.0.1:1"}

    assert read(PAGODA_EXAMPLE_SIZE="3", PAGODA_OTHER_SIZE="4", **strange) == Example(size=3)

    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("so they do nothing: PAGODA_EXAMPLE_PORT, PAGODA_EXAMPLE_SISE")


def test_a_required_option_says_how_to_give_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(Demanding, "example", [], {}, prog="python -m launcher example")

    expected = "python -m launcher example: --model (or PAGODA_EXAMPLE_MODEL) is required: Model folder\n"
    assert capsys.readouterr().err == expected


def test_help_tells_default_unit_and_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read("--help")

    text = " ".join(capsys.readouterr().out.split())
    assert "Its size. Unit: tokens. From 1 to 8. Default: 4." in text
    assert "Its capacity. Unit: bytes. From 1 to 70368744177664." in text
    assert "Its share. At least 0. Default: 0.5." in text
    assert "Each option also as PAGODA_EXAMPLE_<NAME>" in text
