"""Compressed suffix trees of bounded depth that count: what followed a context, and how often.

A node stands for a string; its label (the last part of that string) is a slice of some text, so a
tree needs a few nodes per token and no copies. `count` says how many suffixes reach a node,
`through` how many of them go on below it. An occurrence at the very end of a text says nothing
about what follows, hence P(child | node) = child.count / node.through.

Two trees share nodes and queries and differ in how they grow:
* `GrowingTree` holds one text that is appended to token by token. Like Ukkonen's construction,
  leaves grow by themselves, and only suffixes that occurred before (the *active* ones) are moved.
* `SharedTree` holds finished texts, inserted whole and removed in the order of insertion.

After SuffixDecoding (Oliaro et al., arXiv 2411.04975). The module knows nothing of sequences,
tenants or budgets.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from outrider.errors import InvalidParameter


class Node:
    """A string of the tree; its label is ``text[start:stop]``, cut at the text's present end."""

    __slots__ = ("children", "count", "likeliest", "newest", "start", "stop", "text", "through")

    def __init__(self, text: Sequence[int], start: int, stop: int, *, count: int) -> None:
        self.text = text
        self.start = start
        self.stop = stop
        self.count = count
        self.through = 0
        self.children: dict[int, Node] = {}
        self.likeliest: Node | None = None  # the child to guess, where it is known
        self.newest = 0  # when a suffix last came in; kept by `SharedTree` only

    def best_child(self) -> Node:
        """The most frequent child; of equally frequent ones, the one seen last."""
        if self.likeliest is None:
            self.likeliest = max(self.children.values(), key=lambda c: (c.count, c.newest))
        return self.likeliest


@dataclass(frozen=True)
class Location:
    """Where a context ends in a tree: ``text[position]`` of the node comes next, or a child.

    ``length`` is the length of the context.
    """

    node: Node
    position: int
    length: int


@dataclass(frozen=True)
class Guess:
    """Guessed tokens with parents (-1: the context), P(token | parent), and the sum of path
    probabilities, which is the expected number of accepted tokens if the counts tell the truth."""

    tokens: list[int]
    parents: list[int]
    confidence: list[float]
    score: float


def guess_path(
    location: Location, *, count: int, min_probability: float, ends: Collection[int]
) -> Guess:
    """Follow the most frequent child for up to ``count`` tokens.

    Stops before the path's probability falls below ``min_probability`` and after a token of
    ``ends``.
    """
    tokens: list[int] = []
    confidence: list[float] = []
    node, position = location.node, location.position
    probability, score = 1.0, 0.0
    while len(tokens) < count:
        given = 1.0
        if position >= min(node.stop, len(node.text)):
            if not node.children:
                break
            child = node.best_child()
            given = child.count / node.through
            if probability * given < min_probability:
                break
            probability *= given
            node, position = child, child.start
        run = list(node.text[position : min(node.stop, position + count - len(tokens))])
        end = next((i + 1 for i, token in enumerate(run) if token in ends), 0) if ends else 0
        run = run[:end] if end else run
        position += len(run)
        tokens += run
        confidence += [given] + [1.0] * (len(run) - 1)
        score += probability * len(run)
        if end:
            break
    return Guess(tokens, list(range(-1, len(tokens) - 1)), confidence, score)


def _next(node: Node, position: int) -> Iterator[tuple[Node, int, float]]:
    """Where each next token lies, and its probability."""
    if position < min(node.stop, len(node.text)):
        yield node, position, 1.0
        return
    for child in node.children.values():
        yield child, child.start, child.count / node.through


def guess_tree(
    location: Location, *, count: int, depth: int, min_probability: float, ends: Collection[int]
) -> Guess:
    """The ``count`` likeliest continuations down to ``depth``: best path probability first."""
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    score = 0.0
    waiting: list[tuple[float, int, int, int, float, Node, int]] = []
    pushed = 0  # breaks ties, first in first out

    def push(node: Node, position: int, *, parent: int, level: int, probability: float) -> None:
        nonlocal pushed
        if level > depth:
            return
        for below, place, given in _next(node, position):
            if probability * given >= min_probability:
                entry = (-probability * given, pushed, parent, level, given, below, place)
                heapq.heappush(waiting, entry)
                pushed += 1

    push(location.node, location.position, parent=-1, level=1, probability=1.0)
    while waiting and len(tokens) < count:
        negative, _, parent, level, given, node, position = heapq.heappop(waiting)
        token = node.text[position]
        tokens.append(token)
        parents.append(parent)
        confidence.append(given)
        score -= negative
        if token not in ends:
            push(
                node,
                position + 1,
                parent=len(tokens) - 1,
                level=level + 1,
                probability=-negative,
            )
    return Guess(tokens, parents, confidence, score)


