"""Chats with an engine that is asked without a server, as the server would have them.

Its own rules, prompts, grammars and readers for tools and reasoning, for whoever holds a tokenizer:
`EmbeddedBackend` is handed one of these, since it may not know the server.
"""

from __future__ import annotations

import json

from outrider.backends.base import Ask, UnsupportedOption
from outrider.backends.embedded import EmbeddedBackend, ReadAnswer, Rendered
from outrider.engine import Engine
from outrider.models.tokenizer import TextModel
from outrider.serve import plan
from outrider.serve.config import Limits
from outrider.serve.errors import ApiError
from outrider.serve.reader import CallStart, Content, Reader, Reasoning
from outrider.serve.schema import ChatRequest, parse
from outrider.serve.text import call_decoder
from outrider.serve.tools import answer_reader, find_format, knows_tools, opens_reasoning


def whole_backend(engine: Engine, text: TextModel, *, drafter: str) -> EmbeddedBackend:
    """The embedded backend with tools and reasoning; see `EmbeddedBackend`."""
    return EmbeddedBackend(engine, text, drafter=drafter, render=ServersChats(text))


class ServersChats:
    """Has a model of this tokenizer chat as it would on the server."""

    def __init__(self, text: TextModel) -> None:
        self._text = text
        self._format = find_format("auto", text.template)
        self._told_by_template = knows_tools(text.template)
        self._decoder = call_decoder(text, self._format.markers)
        self._limits = Limits()

    def __call__(self, ask: Ask) -> Rendered:
        try:
            return self._render(ask)
        except ApiError as fault:
            raise UnsupportedOption(f"the embedded engine cannot honour this: {fault}") from None

    def _render(self, ask: Ask) -> Rendered:
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

        source = plan.chat_grammar(request, tools, self._format, self._limits)
        variables = plan.template_variables(request, constrained=source is not None)
        prompt = self._text.chat(messages, tools=told, variables=variables)

        def read(text: str) -> ReadAnswer:
            reader = answer_reader(
                self._format,
                tools.names,
                forced=tools.forced,
                template=self._text.template,
                constrained=source is not None,
                opened=opens_reasoning(self._text.decode(prompt[-8:])),
            )
            return read_whole(reader, text, single=tools.single)

        return Rendered(tuple(prompt), source, read, self._decoder if tools.tools else None)


def read_whole(reader: Reader, text: str, *, single: bool) -> ReadAnswer:
    """A whole answer's parts; of its calls the first alone where one is wanted."""
    content = reasoning = ""
    calls: list[list[str]] = []
    for piece in (*reader.feed(text), *reader.close()):
        if isinstance(piece, Content):
            content += piece.text
        elif isinstance(piece, Reasoning):
            reasoning += piece.text
        elif isinstance(piece, CallStart):
            calls.append([piece.name, ""])
        else:
            calls[piece.index][1] += piece.text
    wanted = calls[:1] if single else calls
    return ReadAnswer(content, reasoning, tuple((name, given) for name, given in wanted))
