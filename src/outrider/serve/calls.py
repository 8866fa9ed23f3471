"""Readers of tool calls: the Hermes (Qwen), Llama 3 and Mistral ways of writing them.

Every reader is a machine over single characters, so a step that brings several tokens at once, or
ends one call and begins the next, is read like any other. What looks like a call and is none comes
out as content, unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from outrider.serve.reader import CallArguments, CallStart, Content, Piece, Reader, Splitter

ARGUMENT_KEYS = ("arguments", "parameters")


class ValueScanner:
    """Follows one JSON value to its end, character by character."""

    def __init__(self) -> None:
        self.text = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def nested(self) -> bool:
        """Inside a string, an object or an array: a comma or brace does not end the value."""
        return self._in_string or self._depth > 0

    def take(self, character: str) -> None:
        """Add a character; leading white space is dropped."""
        if not self.text and character.isspace():
            return
        self.text += character
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._in_string = False
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1


class ObjectScanner:
    """Follows an object ``{"name": ..., "arguments": {...}}`` to its end.

    Attributes:
        raw: all characters taken.
        name: the call's name, once it is known.
        done: the object is complete.
        broken: it is no JSON object.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.done = False
        self.broken = False
        self._state = "start"
        self._key = ValueScanner()
        self._value = ValueScanner()
        self._arguments: ValueScanner | None = None

    @property
    def arguments(self) -> str:
        """The arguments so far, as JSON text that only grows; "{}" if there are none at the end."""
        text = "" if self._arguments is None else self._arguments.text
        if text.startswith("{"):
            return text if not self.done else text.rstrip()
        if not self.done:
            return ""  # a string that holds JSON, or null: known at its end only
        try:
            value = json.loads(text) if text else None
        except ValueError:
            return text
        return value if isinstance(value, str) and value else "{}" if not value else text

    def take(self, character: str) -> None:
        """Add a character; must not be called once the object is done or broken."""
        self.raw += character
        if self._state == "start":
            self._expect("{", character, then="key")
        elif self._state == "key":
            self._take_key(character)
        elif self._state == "colon":
            self._expect(":", character, then="value")
        else:
            self._take_value(character)

    def _expect(self, wanted: str, character: str, *, then: str) -> None:
        if character == wanted:
            self._state = then
        elif not character.isspace():
            self.broken = True

    def _take_key(self, character: str) -> None:
        if not self._key.text and character in ",}":
            self.done = character == "}"
            return
        self._key.take(character)
        if self._key.text and not self._key.text.startswith('"'):
            self.broken = True
        elif self._key.text and not self._key.nested:
            self._state = "colon"
            self._value = ValueScanner()
            if self._key.text.strip('"') in ARGUMENT_KEYS:
                self._arguments = self._value

    def _take_value(self, character: str) -> None:
        if not self._value.nested and character in ",}":
            if self._key.text == '"name"':
                self._name()
            self._state, self._key = "key", ValueScanner()
            self.done = character == "}"
            return
        if not self._value.nested and self._value.text[:1] == "{" and character.isspace():
            return  # behind the end of the arguments
        self._value.take(character)

    def _name(self) -> None:
        try:
            name = json.loads(self._value.text)
        except ValueError:
            name = None
        self.name = name if isinstance(name, str) and name else None


class _Calls:
    """Numbers calls and gives out their pieces as they grow."""

    def __init__(self) -> None:
        self.count = 0
        self._started = False
        self._given = 0

    @property
    def started(self) -> bool:
        return self._started

    def show(self, name: str | None, arguments: str) -> list[Piece]:
        """The new pieces of the call under way."""
        if name is None:
            return []
        pieces: list[Piece] = []
        if not self._started:
            self._started = True
            pieces.append(CallStart(self.count, name))
        if len(arguments) > self._given:
            pieces.append(CallArguments(self.count, arguments[self._given :]))
            self._given = len(arguments)
        return pieces

    def end(self) -> None:
        """The call under way is complete."""
        self.count += self._started
        self._started, self._given = False, 0


class _Prose:
    """Content around calls: white space next to a call belongs to the format, not to the answer."""

    def __init__(self) -> None:
        self._held = ""
        self._trim = False

    def show(self, text: str) -> list[Piece]:
        text = self._held + text
        if self._trim:
            text = text.lstrip()
            self._trim = not text
        body = text.rstrip()
        self._held = text[len(body) :]
        return [Content(body)] if body else []

    def call(self) -> None:
        """A call begins here."""
        self._held, self._trim = "", True

    def close(self) -> list[Piece]:
        held, self._held = self._held, ""
        return [Content(held)] if held and not self._trim else []


