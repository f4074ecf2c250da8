"""How processes start, fail and end; on a tiny model, which proves as much and takes no time."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest

from launcher.preflight import claim_addresses
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from pagoda.v1.sampling_pb2 import SamplingParams
from tests.e2e.client import Answer, spec, status
from tests.e2e.stack import PROCESSES, ROOT, Stack, launched, until

pytestmark = pytest.mark.e2e

LONG = 1200


@pytest.fixture
def tiny(tiny_model_folder: Path) -> Iterator[Stack]:
    with launched(f"--model={tiny_model_folder}", "--shutdown-grace=20") as stack:
        stack.wait_ready()
        yield stack


def ended(processes: list[psutil.Process]) -> bool:
    return not any(process.is_running() and process.status() != "zombie" for process in processes)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_outlives_the_launcher(tiny: Stack, how: signal.Signals) -> None:
    children = list(tiny.children().values())
    assert len(children) == 3

    tiny.process.send_signal(how)

    assert tiny.process.wait(30) == (-9 if how is signal.SIGKILL else 0)
    until(lambda: ended(children))


def test_ctrl_c_during_the_start_leaves_nothing(tiny_model_folder: Path) -> None:
    with launched(f"--model={tiny_model_folder}") as stack:
        stack.wait_line("shard: ")
        children = list(stack.children().values())

        stack.process.send_signal(signal.SIGINT)

        assert stack.process.wait(30) == 0
        until(lambda: ended(children))


def test_the_whole_terminal_group_may_get_the_signal(tiny: Stack) -> None:
    """As a container's stop does: every process at once, and still nothing is lost."""
    with tiny.channel() as channel:
        answer = Answer(tiny.stub(channel), spec(max_tokens=400, ignore_eos=True)).read(10)
        children = tiny.children()
        for child in children.values():
            child.send_signal(signal.SIGTERM)
        tiny.process.send_signal(signal.SIGTERM)

        assert len(answer.finish().token_ids) == 400
    assert tiny.process.wait(30) == 0
    until(lambda: ended(list(children.values())))


def test_sigterm_lets_running_requests_end_and_refuses_new_ones(tiny: Stack) -> None:
    with tiny.channel() as channel, tiny.channel() as other:
        answer = Answer(tiny.stub(channel), spec(max_tokens=LONG, ignore_eos=True)).read(10)
        probe = tiny.stub(other)
        probe.GetModel(pb.GetModelRequest())

        tiny.process.send_signal(signal.SIGTERM)
        tiny.wait_line("Stopping")

        until(lambda: refused(probe))
        assert len(answer.finish().token_ids) == LONG
    assert tiny.process.wait(30) == 0


def test_a_closed_terminal_lets_running_requests_end(tiny_model_folder: Path) -> None:
    addresses = claim_addresses(dict.fromkeys(("listen", *PROCESSES), "127.0.0.1:0"))
    flags = [f"--{one}-metrics-address={addresses[one]}" for one in PROCESSES]
    flags.append("--http-address=127.0.0.1:0")
    terminal, theirs = os.openpty()
    command = [sys.executable, "-m", "launcher", "serve", f"--model={tiny_model_folder}", *flags]
    launcher = subprocess.Popen(
        [*command, f"--listen-address={addresses['listen']}"],
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        # The first terminal that a session's leader opens is the one whose end it is told of.
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),
    )
    os.close(theirs)
    shown = b""
    while b"Ctrl-C stops it" not in shown:
        shown += os.read(terminal, 4096)
    children = psutil.Process(launcher.pid).children()
    with grpc.insecure_channel(addresses["listen"]) as channel:
        answer = Answer(InferenceServiceStub(channel), spec(max_tokens=LONG, ignore_eos=True)).read(10)

        os.close(terminal)

        assert len(answer.finish().token_ids) == LONG
    assert launcher.wait(30) == 0
    until(lambda: ended(children))


def refused(stub: InferenceServiceStub) -> bool:
    request = pb.GenerateRequest(spec=spec(max_tokens=1))
    try:
        stub.Generate(request, timeout=5)
    except grpc.RpcError as error:
        return error.code() is grpc.StatusCode.UNAVAILABLE
    return False


@pytest.mark.parametrize("victim", ["shard", "scheduler"])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_killed_process_is_a_pause_without_a_lost_or_changed_token(
    tiny: Stack, victim: str, temperature: float
) -> None:
    with tiny.channel() as channel:
        stub = tiny.stub(channel)
        request = spec(max_tokens=LONG, temperature=temperature, seed=5, ignore_eos=True)
        undisturbed = Answer(stub, request).finish()
        answers = [Answer(stub, request).read(20) for _ in range(3)]

        tiny.children()[victim].kill()

        for answer in answers:
            assert answer.finish().token_ids == undisturbed.token_ids
            assert answer.text == undisturbed.text
            assert answer.usage.completion_tokens == LONG
    assert tiny.wait_line(rf"{victim} ended \(killed by SIGKILL\); restart 1 of 5")
    until(lambda: tiny.used_blocks() == 0)


def test_a_killed_router_is_unavailable_and_its_clients_resume(tiny: Stack) -> None:
    with tiny.channel() as channel:
        stub = tiny.stub(channel)
        request = spec(max_tokens=LONG, temperature=1, seed=5, ignore_eos=True)
        undisturbed = Answer(stub, request).finish()
        answer = Answer(stub, request).read(20)

        tiny.children()["router"].kill()
        assert status(answer.finish)[0] is grpc.StatusCode.UNAVAILABLE

        tiny.wait_line("router ended")
        request.prior_outputs.add(index=0, token_ids=answer.token_ids)
        until(lambda: tiny.children().get("router") is not None)
        rest = resume(tiny, request)
        assert answer.token_ids + rest.token_ids == undisturbed.token_ids
        assert answer.text + rest.text == undisturbed.text
    until(lambda: tiny.used_blocks() == 0)


