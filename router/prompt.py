"""A prompt as the client gave it to token ids, within the limit on its bytes."""

from typing import Any

from common.tokenizer import Tokenizer
from pagoda.v1.inference_pb2 import Chat
from router.chat import read_chat
from router.chat_template import ChatTemplate, ChatTemplateError
from router.described_tools import describe
from router.errors import invalid
from router.literal_text import LiteralText, pieces


class PromptEncoder:
    """Encodes text and chats. Errors are `RequestError`s on the field that the caller names.

    Attributes:
        has_chat: Whether the model has a chat template.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, max_prompt_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._literal = LiteralText(tokenizer.special_tokens)
        self._max_bytes = max_prompt_bytes
        self.has_chat = template is not None

    async def encode_text(self, text: str, field: str) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer puts around one."""
        self._check_size(len(text.encode()), field)
        ids = await self._tokenizer.run(lambda: self._tokenizer.encode(text, add_special_tokens=True))
        if not ids:
            raise invalid(field, "holds no tokens; give a prompt that isn't empty", "EMPTY_PROMPT")
        return ids

    async def encode_chat(self, chat: Chat, field: str) -> list[int]:
        """Token ids of a chat; its special tokens are those that the template writes."""
        if self._template is None:
            raise invalid(
                field, "this model has no chat template; send text or token_ids", "NO_CHAT_TEMPLATE"
            )
        template = self._template
        self._check_size(chat.ByteSize(), field)

        def render_and_encode() -> list[int]:
            given = read_chat(chat, field)
            variables: list[Any] = [given.messages, given.tools, given.arguments]
            messages, tools, arguments = self._literal.cut(variables)
            if not template.takes_tools:
                messages, tools = describe(messages, tools), []
            text = template.render(
                messages,
                tools=tools or None,
                arguments=arguments,
                max_bytes=self._max_bytes,
                continue_final_message=chat.continue_final_message,
            )
            return self._tokenizer.encode(*pieces(text), add_special_tokens=False)

        where = f"{field}.messages"
        try:
            ids = await self._tokenizer.run(render_and_encode)
        except ChatTemplateError as error:
            raise invalid(where, str(error), "CHAT_TEMPLATE") from error
        except RecursionError as error:
            raise invalid(field, "holds JSON that is nested too deep") from error
        if not ids:
            raise invalid(where, "the chat template makes an empty prompt of it", "EMPTY_PROMPT")
        return ids

    def _check_size(self, size: int, field: str) -> None:
        if size > self._max_bytes:
            raise invalid(field, f"{size} bytes, at most {self._max_bytes} are taken", "PROMPT_TOO_LONG")
