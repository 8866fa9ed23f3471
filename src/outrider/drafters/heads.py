"""From a head's files to a drafter: which head, whether it fits, and how it drafts.

A spec is ``eagle``, ``eagle3``, ``eagle3.1`` or ``medusa``; behind a colon may stand the head's
folder and, after a comma, ``chain`` (EAGLE only): ``eagle3:DIR,chain``. Without a folder it is the
head that ships with Outrider for this target.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.sampling import Subset
from outrider.drafters.base import Drafter
from outrider.drafters.eagle import EagleDrafter
from outrider.drafters.growth import TreeShape
from outrider.drafters.medusa import MedusaDrafter
from outrider.errors import DrafterMismatch, InvalidParameter
from outrider.models.heads.config import HeadConfig, TargetFacts
from outrider.models.heads.eagle import EagleModel
from outrider.models.heads.files import Head, read_head
from outrider.models.heads.fit import check_fit, folder_facts
from outrider.models.heads.kernels import Decoder
from outrider.models.heads.medusa import MedusaModel
from outrider.models.load import open_folder
from outrider.models.native import NativeTransformer
from outrider.models.target import Target
from outrider.models.transformer import Transformer
from outrider.models.weights import EMBEDDING, HEAD

log = logging.getLogger(__name__)

CHAIN = "chain"
SHIPPED = "heads"
STYLES = ("eagle", "eagle3", "eagle3.1", "medusa")


@dataclass(frozen=True)
class HeadSpec:
    """What a head's spec says; see the module's head.

    Attributes:
        style: of `STYLES`; `None` where the spec is a folder alone, whose files say it.
        folder: `None` stands for the head that ships for the target.
        chain: it guesses chains, no trees.
    """

    style: str | None
    folder: Path | None
    chain: bool

    def place(self, facts: Callable[[], TargetFacts]) -> Path:
        """Its folder.

        Args:
            facts: of the target, asked only for a head that ships.

        Raises:
            InvalidParameter: none ships.
        """
        return self.folder or shipped_head(self.style or "", facts())


def folder_alone(spec: str) -> Path | None:
    """The folder of a spec that names no style; `None` for any other."""
    folder = Path(spec.partition(",")[0]).expanduser()
    return folder if (folder / "config.json").is_file() else None


def read_spec(spec: str) -> HeadSpec | None:
    """What a drafter's spec says of a head; `None` if it is none's.

    Raises:
        InvalidParameter: as `read_argument`.
    """
    if folder_alone(spec) is not None:
        return read_argument(None, spec)
    style, _, argument = spec.partition(":")
    return read_argument(style, argument) if style in STYLES else None


def read_argument(style: str | None, argument: str) -> HeadSpec:
    """What stands behind a style's colon, or the whole spec where there is no style.

    Raises:
        InvalidParameter: two folders, or chains of a head that has none.
    """
    words = [word for word in argument.split(",") if word]
    chain = CHAIN in words
    folders = [word for word in words if word != CHAIN]
    if len(folders) > 1 or (chain and style == "medusa"):
        named = "" if style is None else f"{style}:"
        forms = f"{named}DIR" if style == "medusa" else f"{named}DIR or {named}DIR,chain"
        raise InvalidParameter(f"drafter {named}{argument}; write {forms}")
    return HeadSpec(style, Path(folders[0]).expanduser() if folders else None, chain)


def style_of(config: HeadConfig) -> str:
    """The name that a head goes by: its kind, and 3.1 where both of its flags are set."""
    if config.kind == "eagle3" and config.fc_norm and config.norm_output:
        return "eagle3.1"
    return config.kind


def shipped_heads() -> dict[str, Path]:
    """The heads inside this package, by folder name."""
    root = Path(str(resources.files("outrider"))) / SHIPPED
    return {path.parent.name: path.parent for path in sorted(root.glob("*/config.json"))}


def shipped_head(style: str, facts: TargetFacts) -> Path:
    """The folder of the shipped head of a style for a target.

    Raises:
        InvalidParameter: there is none.
    """
    for path in shipped_heads().values():
        config = read_head(path).config
        if style_of(config) == style and _fits(config, facts):
            return path
    raise InvalidParameter(
        f"no {style} head ships for {facts.name}; give its folder ({style}:DIR), or train one with "
        f"`outrider train {style}`"
    )


def _fits(config: HeadConfig, facts: TargetFacts) -> bool:
    try:
        check_fit(config, facts)
    except DrafterMismatch:
        return False
    return True


def runnable(target: Target) -> Decoder:
    """The target as heads need it.

    Raises:
        DrafterMismatch: a target whose hidden states and embedding cannot be had.
    """
    if isinstance(target, NativeTransformer | Transformer):
        return target
    raise DrafterMismatch(
        f"{target.name} runs one row at a time and gives no hidden states to a head; "
        "use suffix or ngram, or a target on the native kernels"
    )


def target_head_rows(target: Decoder, source: Path | None, ids: Tensor) -> Tensor:
    """Rows of a target's head [W, D] in fp32.

    Raises:
        DrafterMismatch: the head is not the embedding, and the target's folder is not known.
    """
    if target.config.tied:
        return target.weights.embedding[ids].float()
    if source is None:
        raise DrafterMismatch(f"the files of {target.name} are needed for the rows of its head")
    config, tensors = open_folder(source)
    return tensors.read(EMBEDDING if config.tied else HEAD)[ids].float()


def draft_ids(head: Head) -> Tensor | None:
    """int64 [W]: the target's ids of the draft vocabulary; `None` for the whole vocabulary."""
    if not head.config.reduced:
        return None
    return head.tensors["d2t"] + torch.arange(head.config.draft_vocab_size)


