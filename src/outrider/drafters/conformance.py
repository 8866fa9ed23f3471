"""The laws of a drafter as checks that anybody can run in their own tests.

    from outrider.drafters.conformance import LAWS, Bench

    @pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
    def test_law(law):
        law(Bench(make_drafter, vocab_size=512))

or all at once: ``check_drafter(make_drafter, vocab_size=512)``. `make_drafter` gives a fresh
drafter each time. The checks drive it as an engine would, with texts that repeat themselves, and
never look inside. A broken law raises `LawBroken`, which says what was expected and what came.

Shapes: T tokens, F features, D model width, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.noise import Noise, Purpose, Source, Stream
from outrider.core.sampling import SamplingParams
from outrider.core.tree import DraftTree
from outrider.drafters.base import Commit, Drafter, NodeBudget, SequenceView
from outrider.errors import InvalidParameter

Features = Callable[[Sequence[int], tuple[int, ...]], Tensor]
"""Gives the target's features [T, F, D] of every token of a text, for the layers asked for."""

WIDE = NodeBudget(nodes=12, depth=6)
BUDGETS = (
    NodeBudget(nodes=0, depth=0),
    NodeBudget(nodes=0, depth=4),
    NodeBudget(nodes=4, depth=0),
    NodeBudget(nodes=1, depth=1),
    NodeBudget(nodes=3, depth=8),
    NodeBudget(nodes=8, depth=2),
    WIDE,
)
SETTINGS = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.9, top_p=0.95))


class LawBroken(AssertionError):
    """A drafter breaks a law; the message says which and how."""


def _require(ok: bool, law: str, message: str) -> None:
    if not ok:
        raise LawBroken(f"{law}: {message}")


