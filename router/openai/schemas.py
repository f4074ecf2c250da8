"""The JSON bodies that clients send: which fields there are, and of what type.

What values are allowed is checked where all requests are, in `router.validation`. Unknown fields are kept
aside, as clients send more than any server knows.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from common.sampling import MAX_LOGPROBS
from router.text import check_text

# What a proto field can hold.
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
TokenIds = list[UInt32]

MAX_PROMPTS = 128


class Body(BaseModel):
    """Numbers are numbers and booleans booleans: nothing is read into strings."""

    model_config = ConfigDict(strict=True, extra="allow")


class WholeBody(Body):
    """What a request carries, of which all strings are text."""

    @model_validator(mode="before")
    @classmethod
    def _check_text(cls, given: Any) -> Any:
        check_text(given)
        return given


class StreamOptions(Body):
    """What a stream says beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(Body):
    """What the output must match: exactly one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class JsonSchema(Body):
    """Of `response_format`."""

    name: str = ""
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")


class ResponseFormat(Body):
    """What the output must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class GenerateBody(WholeBody):
    """What completions and chats share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: UInt32 | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = Field(None, description="0 and -1 are off")
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="By token id, as a string")
    max_tokens: UInt32 | None = None
    min_tokens: UInt32 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    cache_salt: str | None = None
    priority: Int32 | None = None
    user: str | None = Field(None, description="Ignored")


class CompletionBody(GenerateBody):
    """POST /v1/completions."""

    prompt: str | list[str] | TokenIds | list[TokenIds]
    best_of: UInt32 | None = None
    echo: bool | None = None
    logprobs: UInt32 | None = None


class ContentPart(Body):
    """A piece of a message; only text is served."""

    type: str
    text: str | None = None


class FunctionCall(Body):
    """What a model called."""

    name: str
    arguments: str = "{}"


class ToolCall(Body):
    """Of an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(Body):
    """What a model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """Of `tool_choice`."""

    name: str


class NamedTool(Body):
    """The one function to call."""

    type: Literal["function"] = "function"
    function: FunctionName


class ChatInput(WholeBody):
    """What becomes the prompt of a chat."""

    model: str | None = None
    # That there is one is checked with the rest of the prompt.
    messages: list[Message] = Field(default_factory=list)
    tools: list[Tool] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(ChatInput, GenerateBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: UInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(ChatInput):
    """POST /tokenize: a text or a chat."""

    prompt: str | None = None


class DetokenizeBody(WholeBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: TokenIds


class Error(BaseModel):
    """Why there is no answer."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """Every answer but 2XX."""

    error: Error
