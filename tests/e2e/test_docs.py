"""What README.md and docs/ tell a reader to run, run as they say, on free ports."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from launcher.preflight import claim_addresses
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from tests.docs.generate import METRICS, metric_table
from tests.docs.pages import ROOT, blocks, prose
from tests.e2e.client import Answer, spec
from tests.e2e.stack import PROCESSES, Stack, launched, until

pytestmark = pytest.mark.e2e

ADDRESS = "127.0.0.1:50051"
URL = "http://127.0.0.1:8000/v1"


def against(stack: Stack, text: str) -> str:
    """A program or command of a page, with other addresses."""
    assert ADDRESS in text or URL in text
    return text.replace(ADDRESS, stack.address).replace(URL, stack.url)


@pytest.mark.parametrize("page", ["README.md", "docs/clients.md", "docs/openai.md"])
def test_the_python_of_a_page_runs(stack: Stack, page: str) -> None:
    """Its blocks are one program."""
    command = [sys.executable, "-c", against(stack, "\n".join(blocks(page, "python")))]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    assert result.returncode == 0, result.stderr
    assert len(result.stdout.split()) > 10


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
@pytest.mark.parametrize("page", ["README.md", "docs/openai.md"])
def test_curl_is_given_what_it_takes(stack: Stack, page: str) -> None:
    (command,) = [block for block in blocks(page, "sh") if block.startswith("curl")]
    done = subprocess.run(
        ["bash", "-ec", against(stack, command)], capture_output=True, text=True, timeout=60, check=True
    )

    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_prefix_cache_is_flushed_under_the_launcher(tiny_model_folder: Path) -> None:
    (flush,) = blocks("docs/memory.md", "python")
    # Of its own, or the servers of whoever runs this would be flushed, too; and short, as a socket's path is.
    with tempfile.TemporaryDirectory() as folder:
        environ = {"TMPDIR": folder}
        with (
            launched(f"--model={tiny_model_folder}", **environ) as stack,
            grpc.insecure_channel(ready(stack)) as channel,
        ):
            # 40 of its tokens were computed and fill two blocks.
            Answer(stack.stub(channel), spec("a", max_tokens=40, ignore_eos=True)).finish()
            until(lambda: stack.used_blocks() == 0)

            result = subprocess.run(
                [sys.executable, "-c", flush],
                cwd=ROOT,
                env={**os.environ, **environ},
                capture_output=True,
                text=True,
                timeout=60,
            )

            assert result.stdout.endswith("/scheduler 2 blocks freed\n"), result.stderr
            assert stack.metric("scheduler", "pagoda_kv_blocks", tier="device", state="cached") == 0


class LosesItsRouter:
    """A stub whose first stream breaks off after a few tokens, as when a router dies."""

    def __init__(self, stub: InferenceServiceStub) -> None:
        self._stub = stub
        self.calls = 0

    def GenerateStream(self, *args: Any, **kwargs: Any) -> Iterator[pb.GenerateStreamResponse]:  # noqa: N802
        self.calls += 1
        for count, response in enumerate(self._stub.GenerateStream(*args, **kwargs)):
            if self.calls == 1 and count == 8:
                raise Unavailable
            yield response


def ready(stack: Stack) -> str:
    stack.wait_ready()
    return stack.address


class Unavailable(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE


def test_the_resuming_client_loses_nothing(tiny_model_folder: Path) -> None:
    """In float32, where tokens that are computed again are the same to the last bit that matters."""
    namespace: dict[str, Any] = {"grpc": grpc, "pb": pb, "InferenceServiceStub": InferenceServiceStub}
    (block,) = [block for block in blocks("docs/clients.md", "python") if "def resilient" in block]
    definition, _, _ = block.partition("\n\n\nprint(")
    exec(definition, namespace)  # noqa: S102
    with launched(f"--model={tiny_model_folder}") as stack, grpc.insecure_channel(ready(stack)) as channel:
        request = spec("Once upon a time", max_tokens=30, temperature=1, seed=4, ignore_eos=True)
        undisturbed = Answer(stack.stub(channel), request).finish()
        flaky = LosesItsRouter(stack.stub(channel))

        pieces = list(namespace["resilient"](flaky, request))

    assert flaky.calls == 2
    assert "".join(pieces) == undisturbed.text


def with_this_python(script: str) -> str:
    return script.replace(".venv/bin/python", shlex.quote(sys.executable))


def test_the_stubs_can_be_generated_elsewhere(tmp_path: Path) -> None:
    script = blocks("docs/clients.md", "sh")[0].replace("build/client", str(tmp_path))
    subprocess.run(["bash", "-ec", with_this_python(script)], cwd=ROOT, check=True, timeout=60)

    assert (tmp_path / "pagoda/v1/inference_pb2_grpc.py").exists()


def test_the_sizes_are_those_of_the_embedded_model(stack: Stack) -> None:
    per_token, per_block = (
        int(number.replace(",", ""))
        for number in re.findall(r"([\d,]+) bytes", prose("docs/operations.md").partition("## Sizing")[2])[:2]
    )
    blocks_in_all = stack.metric("scheduler", "pagoda_kv_blocks")

    assert per_block == 16 * per_token
    assert stack.metric("shard", "pagoda_shard_kv_cache_bytes") == blocks_in_all * per_block


@pytest.mark.parametrize("process", PROCESSES)
def test_every_metric_that_is_served_has_its_row(stack: Stack, process: str) -> None:
    served = re.findall(r"^# TYPE (pagoda_\S+) ", stack.get(process, "/metrics"), re.MULTILINE)
    tables = [metric_table(METRICS[name]) for name in ("every process", process)]
    rows = re.findall(r"^\| `(pagoda_\w+)` \|", "\n".join(tables), re.MULTILINE)

    assert sorted(served) == sorted(rows)


def test_the_three_processes_run_by_hand(tiny_model_folder: Path) -> None:
    (script,) = [block for block in blocks("docs/operations.md", "sh") if "-m router" in block]
    addresses = claim_addresses(dict.fromkeys(re.findall(r"127\.0\.0\.1:\d+", script), "127.0.0.1:0"))
    for documented, address in addresses.items():
        script = script.replace(documented, address)
    environ = {**os.environ, "MODEL": str(tiny_model_folder)}
    processes = [
        subprocess.Popen(["bash", "-c", f"exec {line}"], cwd=ROOT, env=environ)
        for line in with_this_python(script).splitlines()
    ]
    try:
        with grpc.insecure_channel(addresses[ADDRESS]) as channel:
            stub = InferenceServiceStub(channel)
            until(lambda: answers(stub), 60)
    finally:
        # As the launcher does: whoever asks, before whom it asks.
        for process in reversed(processes):
            process.terminate()
            process.wait(30)
    assert [process.returncode for process in processes] == [0, 0, 0]


def answers(stub: InferenceServiceStub) -> bool:
    try:
        response = stub.Generate(pb.GenerateRequest(spec=spec(max_tokens=4, ignore_eos=True)), timeout=30)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017
        return False
    return len(response.outputs[0].token_ids) == 4