class HermesReader(Reader):
    """``<tool_call>{"name": ..., "arguments": ...}</tool_call>``, any number, between content."""

    OPEN, CLOSE = "<tool_call>", "</tool_call>"

    def __init__(self) -> None:
        self._calls = _Calls()
        self._prose = _Prose()
        self._open, self._close = Splitter(self.OPEN), Splitter(self.CLOSE)
        self._scanner: ObjectScanner | None = None
        self._tail = False  # between the end of the object and the closing tag

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._scanner is not None:
                text = self._scan(text, pieces)
            elif self._tail:
                _, mark, text = self._close.feed(text)
                self._tail = mark is None
            else:
                shown, mark, text = self._open.feed(text)
                pieces += self._prose.show(shown)
                if mark is not None:
                    self._scanner = ObjectScanner()
        return pieces

    def close(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._scanner is not None and not self._calls.started:
            pieces += self._prose.show(self.OPEN + self._scanner.raw)
        elif self._scanner is None and not self._tail:
            pieces += self._prose.show(self._open.close())
        return pieces + self._prose.close()

    def _scan(self, text: str, pieces: list[Piece]) -> str:
        """Read on inside a call; returns the text behind it."""
        scanner = self._scanner
        assert scanner is not None
        for place, character in enumerate(text):
            scanner.take(character)
            if scanner.done or scanner.broken:
                text = text[place + 1 :]
                break
        else:
            text = ""
        if scanner.name is not None:
            self._prose.call()
            pieces += self._calls.show(scanner.name, scanner.arguments)
        if scanner.done or scanner.broken:
            self._scanner = None
            self._tail = scanner.name is not None
            if not self._tail:
                pieces += self._prose.show(self.OPEN + scanner.raw)
            self._calls.end()
        return text


class BareReader(Reader):
    """Llama 3: the answer is nothing but objects, with a tag before or ``;`` between them.

    Args:
        names: the tools there are; an object that names none of them is content.
    """

    TAG = "<|python_tag|>"

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._calls = _Calls()
        self._scanner: ObjectScanner | None = None
        self._gap = ""  # between calls: nothing that has been shown
        self._prose = False

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._prose:
                pieces.append(Content(text))
                text = ""
            elif self._scanner is not None:
                text = self._scan(text, pieces)
            else:
                text = self._between(text, pieces)
        return pieces

    def close(self) -> list[Piece]:
        rest = self._gap
        if self._scanner is not None and not self._calls.started:
            rest += self._scanner.raw
        if not rest or (self._calls.count and not rest.strip("; \n\t")):
            return []
        return [Content(rest)]

    def _between(self, text: str, pieces: list[Piece]) -> str:
        """Before a call: white space, the tag or a separator, then ``{``; all else is prose."""
        for place, character in enumerate(text):
            if character == "{" and self._is_gap(self._gap, whole=True):
                self._scanner = ObjectScanner()
                return text[place:]
            self._gap += character
            if not self._is_gap(self._gap, whole=False):
                pieces.append(Content(self._gap))
                self._gap, self._prose = "", True
                return text[place + 1 :]
        return ""

    def _is_gap(self, text: str, *, whole: bool) -> bool:
        bare = text.strip("; \n\t" if self._calls.count else " \n\t")
        return not bare or bare == self.TAG or (not whole and self.TAG.startswith(bare))

    def _scan(self, text: str, pieces: list[Piece]) -> str:
        scanner = self._scanner
        assert scanner is not None
        for place, character in enumerate(text):
            scanner.take(character)
            strange = scanner.name is not None and scanner.name not in self._names
            if scanner.done or scanner.broken or strange:
                text = text[place + 1 :]
                break
        else:
            text = ""
        known = scanner.name if scanner.name in self._names else None
        pieces += self._calls.show(known, scanner.arguments)
        if self._calls.started:
            self._gap = ""
        if scanner.done or scanner.broken or (scanner.name is not None and known is None):
            self._scanner = None
            if not self._calls.started:
                pieces.append(Content(self._gap + scanner.raw))
                self._gap, self._prose = "", True
            self._calls.end()
        return text


class MistralReader(Reader):
    """``[TOOL_CALLS] [{"name": ..., "arguments": ...}]``, or ``[TOOL_CALLS]name[ARGS]{...}``."""

    MARK = "[TOOL_CALLS]"

    def __init__(self) -> None:
        self._calls = _Calls()
        self._prose = _Prose()
        self._open = Splitter(self.MARK)
        self._state = "prose"
        self._head = ""
        self._scanner = ObjectScanner()
        self._arguments = ValueScanner()

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._state == "prose":
                shown, mark, text = self._open.feed(text)
                pieces += self._prose.show(shown)
                if mark is not None:
                    self._state, self._head = "head", ""
                    self._prose.call()
                continue
            character, text = text[0], text[1:]
            if self._state == "head":
                self._take_head(character, pieces)
            elif self._state == "list":
                self._take_list(character)
            if self._state == "object":
                self._take_object(character, pieces)
            elif self._state == "arguments":
                self._take_arguments(character, pieces)
        return _joined(pieces)

    def close(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._state == "prose":
            pieces += self._prose.show(self._open.close())
        elif not self._calls.started and not self._calls.count:
            raw = self._head + (self._scanner.raw if self._state == "object" else "")
            pieces.append(Content(self.MARK + raw))
        return pieces + self._prose.close()

    def _take_head(self, character: str, pieces: list[Piece]) -> None:
        """Behind the mark: a list of calls, or one call's name."""
        if character == "[" and not self._head.strip():
            self._state = "list"
            self._head += character
        elif character == "{":
            name = self._head.partition("[")[0].strip()
            self._arguments = ValueScanner()
            self._head = name
            self._state = "arguments" if name else "object"
            self._scanner = ObjectScanner()
        else:
            self._head += character

    def _take_list(self, character: str) -> None:
        if character == "{":
            self._scanner, self._state = ObjectScanner(), "object"
        elif character == "]":
            self._state = "prose"

    def _take_object(self, character: str, pieces: list[Piece]) -> None:
        self._scanner.take(character)
        pieces += self._calls.show(self._scanner.name, self._scanner.arguments)
        if self._scanner.done or self._scanner.broken:
            if not self._calls.started:
                pieces.append(Content(self._scanner.raw))
            self._calls.end()
            self._state = "list"

    def _take_arguments(self, character: str, pieces: list[Piece]) -> None:
        self._arguments.take(character)
        pieces += self._calls.show(self._head, self._arguments.text)
        if not self._arguments.nested:
            self._calls.end()
            self._state, self._head = "prose", ""


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Fragments of the same call, or of content, in one piece."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + piece.text)
        elif (
            isinstance(piece, CallArguments)
            and isinstance(last, CallArguments)
            and last.index == piece.index
        ):
            joined[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            joined.append(piece)
    return joined
