"""`python -m launcher chat`: a streaming conversation in the terminal, or one answer for a pipe."""

import contextlib
import socket
import sys
from collections.abc import Iterator

import grpc
from rich.console import Console

from common import config as configuration
from common.config import ConfigError
from common.rpc import AddressError, channel, split_host_port
from common.tls import client_tls
from launcher.config import ChatConfig
from launcher.conversation import Conversation, DoesNotFitError
from pagoda.v1 import inference_pb2 as pb
from pagoda.v1.inference_pb2_grpc import InferenceServiceStub
from pagoda.v1.sampling_pb2 import SamplingParams

CONNECT_TIMEOUT_S = 5.0
CALL_TIMEOUT_S = 30.0
# A model must not steer the terminal: control characters but tab and newline.
INVISIBLE = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\t\n"}
HELP = """/reset  forget the conversation
/help   show this
Ctrl-C  stop the answer; at the prompt, leave
Ctrl-D  leave"""


class ChatError(Exception):
    """What went wrong, in one line for a person."""


def main(argv: list[str]) -> int:
    """Chats until the user leaves, or answers one prompt; returns the exit status."""
    config = configuration.load(ChatConfig, "chat", argv, prog="python -m launcher chat")
    try:
        tls = client_tls("tls", config.tls_ca_file, config.tls_cert_file, config.tls_key_file)
        with channel(config.address, tls) as connection:
            chat = Chat(config, connection)
            return chat.once(config.prompt) if config.prompt is not None else chat.converse()
    except AddressError as error:
        print(f"python -m launcher chat: --address: {error}", file=sys.stderr)
        return 2
    except ConfigError as error:
        print(f"python -m launcher chat: {error}", file=sys.stderr)
        return 2
    except ChatError as error:
        print(f"python -m launcher chat: {error}", file=sys.stderr)
        return 1


class Chat:
    """A conversation with the server behind `channel`.

    Raises:
        ChatError: no server answers there, or it has no chat template.
    """

    def __init__(self, config: ChatConfig, channel: grpc.Channel) -> None:
        self._config = config
        # Notes go to standard error, so that a pipe gets the answers alone.
        self._notes = Console(stderr=True, highlight=False, soft_wrap=True)
        self._stub = InferenceServiceStub(channel)
        key = config.api_key
        self._metadata = () if key is None else (("authorization", f"Bearer {key}"),)
        try:
            # At once, where gRPC would try again for a while.
            socket.create_connection(split_host_port(config.address), CONNECT_TIMEOUT_S).close()
        except OSError:
            raise ChatError(
                f"no server at {config.address}: start one with `make serve`, or name another with --address"
            ) from None
        with _errors_as_lines():
            self._model = self._stub.GetModel(
                pb.GetModelRequest(), timeout=CALL_TIMEOUT_S, metadata=self._metadata
            )
        if not self._model.chat:
            raise ChatError(f"{self._model.name} has no chat template; examples/ send it plain text")
        self._conversation = Conversation(config.system)

    def once(self, prompt: str) -> int:
        """Streams one answer; 130 if Ctrl-C cut it short."""
        return 0 if self._answer(prompt) else 130

    def converse(self) -> int:
        """Answers line by line until Ctrl-C at the prompt, or the end of input.

        Returns 1 if a question had no answer and nobody sat there to see why.
        """
        status = 0
        self._note(
            f"{self._model.name}, {self._model.max_model_len} tokens of context. /help says what to type."
        )
        for line in self._lines():
            match line.strip():
                case "":
                    pass
                case "/help":
                    self._note(HELP)
                case "/reset":
                    self._conversation.reset()
                    self._note("The conversation starts anew.")
                case command if command.startswith("/") and " " not in command:
                    self._note(f"{command} is no command; /help lists them")
                case prompt:
                    try:
                        self._answer(prompt)
                    except ChatError as error:
                        self._note(str(error))
                        status = 1
        return 0 if sys.stdin.isatty() else status

    def _lines(self) -> Iterator[str]:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
        interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401
        while True:
            try:
                yield input("> " if interactive else "")
            except (EOFError, KeyboardInterrupt):
                print()
                return

    def _answer(self, prompt: str) -> bool:
        """Streams the answer to `prompt` and remembers both; False if Ctrl-C cut it short."""
        text, finished = "", False
        self._conversation.ask(prompt)
        try:
            self._make_room()
            for delta in self._stream():
                text += delta
                print(delta.translate(INVISIBLE), end="", flush=True)
            finished = True
        except KeyboardInterrupt:
            pass
        finally:
            self._conversation.answer(text)
            if text:
                print()
        if not finished:
            self._note("Stopped.")
        return finished

    def _make_room(self) -> None:
        def count(messages: list[pb.ChatMessage]) -> int:
            request = pb.TokenizeRequest(chat=pb.Chat(messages=messages))
            with _errors_as_lines():
                response = self._stub.Tokenize(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
                return len(response.token_ids)

        try:
            forgotten = self._conversation.trim(count, self._model.max_model_len, self._config.max_tokens)
        except DoesNotFitError as error:
            raise ChatError(str(error)) from error
        if forgotten:
            self._note(
                f"{forgotten} messages are forgotten: {self._model.max_model_len} tokens hold no more."
            )

    def _stream(self) -> Iterator[str]:
        """The answer as it comes. Leaving the loop early cancels the call, which frees its blocks."""
        request = pb.GenerateStreamRequest(
            spec=pb.GenerateSpec(
                chat=pb.Chat(messages=self._conversation.messages),
                sampling=SamplingParams(temperature=self._config.temperature),
                stop=pb.StopConditions(max_tokens=self._config.max_tokens),
            )
        )
        with _errors_as_lines():
            call = self._stub.GenerateStream(request, metadata=self._metadata)
            try:
                for response in call:
                    if response.WhichOneof("event") == "delta" and response.delta.text:
                        yield response.delta.text
            finally:
                call.cancel()  # type: ignore[no-untyped-call]

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", markup=False)


@contextlib.contextmanager
def _errors_as_lines() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise ChatError(_explain(error.code(), error.details() or "")) from error


def _explain(code: grpc.StatusCode, details: str) -> str:
    if code is grpc.StatusCode.UNAVAILABLE:
        return f"the server went away or has no model process ready; ask again in a moment ({details})"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return f"the server is busy; ask again in a moment ({details})"
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"give a key of this server in PAGODA_CHAT_API_KEY ({details})"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return f"what answers there is not Pagoda, or an older one ({details})"
    return f"{code.name}: {details}"