@dataclass(frozen=True)
class Text:
    """A prompt and the output that follows it."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.prompt + self.output


@dataclass(frozen=True, eq=False)
class DrawnRow:
    """One call of `Source.sample`: the position, the weights [V] and the tokens they gave."""

    position: int
    weights: Tensor
    tokens: tuple[int, ...]

    def came_from(self, row_V: Tensor, position: int) -> bool:
        return self.position == position and torch.equal(self.weights, row_V)


@dataclass
class RecordingSource:
    """The noise of a seed that remembers what was drawn from what."""

    noise: Noise
    draws: list[DrawnRow] = field(default_factory=list)

    def sample(
        self,
        weights_V: Tensor,
        *,
        position: int,
        purpose: Purpose,
        count: int = 1,
        ids: npt.NDArray[np.int64] | None = None,
    ) -> list[int]:
        tokens = self.noise.sample(
            weights_V, position=position, purpose=purpose, count=count, ids=ids
        )
        self.draws.append(DrawnRow(position, weights_V.detach().clone(), tuple(tokens)))
        return tokens

    def accept(self, p: float, q: float, *, position: int, index: int) -> bool:
        return self.noise.accept(p, q, position=position, index=index)


@dataclass(frozen=True)
class Bench:
    """A drafter's maker and what it is driven with.

    Attributes:
        make_drafter: gives a fresh drafter.
        vocab_size: of the target.
        features: the target's features; needed by drafters that ask for layers.
        seed: of texts and noise.
        texts: what the sequences say; `None` makes texts that repeat themselves.
    """

    make_drafter: Callable[[], Drafter]
    vocab_size: int
    features: Features | None = None
    seed: int = 0
    texts: tuple[Text, ...] | None = None

    @cached_property
    def scripts(self) -> tuple[Text, ...]:
        return self.texts or repeating_texts(vocab_size=self.vocab_size, seed=self.seed)

    def run(self) -> Drive:
        """Sequences to be driven through a fresh drafter."""
        return Drive(self, self.make_drafter())


def repeating_texts(*, vocab_size: int, seed: int = 0, count: int = 3) -> tuple[Text, ...]:
    """Texts in which phrases come back, so that drafters find something to say."""
    rng = random.Random(seed)
    texts = []
    for _ in range(count):
        phrases = [[rng.randrange(vocab_size) for _ in range(rng.randint(2, 5))] for _ in range(3)]
        tokens = [token for _ in range(14) for token in rng.choice(phrases)]
        cut = len(tokens) // 2
        texts.append(Text(tuple(tokens[:cut]), tuple(tokens[cut:])))
    return tuple(texts)


class Drive:
    """Commits and views of some sequences, as an engine would make them.

    A prompt is committed at once, with the features of rows that were in the cache already; the
    others follow with a commit of no tokens, as after a prefill. Each sequence has a tenant of its
    own, so that only leaks connect them.
    """

    def __init__(self, bench: Bench, drafter: Drafter) -> None:
        self.bench = bench
        self.drafter = drafter
        self.committed: dict[int, tuple[Text, int]] = {}
        self.tenants: dict[int, str] = {}

    def advance(self, sequence: int, text: Text, length: int, *, reused: int = 0) -> None:
        """Let the drafter observe up to ``length`` tokens, the prompt at least.

        Args:
            reused: rows of the prompt that are taken over from an earlier request.
        """
        prompt = len(text.prompt)
        if sequence not in self.committed:
            self.committed[sequence] = (text, prompt)
            tenant = self._tenant(sequence)
            known = self._features(text, 0, reused) if reused else None
            self.drafter.observe([Commit(sequence, text.prompt, tenant, known)])
            rows = self._features(text, reused, prompt - 1)
            self.drafter.observe([Commit(sequence, (), tenant, rows, reused)])
        start = self.committed[sequence][1]
        if length > start:
            self.committed[sequence] = (text, length)
            rows = self._features(text, start - 1, length - 1)
            tokens = text.tokens[start:length]
            commit = Commit(sequence, tokens, self._tenant(sequence), rows, start - 1)
            self.drafter.observe([commit])

    def forget(self, sequence: int) -> None:
        """The sequence is over; its id may be used again."""
        self.drafter.forget([sequence])
        self.committed.pop(sequence, None)

    def view(
        self, sequence: int, *, setting: int = 0, source: Source | None = None
    ) -> SequenceView:
        """The sequence as the engine would show it; ``setting`` picks from `SETTINGS`."""
        text, length = self.committed[sequence]
        return SequenceView(
            id=sequence,
            tokens=text.tokens[:length],
            prompt_length=len(text.prompt),
            params=SETTINGS[setting],
            ends=frozenset(),
            stream=Stream(source or Noise(self.bench.seed + sequence), Purpose.DRAFT),
            tenant=self._tenant(sequence),
        )

    def propose(
        self,
        sequence: int,
        budget: NodeBudget = WIDE,
        *,
        setting: int = 0,
        source: Source | None = None,
    ) -> DraftTree:
        """One sequence's tree, asked for alone."""
        view = self.view(sequence, setting=setting, source=source)
        trees = self.drafter.propose([view], [budget])
        _require(len(trees) == 1, "one tree per view", f"{len(trees)} trees for 1 view")
        return trees[0]

    def _tenant(self, sequence: int) -> str:
        return self.tenants.get(sequence, f"tenant-{sequence}")

    def _features(self, text: Text, start: int, stop: int) -> Tensor | None:
        """Features of positions ``start`` .. ``stop`` - 1, where the drafter wants any."""
        layers = self.drafter.needs.layers
        if not layers:
            return None
        if self.bench.features is None:
            raise InvalidParameter(f"the drafter needs layers {layers}; give the kit features")
        return self.bench.features(text.tokens[:stop], layers)[start:]


def _stops(text: Text) -> Iterator[int]:
    """Lengths at which a text is looked at: after the prompt, and now and then."""
    yield from range(len(text.prompt), len(text.tokens) + 1, 3)


def _same(a: DraftTree, b: DraftTree) -> bool:
    rows = a.q.keys() == b.q.keys() and all(torch.equal(a.q[n], b.q[n]) for n in a.q)
    return (
        (a.tokens, a.parents, a.confidence) == (b.tokens, b.parents, b.confidence)
        and a.without_replacement == b.without_replacement
        and rows
    )


def _show(tree: DraftTree) -> str:
    shown = f"tokens {tree.tokens} parents {tree.parents}"
    return f"{shown} confidence {tree.confidence}" if tree.confidence else shown


def _require_same(law: str, one: DraftTree, other: DraftTree, *, what: str) -> None:
    _require(_same(one, other), law, f"{what}: {_show(one)} against {_show(other)}")