def resume(stack: Stack, request: pb.GenerateSpec) -> Answer:
    """Tries until the router is back, as a client would."""
    answers: list[Answer] = []

    def tried() -> bool:
        with stack.channel() as channel:
            try:
                answers.append(Answer(stack.stub(channel), request).finish())
            except grpc.RpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE  # noqa: PT017
                return False
        return True

    until(tried)
    return answers[0]


@pytest.mark.parametrize("flag", ["listen-address", "http-address"])
def test_a_port_in_use_is_named(tiny_model_folder: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with launched(f"--model={tiny_model_folder}", f"--{flag}={address}") as stack:
            stack.wait_line(f"--{flag} {address}: the port is in use")
            assert stack.process.wait(30) == 2


def test_options_reach_the_processes(tiny_model_folder: Path) -> None:
    flags = (
        "--num-gpu-blocks-override=12",
        "--block-size=8",
        "--max-model-len=64",
        "--served-model-name=tiny",
        "--max-num-seqs=2",
        "--max-num-batched-tokens=32",
    )
    with launched(f"--model={tiny_model_folder}", *flags) as stack:
        stack.wait_ready()
        with stack.channel() as channel:
            model = stack.stub(channel).GetModel(pb.GetModelRequest())
        assert (model.name, model.max_model_len, model.dtype) == ("tiny", 64, "float32")
        assert stack.metric("scheduler", "pagoda_kv_blocks", tier="device") == 12


def test_a_small_pool_serves_many_by_preemption(tiny_model_folder: Path) -> None:
    with launched(
        f"--model={tiny_model_folder}", "--num-gpu-blocks-override=20", "--max-waiting-requests=50"
    ) as stack:
        stack.wait_ready()
        with stack.channel() as channel:
            stub = stack.stub(channel)
            request = spec(max_tokens=150, ignore_eos=True)
            alone = Answer(stub, request).finish().token_ids
            answers = [Answer(stub, request) for _ in range(20)]
            threads = [answer.finish_in_background() for answer in answers]
            for thread in threads:
                thread.join()
        assert all(answer.token_ids == alone for answer in answers)
        assert stack.metric("scheduler", "pagoda_scheduler_preemptions_total", mode="recompute") > 0
        assert stack.used_blocks() == 0


def test_requests_of_several_outputs_are_swapped_and_go_on(tiny_model_folder: Path) -> None:
    flags = ("--num-gpu-blocks-override=40", "--swap-space=0.05", "--no-enable-prefix-caching")
    with launched(f"--model={tiny_model_folder}", *flags) as stack:
        stack.wait_ready()
        with stack.channel() as channel:
            stub = stack.stub(channel)
            request = spec(max_tokens=120, temperature=1, seed=2, ignore_eos=True)
            request.n = 3
            call = pb.GenerateRequest(spec=request)
            alone = stub.Generate(call, timeout=60).outputs
            together = [stub.Generate.future(call, timeout=120) for _ in range(6)]
            for one in together:
                assert one.result().outputs == alone
        assert stack.metric("scheduler", "pagoda_kv_blocks_swapped_total", direction="in") > 0
        assert stack.metric("scheduler", "pagoda_kv_block_copies_total") > 0
        assert stack.used_blocks() == 0


def test_overload_refuses_and_harms_nobody(tiny_model_folder: Path) -> None:
    with launched(
        f"--model={tiny_model_folder}",
        "--max-waiting-requests=3",
        "--max-num-seqs=1",
        "--max-num-batched-tokens=32",
    ) as stack:
        stack.wait_ready()
        with stack.channel() as channel:
            stub = stack.stub(channel)
            request = spec(max_tokens=300, ignore_eos=True)
            running = Answer(stub, request).read(1)
            waiting = [Answer(stub, request) for _ in range(3)]
            until(lambda: stack.metric("scheduler", "pagoda_scheduler_waiting_sequences") == 3)

            code, message = status(Answer(stub, request).finish)

            assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "the limit is 3" in message
            for answer in (running, *waiting):
                assert len(answer.finish().token_ids) == 300


def test_sampling_parameters_travel_to_the_shard(tiny: Stack) -> None:
    with tiny.channel() as channel:
        request = spec(max_tokens=60, temperature=1, seed=3, ignore_eos=True)
        stub = tiny.stub(channel)
        free = Answer(stub, request).finish().token_ids
        request.sampling.MergeFrom(SamplingParams(top_k=1))
        narrow = Answer(stub, request).finish().token_ids
        greedy = Answer(stub, spec(max_tokens=60, ignore_eos=True)).finish().token_ids
    assert free != greedy
    assert narrow == greedy


def test_a_second_ctrl_c_ends_at_once(tiny: Stack) -> None:
    with tiny.channel() as channel:
        answer = Answer(tiny.stub(channel), spec(max_tokens=2000, ignore_eos=True)).read(1)
        os.kill(tiny.process.pid, signal.SIGINT)
        tiny.wait_line("Stopping")
        os.kill(tiny.process.pid, signal.SIGINT)
        assert tiny.process.wait(10) == 0
        assert status(answer.finish)[0] is grpc.StatusCode.UNAVAILABLE
