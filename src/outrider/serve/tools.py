"""Tools: how a model is told of them, how it writes calls, and how it is made to call one."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outrider.engine.grammar import GrammarSource
from outrider.serve.calls import BareReader, HermesReader, MistralReader
from outrider.serve.reader import PlainReader, Reader, ReasoningReader
from outrider.serve.schema import Tool

FormatName = Literal["hermes", "llama3", "mistral"]


@dataclass(frozen=True)
class ToolFormat:
    """A way of writing tool calls.

    Attributes:
        name: as in the configuration.
        key: what the arguments are called.
        markers: special tokens that must show in the text for the reader.
        signs: what a chat template holds that uses this format.
        id_length: characters of a call's id, where the template insists on a number of them.
    """

    name: FormatName
    key: str
    markers: tuple[str, ...]
    signs: tuple[str, ...]
    id_length: int = 24

    def reader(self, names: Collection[str], *, forced: bool) -> Reader:
        """What reads an answer; a forced call is a bare object in every format."""
        if forced or self.name == "llama3":
            return BareReader(names)
        return HermesReader() if self.name == "hermes" else MistralReader()


FORMATS: dict[str, ToolFormat] = {
    "mistral": ToolFormat("mistral", "arguments", ("[TOOL_CALLS]", "[ARGS]"), ("[TOOL_CALLS]",), 9),
    "llama3": ToolFormat(
        "llama3", "parameters", ("<|python_tag|>",), ("<|python_tag|>", "<|eom_id|>", "ipython")
    ),
    "hermes": ToolFormat("hermes", "arguments", ("<tool_call>", "</tool_call>"), ("<tool_call>",)),
}


def find_format(name: str, template: str) -> ToolFormat:
    """The format of a name; ``auto`` reads it off the template, Hermes where that says nothing."""
    if name != "auto":
        return FORMATS[name]
    for fitting in FORMATS.values():
        if any(sign in template for sign in fitting.signs):
            return fitting
    return FORMATS["hermes"]


def opens_reasoning(prompt: str) -> bool:
    """Has a rendered prompt, or its end, opened the reasoning already?"""
    return prompt.rstrip().endswith(ReasoningReader.OPEN)


def answer_reader(
    tool_format: ToolFormat,
    names: Collection[str],
    *,
    forced: bool,
    template: str,
    constrained: bool,
    opened: bool,
) -> Reader:
    """What reads an answer: its calls where it may hold some, and its reasoning.

    Args:
        names: of the tools that the model was told of.
        forced: the answer must be a call.
        template: the chat template.
        constrained: a grammar rules the answer, so that there is no reasoning.
        opened: see `opens_reasoning`.
    """
    reader: Reader = tool_format.reader(names, forced=forced) if names else PlainReader()
    if ReasoningReader.CLOSE in template and not constrained:
        reader = ReasoningReader(reader, inside=opened)
    return reader


def knows_tools(template: str) -> bool:
    """Does the chat template tell the model of tools itself?"""
    return "tools" in template


def as_plain(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools as chat templates want them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.function.name,
                "description": tool.function.description or "",
                "parameters": tool.function.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ]


def preamble(tools: Sequence[Tool], tool_format: ToolFormat) -> str:
    """A system message about tools, for a template that has no place for them."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in as_plain(tools)]
    call = json.dumps({"name": "NAME", tool_format.key: {}})
    wrapped = {
        "hermes": f"<tool_call>\n{call}\n</tool_call>",
        "llama3": call,
        "mistral": f"[TOOL_CALLS] [{call}]",
    }[tool_format.name]
    return (
        "You can call these functions:\n" + "\n".join(lines) + "\n"
        f"To call one, answer with nothing but\n{wrapped}"
    )


def forced_grammar(tools: Sequence[Tool], tool_format: ToolFormat) -> GrammarSource:
    """A grammar whose every output is a call of one of the tools."""
    forms = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                tool_format.key: _closed(tool.function.parameters or {"type": "object"}),
            },
            "required": ["name", tool_format.key],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return GrammarSource.of_schema(forms[0] if len(forms) == 1 else {"anyOf": forms})


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters without room for arguments that the tool does not name, unless it says so."""
    named = "properties" in parameters and "additionalProperties" not in parameters
    return {**parameters, "additionalProperties": False} if named else parameters