def trees_are_lawful(bench: Bench) -> None:
    """The root echoes the last token; tokens are the target's, confidences probabilities."""
    law = "trees are lawful"
    for text in bench.scripts:
        drive = bench.run()
        for length in _stops(text):
            drive.advance(1, text, length)
            for setting in range(len(SETTINGS)):
                tree = drive.propose(1, setting=setting)
                root = text.tokens[length - 1]
                _require(tree.tokens[0] == root, law, f"root {tree.tokens[0]}, last token {root}")
                strange = [t for t in tree.tokens if not 0 <= t < bench.vocab_size]
                _require(not strange, law, f"tokens {strange}, vocabulary of {bench.vocab_size}")
                odd = [c for c in tree.confidence or () if not 0 <= c <= 1]
                _require(not odd, law, f"confidences {odd} lie outside [0, 1]")
                for node in range(len(tree)):
                    siblings = [tree.tokens[c] for c in tree.children(node)]
                    twice = len(set(siblings)) < len(siblings) and node not in tree.q
                    _require(not twice, law, f"node {node} has equal children {siblings}")


def budgets_are_kept(bench: Bench) -> None:
    """No more nodes and no deeper than asked, down to nothing."""
    law = "budgets are kept"
    for text in bench.scripts:
        drive = bench.run()
        for length in _stops(text):
            drive.advance(1, text, length)
            for budget in BUDGETS:
                tree = drive.propose(1, budget, setting=1)
                nodes, depth = len(tree) - 1, max(tree.depths)
                within = nodes <= budget.nodes and depth <= budget.depth
                _require(within, law, f"{nodes} nodes of depth {depth} for {budget}")


def q_is_honest(bench: Bench) -> None:
    """Recorded rows are what the children were drawn from, and no drawn token was left out."""
    law = "q is honest"
    for text in bench.scripts:
        drive = bench.run()
        for length in _stops(text):
            drive.advance(1, text, length)
            source = RecordingSource(Noise(bench.seed + length))
            tree = drive.propose(1, setting=1, source=source)
            for parent, row in tree.q.items():
                _check_row(law, row, bench.vocab_size)
                _check_draws(law, tree, parent, source.draws, start=length)
            if tree.q:
                _check_none_left_out(law, tree, source.draws, start=length)


def _check_row(law: str, row_V: Tensor, vocab_size: int) -> None:
    _require(row_V.shape == (vocab_size,), law, f"a row of shape {tuple(row_V.shape)}")
    total = float(row_V.sum())
    fine = bool((row_V >= 0).all()) and abs(total - 1) < 1e-4
    _require(fine, law, f"a row with sum {total} and least entry {float(row_V.min())}")


def _check_draws(
    law: str, tree: DraftTree, parent: int, draws: Sequence[DrawnRow], *, start: int
) -> None:
    """The children of a node with a row are exactly what the stream gave for that row."""
    children = tuple(tree.tokens[c] for c in tree.children(parent))
    if not children:
        return
    position = start + tree.depths[parent]
    found = [d.tokens for d in draws if d.came_from(tree.q[parent], position)]
    _require(
        bool(found),
        law,
        f"node {parent} has children {children} and a row that the stream never drew from",
    )
    at_once = children in found
    one_by_one = children == tuple(token for tokens in found for token in tokens)
    _require(
        at_once or one_by_one, law, f"node {parent} has children {children}, its row gave {found}"
    )
    _require(
        len(children) == 1 or not at_once or tree.without_replacement,
        law,
        f"children {children} came from one draw without replacement; the tree must say so",
    )


def _check_none_left_out(
    law: str, tree: DraftTree, draws: Sequence[DrawnRow], *, start: int
) -> None:
    """Law 2: within the tree's depth, every drawn row hangs in the tree with its tokens."""
    for draw in draws:
        depth = draw.position - start
        rows = [row for node, row in tree.q.items() if tree.depths[node] == depth]
        hangs = any(draw.came_from(row, draw.position) for row in rows)
        cut = depth >= max(tree.depths)  # whole depths may go
        _require(cut or hangs, law, f"{draw.tokens} were drawn at depth {depth + 1} and left out")


