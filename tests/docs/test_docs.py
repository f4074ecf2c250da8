"""The pages say what the code does: links, flags, targets, tables, limits, messages."""

import ast
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from google.protobuf import json_format

from common import config, sampling
from common.rpc import MAX_MESSAGE_BYTES, MIN_PING_INTERVAL_MS
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.sampling_pb2 import SamplingParams
from router import chat, validation
from router.config import RouterConfig
from router.openai import server, streaming
from router.openai.calls import MAX_BODY_BYTES
from router.openai.schemas import MAX_PROMPTS, ChatBody, CompletionBody
from scheduler.config import SchedulerConfig
from shard import model_config
from tests.docs.generate import CONFIGS, TABLES, flag, generated, tables_in
from tests.docs.pages import PAGES, ROOT, anchors, blocks, prose
from tests.k8s.promql import unknown_metrics

CODE = ("common", "kernels", "launcher", "router", "scheduler", "shard")
# Of pip's, npm's and protoc's programs, and of every one of ours.
OTHER_FLAGS = {"--config", "--help", "--id", "--prefix", "--python_out", "--grpc_python_out"}
# Of Docker, kind, kubectl and Helm.
OTHER_FLAGS |= {"--build-arg", "--file", "--filename", "--from-file"}
OTHER_FLAGS |= {"--set", "--tag", "--target", "--values", "--cert", "--key"}
OTHER_FLAGS |= {"--container", "--containers", "--dry-run", "--previous", "--replicas", "--selector"}
OTHER_FLAGS |= {"--sort-by", "--tail"}
# Of NVIDIA's program.
OTHER_FLAGS |= {"--format", "--query-gpu"}
# Of the SMG gateway.
OTHER_FLAGS |= {"--host", "--port", "--prometheus-host", "--worker-urls"}
# Of the benchmarks.
OTHER_FLAGS |= {
    "--minutes",
    "--only",
    "--output",
    "--peers",
    "--quantized-flags",
    "--quick",
    "--rounds",
    "--shapes",
}


def sources() -> Iterator[Path]:
    for folder in CODE:
        yield from (ROOT / folder).rglob("*.py")


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_resolve(page: str) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, fragment = target.partition("#")
        linked = (PAGES[page].parent / path).resolve() if path else PAGES[page]
        assert linked.exists(), target
        if fragment:
            assert fragment in anchors(linked.relative_to(ROOT).as_posix()), target


@pytest.mark.parametrize("page", PAGES)
def test_files_and_folders_that_are_named_exist(page: str) -> None:
    for name in re.findall(r"`([\w.-]+/[\w./-]*)`", prose(page)):
        if not name.startswith(("build/", "pagoda/")):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES)
def test_flags_exist(page: str) -> None:
    flags = {flag(field.name) for one in CONFIGS.values() for field in dataclasses.fields(one)}
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", PAGES[page].read_text()))

    assert mentioned <= flags | OTHER_FLAGS


@pytest.mark.parametrize("page", PAGES)
def test_variables_exist(page: str) -> None:
    variables = {f"PAGODA_{name.upper()}_CONFIG" for name in CONFIGS}
    for name, one in CONFIGS.items():
        variables |= {f"PAGODA_{name}_{field.name}".upper() for field in dataclasses.fields(one)}

    # Not what ends in an underscore: the beginning of a name.
    assert set(re.findall(r"\bPAGODA_[A-Z_]*[A-Z]\b", PAGES[page].read_text())) <= variables


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = "\n".join([*re.findall(r"`([^`\n]+)`", prose(page)), *blocks(page, "sh")])
    mentioned = re.findall(r"(?:^|\s)make(?: [A-Z]+=\S+)* ([a-z-]+)", text, re.MULTILINE)

    assert set(mentioned) <= targets


@pytest.mark.parametrize("page", TABLES)
def test_tables_are_those_that_the_code_gives(page: str) -> None:
    text = PAGES[page].read_text()

    assert tables_in(text) == list(TABLES[page])
    assert text == generated(page), "run `python -m tests.docs.generate`"


def test_every_folder_has_its_line() -> None:
    ignored = (ROOT / ".gitignore").read_text()
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    rows = set(re.findall(r"^\| \[(\w+)/\]", prose("README.md"), re.MULTILINE))

    assert rows == {name for name in folders if f"{name}/" not in ignored}


def test_supported_architectures_are_listed() -> None:
    listed = re.findall(r"^\| `(\w+ForCausalLM)` \|", prose("README.md"), re.MULTILINE)

    assert listed == list(model_config._DEFAULTS)
    assert all(f"`{name}`" in prose("README.md") for name in model_config.ROPE_TYPES)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_example_file_is_read(name: str, tmp_path: Path) -> None:
    (example,) = blocks("docs/operations.md", "yaml")
    (tmp_path / "pagoda.yaml").write_text(example)
    required = [f for f in dataclasses.fields(CONFIGS[name]) if f.default is dataclasses.MISSING]
    flags = [f"{flag(field.name)}=x" for field in required]

    read = config.load(CONFIGS[name], name, [f"--config={tmp_path}/pagoda.yaml", *flags], environ={})

    untouched = config.load(CONFIGS[name], name, flags, environ={})
    assert read != untouched


def row(page: str, field: str) -> str:
    """The table row that begins with this name."""
    match = re.search(rf"^\| [^|]*`{re.escape(field)}`[^|]*\|.*$", prose(page), re.MULTILINE)
    assert match, f"{page} has no row for {field}"
    return match[0]


REQUEST_MESSAGES = [
    *(pb.GenerateSpec, SamplingParams, pb.StopConditions),
    *(pb.Chat, pb.ChatMessage, pb.Tool),
]


