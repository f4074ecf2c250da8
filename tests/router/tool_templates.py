"""Small chat templates that show tools in the ways of three model families, and a chat that uses them."""

from typing import Any

# The tools in the system message, a call's members one by one, results gathered in a user's turn.
QWEN = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n<tool_call>\\n{"name": ..., "arguments": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not (loop.first and tools)) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if '</think>' in message.content %}{{- raise_exception('thoughts') }}{%- endif %}
{%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls %}
{%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
{{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' + (call.arguments | tojson) + '}' }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# Goes by which keys a message has; one call a message; results as JSON.
LLAMA3 = """{{- bos_token }}
{%- if tools is not none and messages[0].role == 'user' %}
{{- '<|start|>user\\n{"name": name, "parameters": dictionary of arguments}\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n' }}{%- endfor %}
{{- messages[0].content | trim + '<|end|>' }}
{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
{{- '<|start|>' + message.role + '\\n' + message.content | trim + '<|end|>' }}
{%- elif 'tool_calls' in message %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant\\n{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
{{- '<|end|>' }}
{%- else %}
{{- '<|start|>ipython\\n' }}
{%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
{%- else %}{{- message.content }}{%- endif %}
{{- '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}"""

# The tools before the last user's message, whole functions as JSON, ids of nine characters.
MISTRAL = """{%- set last = (messages | selectattr('role', 'equalto', 'user') | list)[-1] %}
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if tools is not none and message == last %}
{{- '[AVAILABLE_TOOLS] [' }}
{%- for tool in tools %}
{{- '{"type": "function", "function": {' }}
{%- for key, value in tool.function.items() if key != 'return' %}
{{- '"' + key + '": ' + (value | tojson) + (', ' if not loop.last else '}}') }}
{%- endfor %}
{{- ', ' if not loop.last else ']' }}
{%- endfor %}
{{- '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls is defined and message.tool_calls is not none %}
{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- set out = call.function | tojson %}
{%- if call.id is not defined or call.id | length != 9 %}{{- raise_exception('nine') }}{%- endif %}
{{- out[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']' + eos_token) }}
{%- endfor %}
{%- elif message.role == 'assistant' %}
{{- ' ' + message.content | trim + eos_token }}
{%- elif message.role == 'tool' %}
{%- set content = message.content.content if message.content.content is defined else message.content %}
{{- '[TOOL_RESULTS] {"content": ' + content | string + ', "call_id": "' + message.tool_call_id + '"}' }}
{{- '[/TOOL_RESULTS]' }}
{%- else %}{{- raise_exception('no such role') }}
{%- endif %}
{%- endfor %}"""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": 'The weather in a "city".',
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "How is it in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefgh1",
                "type": "function",
                "function": {"name": "weather", "arguments": {"city": "Köln"}},
            }
        ],
    },
    {"role": "tool", "content": '{"sky": "<grey>"}', "tool_call_id": "abcdefgh1", "name": "weather"},
    {"role": "assistant", "content": "Grey."},
    {"role": "user", "content": "And now?"},
]