def _check_depth(depth: int) -> None:
    if depth < 2:
        raise InvalidParameter(
            f"a suffix tree of depth {depth}; use at least 2: a context and what follows it"
        )


class GrowingTree:
    """All substrings up to ``depth`` of one text that grows.

    Attributes:
        text: the tokens so far; append through `extend` only.
    """

    def __init__(self, depth: int) -> None:
        _check_depth(depth)
        self.depth = depth
        self.text: list[int] = []
        self.root = Node(self.text, 0, 0, count=0)
        # The active suffixes, longest first: their lengths are m, m - 1, .. 1, because whatever
        # occurred before, its suffixes did too. Each ends in a node before an absolute position of
        # the text, so that splitting a node moves no position.
        self._nodes: list[Node] = []
        self._positions: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens; time for each is at worst linear in the length of the active match."""
        for token in tokens:
            self._append(token)

    def _append(self, token: int) -> None:
        text, nodes, positions = self.text, self._nodes, self._positions
        text.append(token)
        nodes.append(self.root)
        positions.append(0)
        ended = 0
        while ended < len(nodes) and not self._continues(ended, token):
            self._end_match(ended, token)
            ended += 1
        if ended:
            del nodes[:ended], positions[:ended]
        # If one suffix goes on, all shorter ones do: no more comparisons.
        for i, node in enumerate(nodes):
            if positions[i] < node.stop:
                positions[i] += 1
                continue
            child = node.children[token]
            child.count += 1
            node.through += 1
            best = node.likeliest
            if best is None or child.count >= best.count:
                node.likeliest = child
            nodes[i] = child
            positions[i] = child.start + 1
        if len(nodes) == self.depth:
            del nodes[0], positions[0]

    def _continues(self, active: int, token: int) -> bool:
        node, position = self._nodes[active], self._positions[active]
        if position < node.stop:
            return self.text[position] == token
        return token in node.children

    def _end_match(self, active: int, token: int) -> None:
        """The active suffix meets a new token: it becomes a leaf, which grows by itself."""
        node, position = self._nodes[active], self._positions[active]
        if position < node.stop:
            self._split(active)
        length = len(self._nodes) - 1 - active
        newest = len(self.text) - 1
        leaf = Node(self.text, newest, newest - length + self.depth, count=1)
        node.children[token] = leaf
        node.through += 1
        if node.likeliest is None or node.likeliest.count <= 1:
            node.likeliest = leaf

    def _split(self, active: int) -> None:
        """Cut the node where the active suffix ends in it; the node keeps the upper part."""
        node, position = self._nodes[active], self._positions[active]
        lower = Node(self.text, position, node.stop, count=node.count)
        lower.children, lower.through = node.children, node.through
        lower.likeliest = node.likeliest
        # Suffixes in this node end in it at their own length, so the shorter ones end further up:
        # they and this one have come in above and do not get to the lower part.
        lower.count -= sum(other is node for other in self._nodes[active:])
        node.stop = position
        node.children = {self.text[position]: lower}
        node.through = lower.count
        node.likeliest = lower

    def longest_match(self) -> int:
        """How many of the newest tokens occurred before with something after them, at most
        ``depth`` - 1."""
        return len(self._nodes)

    def locate(self, length: int) -> Location:
        """Where the newest ``length`` tokens, 1 .. `longest_match`, occurred before."""
        return Location(self._nodes[-length], self._positions[-length], length)


class SharedTree:
    """All substrings up to ``depth`` of finished texts; the oldest text leaves first.

    Every suffix ends at a node, so a node's suffixes that do not go on are those that end there.
    Labels always point to the newest text that came by: once a text is removed, none points to it.
    """

    def __init__(self, depth: int) -> None:
        _check_depth(depth)
        self.depth = depth
        self.root = Node((), 0, 0, count=0)
        self.tokens = 0
        self._texts: deque[tuple[int, ...]] = deque()
        self._clock = 0

    def __len__(self) -> int:
        """The number of texts."""
        return len(self._texts)

    def insert(self, text: Sequence[int]) -> None:
        """Add a text."""
        own = tuple(text)
        for start in range(len(own)):
            self._insert_suffix(own, start)
        self._texts.append(own)
        self._clock += len(own)
        self.tokens += len(own)

    def _insert_suffix(self, text: tuple[int, ...], start: int) -> None:
        node, position = self.root, start
        stop = min(start + self.depth, len(text))
        while position < stop:
            node.through += 1
            node.likeliest = None
            child = node.children.get(text[position])
            if child is None:
                child = node.children[text[position]] = Node(text, position, stop, count=0)
            else:
                shared = self._shared_length(child, text, position, stop)
                if shared < child.stop - child.start:
                    self._split(child, shared)
            size = child.stop - child.start
            child.text, child.start, child.stop = text, position, position + size
            child.count += 1
            child.newest = self._clock + position
            node, position = child, position + size

    @staticmethod
    def _shared_length(child: Node, text: tuple[int, ...], position: int, stop: int) -> int:
        label = child.text[child.start : child.stop]
        other = text[position : min(stop, position + len(label))]
        if label == other:
            return len(label)
        pairs = enumerate(zip(label, other, strict=False))
        return next((i for i, (a, b) in pairs if a != b), len(other))

    @staticmethod
    def _split(node: Node, length: int) -> None:
        """Cut a node's label after ``length`` tokens; the node keeps the upper part."""
        lower = Node(node.text, node.start + length, node.stop, count=node.count)
        lower.children, lower.through = node.children, node.through
        lower.likeliest, lower.newest = node.likeliest, node.newest + length
        node.stop = lower.start
        node.children = {node.text[lower.start]: lower}
        node.through = lower.count
        node.likeliest = None

    def remove_oldest(self) -> None:
        """Take out the text that was inserted first. Raises IndexError where there is none."""
        text = self._texts.popleft()
        for start in range(len(text)):
            self._remove_suffix(text, start)
        self.tokens -= len(text)

    def _remove_suffix(self, text: tuple[int, ...], start: int) -> None:
        node, position = self.root, start
        stop = min(start + self.depth, len(text))
        walked: list[tuple[Node, Node]] = []
        while position < stop:
            node.through -= 1
            node.likeliest = None
            child = node.children[text[position]]
            child.count -= 1
            if child.count == 0:
                del node.children[text[position]]
                break
            walked.append((node, child))
            node, position = child, position + child.stop - child.start
        for parent, child in reversed(walked):
            self._join(parent, child)

    @staticmethod
    def _join(parent: Node, node: Node) -> None:
        """Undo a split that no text needs any more: one way on, and no suffix ends here."""
        if len(node.children) != 1 or node.through != node.count:
            return
        [below] = node.children.values()
        size = node.stop - node.start
        below.start -= size
        below.newest -= size
        parent.children[below.text[below.start]] = below

    def longest_match(self, context: Sequence[int]) -> int:
        """The length of the longest suffix of ``context``, shorter than it, that occurs.

        At most ``depth`` - 1. All shorter suffixes occur too, so doubling and halving find it.
        """
        own = tuple(context[-self.depth :])
        most = min(self.depth, len(own)) - 1
        known, missing = 0, 1
        while missing <= most and self._find(own, missing) is not None:
            known, missing = missing, missing * 2
        missing = min(missing, most + 1)
        while missing - known > 1:
            middle = (known + missing) // 2
            if self._find(own, middle) is not None:
                known = middle
            else:
                missing = middle
        return known

    def locate(self, context: Sequence[int], length: int) -> Location:
        """Where the last ``length`` tokens, 1 .. `longest_match`, of ``context`` occur.

        Raises:
            LookupError: they do not occur.
        """
        location = self._find(tuple(context[-length:]), length)
        if location is None:
            raise LookupError(f"the last {length} tokens do not occur; ask longest_match first")
        return location

    def _find(self, context: tuple[int, ...], length: int) -> Location | None:
        node, at = self.root, len(context) - length
        while True:
            child = node.children.get(context[at])
            if child is None:
                return None
            size = min(child.stop - child.start, len(context) - at)
            if child.text[child.start : child.start + size] != context[at : at + size]:
                return None
            at += size
            if at == len(context):
                return Location(child, child.start + size, length)
            node = child
