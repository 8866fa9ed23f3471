"""Tools for an engine that is asked without a server.

The server's own rules, prompts, grammars and readers, for whoever holds a tokenizer:
`EmbeddedBackend` is handed one of these, since it may not know the server.
"""

from __future__ import annotations

import json

from outrider.backends.base import Ask, UnsupportedOption
from outrider.backends.embedded import CallsRead, EmbeddedBackend, ToolUse
from outrider.engine import Engine
from outrider.models.tokenizer import TextModel
from outrider.serve import plan
from outrider.serve.config import Limits
from outrider.serve.errors import ApiError
from outrider.serve.reader import CallArguments, CallStart, Content
from outrider.serve.schema import ChatRequest, parse
from outrider.serve.text import call_decoder
from outrider.serve.tools import find_format, knows_tools


def whole_backend(engine: Engine, text: TextModel, *, drafter: str) -> EmbeddedBackend:
    """The embedded backend with tools; see `EmbeddedBackend`."""
    return EmbeddedBackend(engine, text, drafter=drafter, use_tools=ServersTools(text))


class ServersTools:
    """Lets a model of this tokenizer use tools, as it would on the server."""

    def __init__(self, text: TextModel) -> None:
        self._format = find_format("auto", text.template)
        self._told_by_template = knows_tools(text.template)
        self._decoder = call_decoder(text, self._format.markers)
        self._limits = Limits()

    def __call__(self, ask: Ask) -> ToolUse:
        try:
            return self._use(ask)
        except ApiError as fault:
            raise UnsupportedOption(f"the embedded engine cannot honour this: {fault}") from None

    def _use(self, ask: Ask) -> ToolUse:
        given = {
            "model": "embedded",
            "messages": list(ask.prompt),
            "tools": list(ask.tools) or None,
            "tool_choice": ask.tool_choice,
            "response_format": ask.response_format,
        }
        request = parse(ChatRequest, json.dumps(plan.known(given)).encode())
        tools = plan.plan_tools(request, self._limits)
        messages = plan.template_messages(
            request.messages,
            limits=self._limits,
            tools=tools,
            told_by_template=self._told_by_template,
            tool_format=self._format,
        )
        told = plan.plain_tools(tools, told_by_template=self._told_by_template)

        def read(text: str) -> CallsRead:
            return self._read(tools, text)

        return ToolUse(
            tuple(messages),
            tuple(told or ()),
            plan.chat_grammar(request, tools, self._format, self._limits),
            read if tools.tools else None,
            self._decoder if tools.tools else None,
        )

    def _read(self, tools: plan.ToolPlan, text: str) -> CallsRead:
        """What is no call, and the calls in an answer: names and arguments."""
        reader = self._format.reader(tools.names, forced=tools.forced)
        content = ""
        calls: list[list[str]] = []
        for piece in (*reader.feed(text), *reader.close()):
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, CallStart):
                calls.append([piece.name, ""])
            elif isinstance(piece, CallArguments):
                calls[piece.index][1] += piece.text
        wanted = calls[:1] if tools.single else calls
        return content, tuple((name, arguments) for name, arguments in wanted)