def proposals_repeat(bench: Bench) -> None:
    """The same question gets the same tree: asked twice, and from a drafter with the same past.

    A drafter may learn from what became of its guesses; being asked alone teaches it nothing.
    """
    law = "proposals repeat"
    for text in bench.scripts:
        drive, twin = bench.run(), bench.run()
        for length in _stops(text):
            for each in (drive, twin):
                each.advance(1, text, length)
            for setting in range(len(SETTINGS)):
                first = drive.propose(1, setting=setting)
                again = drive.propose(1, setting=setting)
                _require_same(law, first, again, what=f"asked twice after {length} tokens")
                other = twin.propose(1, setting=setting)
                _require_same(law, first, other, what=f"two with the same {length} tokens")


def chunks_do_not_matter(bench: Bench) -> None:
    """State after many small commits equals state after one large one."""
    law = "chunks do not matter"
    rng = random.Random(bench.seed)
    for text in bench.scripts:
        for length in _stops(text):
            # All are fresh and asked once: only the commits differ.
            at_once, one_by_one, at_random = bench.run(), bench.run(), bench.run()
            at_once.advance(1, text, length)
            taken_over, done = bench.run(), len(text.prompt)
            taken_over.advance(1, text, length, reused=rng.randrange(done))
            one_by_one.advance(1, text, done)
            at_random.advance(1, text, done)
            for step in range(done + 1, length + 1):
                one_by_one.advance(1, text, step)
            while done < length:
                done = min(length, done + rng.randint(1, 4))
                at_random.advance(1, text, done)
            whole = at_once.propose(1, setting=1)
            for name, drive in (
                ("one by one", one_by_one),
                ("at random", at_random),
                ("with rows taken over", taken_over),
            ):
                tree = drive.propose(1, setting=1)
                _require_same(law, whole, tree, what=f"{length} tokens at once and {name}")


def forgetting_frees(bench: Bench) -> None:
    """A forgotten id starts from nothing, and no count of sequences grows."""
    law = "forgetting frees"
    first, second = bench.scripts[0], bench.scripts[1]
    drive, fresh = bench.run(), bench.run()
    drafter = drive.drafter
    before = len(drafter) if isinstance(drafter, Sized) else 0
    drive.advance(1, first, len(first.tokens))
    drive.propose(1)
    drive.forget(1)
    drive.forget(1)
    drafter.forget([77])
    after = len(drafter) if isinstance(drafter, Sized) else 0
    _require(after == before, law, f"{after} sequences with state after forget, {before} before")
    for length in _stops(second):
        # The id is used again, by another tenant: whatever is left of the first would show.
        for each in (drive, fresh):
            each.tenants[1] = "another"
            each.advance(1, second, length)
        mine, theirs = drive.propose(1, setting=1), fresh.propose(1, setting=1)
        _require_same(law, mine, theirs, what="an id used again, and a fresh drafter")


def neighbours_do_not_matter(bench: Bench) -> None:
    """A sequence's tree is the same alone, in any batch and in any order."""
    law = "neighbours do not matter"
    together = bench.run()
    alone = [bench.run() for _ in bench.scripts]
    shortest = min(len(text.output) for text in bench.scripts)
    for step in range(0, shortest, 4):
        ids = list(range(len(bench.scripts)))
        for i, text in enumerate(bench.scripts):
            length = len(text.prompt) + step
            together.advance(i, text, length)
            alone[i].advance(i, text, length)
        budgets = [BUDGETS[-1 - i % 3] for i in ids]
        single = [alone[i].propose(i, budgets[i], setting=1) for i in ids]
        for order in (ids, ids[::-1], ids[1:] + ids[:1]):
            views = [together.view(i, setting=1) for i in order]
            trees = together.drafter.propose(views, [budgets[i] for i in order])
            _require(len(trees) == len(order), law, f"{len(trees)} trees for {len(order)} views")
            for i, tree in zip(order, trees, strict=True):
                _require_same(law, single[i], tree, what=f"sequence {i} alone and in {order}")


