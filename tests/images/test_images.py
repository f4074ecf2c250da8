"""The images' steps, followed here in empty folders: what is copied and installed is enough, and no more."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helm.pods import Tree
from tests.helm.release import running
from tests.images.build import ROOT, build, context, instructions, shell

FILES = sorted((ROOT / "images").glob("*.Dockerfile"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_linter_finds_nothing(file: Path) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")

    result = subprocess.run([hadolint, "--no-color", file], capture_output=True, text=True)

    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_image_runs_as_the_user_of_the_chart(file: Path) -> None:
    users = [words for name, words in instructions(file) if name == "USER"]

    assert users == ["10001:10001"]


def test_builders_see_what_is_in_the_repository() -> None:
    assert all((ROOT / name).exists() for name in context())


def help_of(folder: Path, *module: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [folder / ".venv/bin/python", "-m", *module, "--help"],
        cwd=folder,
        env={"HOME": "/"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the router's image, with all that it installs."""
    return build(ROOT / "images/router.Dockerfile", tmp_path_factory.mktemp("router"), {}, shell)


@pytest.mark.parametrize("module", ["router", "scheduler", "common.download"])
def test_router_and_scheduler_start(router: Path, module: str) -> None:
    result = help_of(router, module)

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: python -m {module}")


def test_the_image_of_the_router_has_no_torch(router: Path) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('torch'))"

    found = subprocess.run([router / ".venv/bin/python", "-c", code], capture_output=True, text=True)

    assert found.stdout == "None\n"


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the shard's image, with the packages and kernels of this environment: torch is large."""

    def run(command: str, folder: Path) -> None:
        if command.startswith("python -m launcher.environment"):
            (folder / command.split()[3]).symlink_to(sys.prefix)
        elif "kernels/cpu/build.py" in command:
            (folder / "build").mkdir()
            (folder / "build" / "kernels").symlink_to(ROOT / "build" / "kernels")
            shell(command, folder)
        else:
            shell(command, folder)

    return build(ROOT / "images/shard.Dockerfile", tmp_path_factory.mktemp("shard"), {"DEVICE": "cpu"}, run)


@pytest.mark.parametrize("module", [("shard",), ("launcher", "ranks")])
def test_shards_start(shard: Path, module: tuple[str, ...]) -> None:
    result = help_of(shard, *module)

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: python -m {' '.join(module)}")


def test_the_image_of_the_shard_has_the_kernels(shard: Path) -> None:
    code = "import torch, kernels; print(kernels.cpu_kernels_missing(torch.device('cpu')))"

    found = subprocess.run(
        [shard / ".venv/bin/python", "-c", code], cwd=shard, capture_output=True, text=True
    )

    assert found.stdout == "False\n", found.stderr


@pytest.mark.e2e
def test_the_images_serve_as_the_chart_runs_them(
    router: Path, shard: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    trees = {
        name: Tree(folder, folder / ".venv/bin/python")
        for name, folder in (("router", router), ("scheduler", router), ("shard", shard))
    }

    with running(("values-cpu.yaml",), {}, tiny_model_folder, tmp_path, trees) as release:
        body = release.post("/v1/completions", {"prompt": "Once", "max_tokens": 4})

    assert body["choices"]