@pytest.mark.parametrize("message", REQUEST_MESSAGES)
def test_every_field_of_a_request_has_its_row(message: type) -> None:
    for field in message.DESCRIPTOR.fields:  # type: ignore[attr-defined]
        row("docs/clients.md", field.name)


@pytest.mark.parametrize("body", [CompletionBody, ChatBody])
def test_every_parameter_of_openais_api_has_its_row(body: type[CompletionBody] | type[ChatBody]) -> None:
    for name in body.model_fields:
        row("docs/openai.md", name)


def test_the_limits_of_http_are_those_of_the_code() -> None:
    page = prose("docs/openai.md")

    assert f"up to {MAX_PROMPTS} of either" in row("docs/openai.md", "prompt")
    assert f"over {MAX_BODY_BYTES >> 20} MiB" in page
    assert f"`--request-timeout`, {RouterConfig.request_timeout:g} s by default" in page
    assert f"a comment every {streaming.KEEP_ALIVE_S:g} s" in page
    assert f"stay open for {server.KEEP_ALIVE_S} s" in page
    assert f"up to {validation.MAX_REQUEST_ID_LENGTH} printable ASCII characters" in page


def test_ranges_are_those_that_are_checked() -> None:
    assert "| none | -100 to 100 |" in row("docs/clients.md", "logit_bias")
    for name, bounds in sampling.RANGES.items():
        low = f"{bounds.low:g}" if bounds.low_included else f"over {bounds.low:g},"
        start = f"| `{name}` | {bounds.default:g} | {low} to {bounds.high:g} |"
        assert row("docs/clients.md", name).startswith(start), start


@pytest.mark.parametrize(
    ("field", "limit"),
    [
        ("request_id", f"At most {validation.MAX_REQUEST_ID_LENGTH} "),
        (
            "strings",
            f"At most {sampling.MAX_STOP_STRINGS}, each 1 to {sampling.MAX_STOP_STRING_BYTES:,} bytes",
        ),
        ("token_ids", f"At most {sampling.MAX_STOP_TOKENS}"),
        ("messages", f"1 to {chat.MAX_MESSAGES:,} "),
        ("tools", f"At most {chat.MAX_TOOLS} "),
        ("logprobs", f"0 to {sampling.MAX_LOGPROBS}"),
        ("prompt_logprobs", f"0 to {sampling.MAX_LOGPROBS}"),
        ("logit_bias", f"at most {sampling.MAX_LOGIT_BIASES:,}, "),
        ("--max-prompt-bytes", f"{RouterConfig.max_prompt_bytes:,} bytes"),
        ("--max-concurrent-requests", f"{RouterConfig.max_concurrent_requests:,} "),
        ("--max-waiting-requests", f"{SchedulerConfig.max_waiting_requests:,} "),
        ("--write-stall-timeout", f"after {RouterConfig.write_stall_timeout:g} s"),
    ],
)
def test_limits_are_those_of_the_code(field: str, limit: str) -> None:
    rows = [
        line
        for line in prose("docs/clients.md").splitlines()
        if line.startswith("|") and f"`{field}`" in line
    ]

    assert any(limit in line for line in rows), rows


def test_the_limit_of_prompt_logprobs_is_that_of_the_code() -> None:
    assert f"at most {sampling.MAX_PROMPT_LOGPROBS:,}." in prose("docs/clients.md")


def test_the_limits_of_grpc_are_those_of_the_code() -> None:
    assert f"{MAX_MESSAGE_BYTES >> 20} MiB" in prose("docs/clients.md")
    assert f"no more often than every {MIN_PING_INTERVAL_MS / 1000:g} s" in prose("docs/clients.md")


def reasons_given() -> Iterator[str]:
    """The reasons that the router's own errors can have: an argument, or the default of one."""
    for path in (ROOT / "router").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Name("RequestError" | "invalid" | "unavailable")):
                    values = [*node.args[1:], *(word.value for word in node.keywords if word.arg == "reason")]
                case ast.FunctionDef("invalid" | "unavailable"):
                    values = node.args.defaults
                case _:
                    continue
            constants = [str(value.value) for value in values if isinstance(value, ast.Constant)]
            yield from (value for value in constants if re.fullmatch("[A-Z_]+", value))


def test_reasons_of_errors_are_those_that_the_router_gives() -> None:
    errors = prose("docs/clients.md").partition("## Errors")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| `[A-Z_]+` \|(.*?)\|", errors, re.MULTILINE)
    reasons = {reason for cell in cells for reason in re.findall(r"`([A-Z_]+)`", cell)}

    assert {reason for reason in reasons if not reason.startswith("SCHEDULER_")} == set(reasons_given())


def test_messages_to_look_up_are_those_that_are_printed() -> None:
    """Between `…`, each piece of a message is in some string of the code."""
    printed = [(ROOT / "Makefile").read_text()]
    for path in sources():
        nodes = ast.walk(ast.parse(path.read_text()))
        printed += [
            node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]
    printed.append(f"supported: {', '.join(model_config._DEFAULTS)}")
    table = prose("docs/operations.md").partition("## Troubleshooting")[2]

    messages = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)

    assert len(messages) > 20
    for message in messages:
        for piece in filter(None, message.split("…")):
            assert any(piece in text for text in printed), (message, piece)


def test_grpcurl_is_given_valid_requests() -> None:
    bodies = [
        body for block in blocks("docs/clients.md", "sh") for body in re.findall(r"-d '([^']+)'", block)
    ]

    assert bodies
    for body in bodies:
        json_format.Parse(body, pb.GenerateStreamRequest())


@pytest.mark.parametrize("page", PAGES)
def test_metrics_exist(page: str) -> None:
    """But for beginnings of names, which end in an underscore."""
    assert not {name for name in unknown_metrics(PAGES[page].read_text()) if not name.endswith("_")}
