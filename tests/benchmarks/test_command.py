"""Flags and ends of the benchmarks: one line for what can't be."""

import json
import os
import signal
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import document, gpu, http, kernels, latency, serving, startup, throughput
from benchmarks.command import Parser, execute
from benchmarks.results import Results

Capture = pytest.CaptureFixture[str]

TINY = ["--quick", "--rounds=1", "--model-shape=tiny", "--dtype=float32"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_benchmark_in_one_line_and_leaves_no_file(
    number: signal.Signals, tmp_path: Path, capsys: Capture
) -> None:
    parser = Parser("example", "An example.")
    parser.add_argument("--device", default="cuda")
    before = signal.getsignal(number)

    def body(options: Namespace, results: Results) -> None:
        assert list(tmp_path.glob("*.partial"))
        os.kill(os.getpid(), number)

    with pytest.raises(SystemExit, match="130"):
        execute(parser, [f"--output={tmp_path}"], body)

    assert capsys.readouterr().err == "python -m benchmarks.example: stopped\n"
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("where", ["file", "file/folder"])
def test_a_folder_that_can_not_be_written_gives_one_line(where: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(SystemExit, match="1"):
        throughput.main([*TINY, f"--output={tmp_path}/{where}"])

    error = capsys.readouterr().err
    assert error.startswith(f"python -m benchmarks.throughput: --output {tmp_path}/{where}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("built", [None, "avx2"])
def test_results_say_which_cpu_kernels_ran(
    built: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("kernels.cpu_kernels", lambda: built)
    parser = Parser("example", "An example.")
    parser.add_argument("--device", default="cpu")

    execute(parser, [f"--output={tmp_path}"], lambda options, results: None)

    [kept] = tmp_path.iterdir()
    assert json.loads(kept.read_text())["cpu_kernels"] == built
    assert ("no CPU kernels are built" in capsys.readouterr().err) == (built is None)


def test_sizes_that_are_given_win_over_quick() -> None:
    parser = serving.parse()

    full, quick, given = (
        parser.parse_args(flags) for flags in ([], ["--quick"], ["--quick", "--requests=3", "--rates", "7"])
    )

    assert (full.requests, full.rates) == (96, [1.0, 2.0, 3.0])
    assert (quick.requests, quick.rates, quick.long_prompt) == (8, [20.0], 400)
    assert (given.requests, given.rates, given.long_prompt) == (3, [7.0], 400)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_one_line(capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="1"):
        gpu.main([])

    printed = capsys.readouterr()
    assert printed.err == "python -m benchmarks.gpu: no NVIDIA GPU is to be had: this torch sees none\n"
    assert not printed.out


@pytest.mark.parametrize("module", [gpu, http, kernels, latency, serving, startup, throughput])
@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--rounds", "0"], 2, "argument --rounds: must be at least 1, not 0"),
        (["--no-such"], 2, "unrecognized arguments: --no-such"),
        (["--device", "tpu"], 2, "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_flags_give_one_line(
    module: Any, flags: list[str], status: int, message: str, capsys: Capture
) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main(flags)

    printed = capsys.readouterr()
    assert ended.value.code == status
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("module", [http, kernels, latency, serving, startup, throughput])
def test_one_model_is_measured(module: Any, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        module.main(["--model=somewhere", "--model-shape=tiny"])

    assert "--model-shape: not allowed with argument --model" in capsys.readouterr().err


@pytest.mark.parametrize("module", [http, latency, serving, startup, throughput])
def test_flags_of_the_server_are_words(module: Any, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="2"):
        module.main(['--serve-flags=--foo "'])

    printed = capsys.readouterr().err
    assert 'argument --serve-flags: --foo ": No closing quotation' in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "status", "said"), [(["--help"], 0, "usage"), (["--bogus"], 2, "unrecognized")]
)
def test_flags_of_the_page_write_nothing(
    flags: list[str], status: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(document, "generated", None)

    with pytest.raises(SystemExit) as ended:
        document.main(flags)

    assert ended.value.code == status
    printed = capsys.readouterr()
    assert said in printed.out + printed.err


def test_plots_without_matplotlib_give_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(SystemExit, match="1"):
        document.main([])

    assert capsys.readouterr().err.startswith("python -m benchmarks.document: plots need matplotlib")


@pytest.mark.parametrize("module", [http, kernels, latency, serving, startup, throughput])
def test_a_model_that_is_not_there_gives_one_line(module: Any, tmp_path: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit, match="1"):
        module.main([f"--model={tmp_path}/none"])

    assert capsys.readouterr().err.endswith("none: no such folder or file\n")
