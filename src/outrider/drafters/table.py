"""The names of drafters: where a word on the command line becomes an object.

Deleting a drafter's file and its line in `BUILDERS` deletes the feature. Other packages add
drafters through the entry-point group `outrider.drafters`: a callable that is a `Builder`.

A spec is a name, with an argument behind a colon where the drafter takes one:
``none``, ``ngram``, ``suffix``, ``draft_model:PATH``, ``replay:FILE``, ``eagle3`` (a head, see
`heads.py`), ``hybrid`` (suffix and n-gram), ``hybrid:suffix+draft_model=PATH``. A folder with a
head is a spec by itself.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from outrider.drafters.base import Drafter
from outrider.drafters.draft_model import (
    DraftModelConfig,
    DraftModelDrafter,
    refuse_mismatch,
    vocabulary_differences,
)
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.heads import (
    STYLES,
    build_head,
    folder_alone,
    runnable,
    shipped_head,
    style_in,
)
from outrider.drafters.hybrid import HybridDrafter, Member
from outrider.drafters.identity import member_specs
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoneDrafter
from outrider.drafters.replay import ReplayDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.errors import DrafterMismatch, InvalidParameter, ModelError
from outrider.models.heads.fit import folder_facts
from outrider.models.load import load_model
from outrider.models.target import Target
from outrider.models.tokenizer import Tokenizer

ENTRY_POINTS = "outrider.drafters"


@dataclass(frozen=True)
class Setting:
    """What a drafter is built for.

    Attributes:
        target: the target that checks its guesses.
        tokenizer: the target's tokenizer; `None` in tests that need none.
        sequences: how many sequences run at once.
        context: positions per sequence.
        source: the target's folder, for heads.
    """

    target: Target
    tokenizer: Tokenizer | None = None
    sequences: int = 1
    context: int | None = None
    source: Path | None = None


Builder = Callable[[str, Setting], Drafter]


def _plain(make: Callable[[], Drafter]) -> Builder:
    """A builder for a drafter that takes no argument."""

    def build(argument: str, setting: Setting) -> Drafter:
        drafter = make()
        if argument:
            raise InvalidParameter(f"drafter {drafter.name} takes no argument, got {argument!r}")
        return drafter

    return build


def _draft_model(argument: str, setting: Setting) -> Drafter:
    if not argument:
        raise InvalidParameter("draft_model needs a model; write draft_model:PATH")
    loaded = load_model(argument)
    if setting.tokenizer is not None:
        refuse_mismatch(
            vocabulary_differences(
                setting.tokenizer.pieces(),
                loaded.tokenizer.pieces(),
                target_ends=setting.target.end_tokens,
                drafter_ends=loaded.target.end_tokens,
            )
        )
    length = min(setting.context or setting.target.context_length, loaded.target.context_length)
    config = DraftModelConfig(sequences=setting.sequences, length=length)
    return DraftModelDrafter(loaded.target, config)


def _replay(argument: str, setting: Setting) -> Drafter:
    if not argument:
        raise InvalidParameter("replay needs a recording; write replay:FILE")
    return ReplayDrafter.load(Path(argument), vocab_size=setting.target.vocab_size)


def _hybrid(argument: str, setting: Setting) -> Drafter:
    return HybridDrafter([_member(spec, setting) for spec in member_specs(argument)])


def _member(spec: str, setting: Setting) -> Member:
    drafter = build_drafter(spec, setting)
    if isinstance(drafter, DraftModelDrafter | EagleDrafter):
        return Member(drafter, drafter.relative_cost(setting.target))
    return Member(drafter)


def _head(style: str) -> Builder:
    def build(argument: str, setting: Setting) -> Drafter:
        return build_head(
            style,
            argument,
            target=setting.target,
            source=setting.source,
            sequences=setting.sequences,
            context=setting.context,
        )

    return build


BUILDERS: dict[str, Builder] = {
    "none": _plain(NoneDrafter),
    "ngram": _plain(NgramDrafter),
    "suffix": _plain(SuffixDrafter),
    "draft_model": _draft_model,
    "hybrid": _hybrid,
    "replay": _replay,
    **{style: _head(style) for style in STYLES},
}


def best_spec(target: Target, source: Path) -> str:
    """What drafts best for a target without training: suffixes, together with the EAGLE-3 head
    that ships for it where there is one."""
    try:
        shipped_head("eagle3", folder_facts(source, name=target.name))
        runnable(target)
    except (InvalidParameter, DrafterMismatch, ModelError):
        return "suffix"
    return "hybrid:suffix+eagle3"


def drafter_names() -> list[str]:
    """Every name a spec may start with, plug-ins included."""
    return sorted({*BUILDERS, *(point.name for point in entry_points(group=ENTRY_POINTS))})


def build_drafter(spec: str, setting: Setting) -> Drafter:
    """Make the drafter that a spec names.

    Raises:
        InvalidParameter: unknown name, or an argument missing or too many.
        DrafterMismatch: the draft model does not fit the target.
        ModelError: the draft model cannot be loaded.
    """
    name, _, argument = spec.partition(":")
    folder = folder_alone(spec)
    if folder is not None:
        name, argument = style_in(folder), spec
    builder = BUILDERS.get(name)
    if builder is None:
        builder = _plugin(name)
    if builder is None:
        names = drafter_names()
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(names)}"
        raise InvalidParameter(f"drafter {name!r} is unknown; {hint}")
    return builder(argument, setting)


def _plugin(name: str) -> Builder | None:
    """The builder of another package's drafter, if there is one of that name."""
    for point in entry_points(group=ENTRY_POINTS, name=name):
        try:
            builder: Builder = point.load()
        except Exception as fault:
            raise InvalidParameter(
                f"the plug-in for drafter {name!r} ({point.value}) cannot be imported: {fault}; "
                "mend or uninstall its package"
            ) from fault
        return builder
    return None