def make_drafter(
    head: Head,
    target: Target,
    *,
    source: Path | None,
    shape: TreeShape | None = None,
    sequences: int = 1,
    length: int,
) -> Drafter:
    """A drafter from a head that fits.

    Args:
        source: the target's folder.
        shape: of EAGLE's trees.
        sequences, length: what its cache must hold.
    """
    decoder, config = runnable(target), head.config
    ids = draft_ids(head)
    subset = None if ids is None else Subset(ids.tolist(), size=target.vocab_size)
    name = style_of(config)
    if config.kind == "medusa":
        accuracy = head.provenance.get("accuracy_by_rank")
        return MedusaDrafter(
            MedusaModel(config, head.tensors, decoder), subset=subset, accuracy=accuracy, name=name
        )
    rows = None
    if config.kind == "eagle":
        every = torch.arange(config.target.vocab_size) if ids is None else ids
        rows = target_head_rows(decoder, source, every)
    return EagleDrafter(
        EagleModel(config, head.tensors, decoder, rows),
        subset=subset,
        shape=shape,
        sequences=sequences,
        length=length,
        name=name,
    )


def build_head(
    style: str,
    argument: str,
    *,
    target: Target,
    source: Path | None,
    sequences: int,
    context: int | None,
) -> Drafter:
    """The drafter of a spec; see the module's head.

    Raises:
        InvalidParameter: an unknown option, or no head ships.
        ModelError: the files cannot be used.
        DrafterMismatch: a head for another target.
    """
    spec = read_argument(style, argument)
    if source is None:
        raise DrafterMismatch(f"drafter {style}: the target's folder is not known")
    facts = folder_facts(source, name=target.name)
    folder = spec.place(lambda: facts)
    head = read_head(folder, target=facts)
    if style_of(head.config) != style:
        raise DrafterMismatch(
            f"{folder} holds a head of kind {style_of(head.config)}; "
            f"write {style_of(head.config)}:{folder}"
        )
    for warning in check_fit(head.config, facts):
        log.warning("%s: %s", folder, warning)
    return make_drafter(
        head,
        target,
        source=source,
        shape=TreeShape(branching=1, beam=1) if spec.chain else None,
        sequences=sequences,
        length=context or target.context_length,
    )


def style_in(folder: Path) -> str:
    """The style of the head in a folder, for specs that are a folder alone."""
    return style_of(read_head(folder).config)