def strangers_are_served(bench: Bench) -> None:
    """Empty batches, unknown and forgotten ids raise nothing and get lawful trees."""
    law = "strangers are served"
    drive, text = bench.run(), bench.scripts[0]
    drafter = drive.drafter
    drafter.observe([])
    drafter.forget([])
    _require(list(drafter.propose([], [])) == [], law, "an empty batch got trees")
    drive.committed[5] = (text, len(text.prompt))  # as if committed; the drafter was never told
    unknown = drive.view(5, setting=1)
    drive.advance(6, text, len(text.prompt))
    gone = drive.view(6, setting=1)
    drive.forget(6)
    try:
        trees = [*drafter.propose([unknown], [WIDE]), *drafter.propose([gone], [WIDE])]
    except Exception as fault:
        raise LawBroken(f"{law}: an unknown or forgotten id raised {fault!r}") from fault
    for tree in trees:
        fine = tree.tokens[0] == text.prompt[-1] and len(tree) - 1 <= WIDE.nodes
        _require(fine, law, f"an unknown sequence got {_show(tree)}")


def sequences_may_end_any_time(bench: Bench) -> None:
    """Sequences come, are cancelled and come again; those that stay do not notice."""
    law = "sequences may end any time"
    rng = random.Random(bench.seed + 1)
    drive, text = bench.run(), bench.scripts[0]
    quiet = bench.run()
    for length in _stops(text):
        for sequence in rng.sample(range(2, 6), 2):
            other = bench.scripts[sequence % len(bench.scripts)]
            if sequence in drive.committed and rng.random() < 0.5:
                drive.forget(sequence)
                continue
            done = drive.committed.get(sequence, (other, 0))[1]
            first = len(other.prompt) if not done else done + rng.randint(1, 4)
            drive.advance(sequence, other, min(first, len(other.tokens)))
            if rng.random() < 0.5:
                drive.propose(sequence, setting=1)
        for each in (drive, quiet):
            each.advance(1, text, length)
        mine, theirs = drive.propose(1, setting=1), quiet.propose(1, setting=1)
        _require_same(law, theirs, mine, what=f"after {length} tokens, without and with others")


def tenants_do_not_mix(bench: Bench) -> None:
    """What one tenant said never shows in another's proposals, however alike the texts."""
    law = "tenants do not mix"
    drive, fresh = bench.run(), bench.run()
    for i, text in enumerate(bench.scripts):
        drive.advance(10 + i, text, len(text.tokens))
        drive.forget(10 + i)
    for i, text in enumerate(bench.scripts):
        for length in _stops(text):
            drive.advance(i, text, length)
            fresh.advance(i, text, length)
            mine, theirs = drive.propose(i, setting=1), fresh.propose(i, setting=1)
            _require_same(law, theirs, mine, what="before and after another tenant's same text")


def the_world_is_left_alone(bench: Bench) -> None:
    """Torch's global noise is not touched, and tokens shown are not changed."""
    law = "the world is left alone"
    state = torch.get_rng_state()
    drive, text = bench.run(), bench.scripts[0]
    for length in _stops(text):
        drive.advance(1, text, length)
        tokens = list(text.tokens[:length])
        view = replace(drive.view(1, setting=1), tokens=tokens)
        drive.drafter.propose([view], [WIDE])
        _require(tokens == list(text.tokens[:length]), law, "the view's tokens were changed")
    drive.forget(1)
    same = torch.equal(state, torch.get_rng_state())
    _require(same, law, "torch's global generator moved; draw from the view's stream")


Law = Callable[[Bench], None]
LAWS: tuple[Law, ...] = (
    trees_are_lawful,
    budgets_are_kept,
    q_is_honest,
    proposals_repeat,
    chunks_do_not_matter,
    forgetting_frees,
    neighbours_do_not_matter,
    strangers_are_served,
    sequences_may_end_any_time,
    tenants_do_not_mix,
    the_world_is_left_alone,
)


def check_drafter(
    make_drafter: Callable[[], Drafter],
    *,
    vocab_size: int,
    features: Features | None = None,
    seed: int = 0,
    texts: tuple[Text, ...] | None = None,
) -> None:
    """Run every law.

    Raises:
        LawBroken: the first law that does not hold.
        InvalidParameter: the drafter needs features and none are given.
    """
    bench = Bench(make_drafter, vocab_size, features, seed, texts)
    for law in LAWS:
        law(bench)
