"""Forced tool calls for an engine that is asked without a server.

The server's own rules, grammar and reader, for whoever holds a tokenizer: `EmbeddedBackend` is
handed one of these, since it may not know the server.
"""

from __future__ import annotations

import json

from outrider.backends.base import Ask, UnsupportedOption
from outrider.backends.embedded import EmbeddedBackend, ForcedCall
from outrider.engine import Engine
from outrider.models.tokenizer import TextModel
from outrider.serve import plan
from outrider.serve.config import Limits
from outrider.serve.errors import ApiError
from outrider.serve.reader import CallArguments, CallStart
from outrider.serve.schema import ChatRequest, parse
from outrider.serve.tools import find_format, knows_tools


def whole_backend(engine: Engine, text: TextModel, *, drafter: str) -> EmbeddedBackend:
    """The embedded backend with forced tool calls; see `EmbeddedBackend`."""
    return EmbeddedBackend(engine, text, drafter=drafter, force=ForcedCalls(text))


class ForcedCalls:
    """Makes a model of this tokenizer call a tool."""

    def __init__(self, text: TextModel) -> None:
        self._format = find_format("auto", text.template)
        self._told_by_template = knows_tools(text.template)
        self._limits = Limits()

    def __call__(self, ask: Ask) -> ForcedCall:
        try:
            return self._call(ask)
        except ApiError as fault:
            raise UnsupportedOption(f"the embedded engine cannot honour this: {fault}") from None

    def _call(self, ask: Ask) -> ForcedCall:
        given = {
            "model": "embedded",
            "messages": list(ask.prompt),
            "tools": list(ask.tools) or None,
            "tool_choice": ask.tool_choice,
            "response_format": ask.response_format,
        }
        request = parse(ChatRequest, json.dumps(plan.known(given)).encode())
        tools = plan.plan_tools(request, self._limits)
        source = plan.chat_grammar(request, tools, self._format, self._limits)
        if not tools.forced or source is None:
            raise UnsupportedOption(
                f"the embedded engine cannot honour tool_choice {ask.tool_choice!r}; use "
                "'required' or a function, or start outrider serve and measure that"
            )
        messages = plan.template_messages(
            request.messages,
            limits=self._limits,
            tools=tools,
            told_by_template=self._told_by_template,
            tool_format=self._format,
        )
        told = plan.plain_tools(tools, told_by_template=self._told_by_template)

        def read(text: str) -> tuple[tuple[str, str], ...]:
            return self._read(tools, text)

        return ForcedCall(tuple(messages), tuple(told or ()), source, read)

    def _read(self, tools: plan.ToolPlan, text: str) -> tuple[tuple[str, str], ...]:
        """The calls in an answer: names and arguments."""
        reader = self._format.reader(tools.names, forced=True)
        calls: list[list[str]] = []
        for piece in (*reader.feed(text), *reader.close()):
            if isinstance(piece, CallStart):
                calls.append([piece.name, ""])
            elif isinstance(piece, CallArguments):
                calls[piece.index][1] += piece.text
        return tuple((name, arguments) for name, arguments in calls)
