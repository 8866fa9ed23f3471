"""`outrider convert`: a draft head from one tool's layout into another's.

The verb reads, checks against the target, writes and says what it did; layouts and refusals are
those of `outrider.models.heads`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outrider import __version__
from outrider.cli import options
from outrider.cli.models import disk_size
from outrider.cli.session import LoadProgress, Session

if TYPE_CHECKING:
    from outrider.models.heads.config import HeadConfig, TargetFacts
    from outrider.models.heads.files import Head


def convert(
    context: typer.Context,
    head: Annotated[Path, typer.Argument(help="The folder of a draft head.")],
    out: Annotated[Path, typer.Argument(help="A folder to write; new or empty.")],
    target: Annotated[
        str, typer.Option(help="The model that the head was made for.")
    ] = options.DEFAULT_TARGET,
    to: Annotated[
        Literal["native", "speculators", "specforge", "eagle3", "eagle", "vllm-medusa", "medusa"],
        typer.Option(help="The layout to write."),
    ] = "native",
    precision: Annotated[
        Literal["bf16", "fp16", "fp32", "int8"],
        typer.Option(help="Of the weights; int8 only in layout native."),
    ] = "bf16",
    layer_ids: Annotated[
        Literal["auto", "state", "output"],
        typer.Option(
            help="How HEAD numbers hidden states: state i is after i layers, output i is of layer "
            "i (TensorRT-LLM). auto: output in eagle_config, else state."
        ),
    ] = "auto",
    embeddings: Annotated[
        bool, typer.Option("--embeddings", help="Add the target's token embedding to the files.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Write even where some readers would silently accept fewer guesses."
        ),
    ] = False,
) -> None:
    """Convert a draft head between layouts, checked against its target."""
    from outrider.models.heads.files import check_choice, check_new, read_any_head, write_head
    from outrider.models.heads.fit import check_fit, folder_facts
    from outrider.models.heads.writing import advice, losses
    from outrider.models.load import find_source
    from outrider.models.safetensors_files import TensorFolder
    from outrider.models.weights import EMBEDDING

    session: Session = context.obj
    check_new(out.expanduser())
    with LoadProgress(session.err, target) as progress:
        source = find_source(target, progress.update)
    name = Path(target).name if Path(target).exists() else target
    facts = folder_facts(source.folder, name=name)
    embedding = TensorFolder(source.folder).read(EMBEDDING)
    found = read_any_head(head, target=facts, layer_ids=layer_ids, embedding=embedding)
    session.out.print(f"read   {head}: {_described(found)}", markup=False)
    check_choice(found.config, to, precision, force=force)
    warnings = [*found.notes, *check_fit(found.config, facts)]
    found = replace(
        found,
        config=replace(found.config, target=_signed(found.config, facts)),
        provenance=_extended(found, head, facts),
    )
    write_head(
        found,
        out,
        layout=to,
        precision=precision,
        embedding=embedding if embeddings else None,
        force=force,
    )
    size = disk_size(out.expanduser()) / 1e6
    session.out.print(f"wrote  {out}: layout {to}, {precision}, {size:,.1f} MB", markup=False)
    for line in (*warnings, *losses(to, found.config), *advice(to, found.config)):
        session.err.print(f"warning: {line}", markup=False)


def _signed(config: HeadConfig, facts: TargetFacts) -> TargetFacts:
    """The head's target; one that its files do not identify becomes the one that was named."""
    return config.target if config.target.config_hash else facts


def _extended(found: Head, folder: Path, facts: TargetFacts) -> dict[str, Any]:
    """The head's provenance and this conversion."""
    earlier = found.provenance.get("conversions", [])
    step = {
        "from": folder.resolve().name,
        "layout": found.layout,
        "stored": found.stored,
        "target": facts.name,
        "outrider": __version__,
    }
    steps = [*(earlier if isinstance(earlier, list) else [earlier]), step]
    return {**found.provenance, "conversions": steps}


def _described(found: Head) -> str:
    """A head in one line."""
    config = found.config
    flags = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "token_residual": config.token_residual,
        "window": bool(config.window),
    }
    given = [flag for flag, on in flags.items() if on]
    vocabulary = f"{config.draft_vocab_size} of {config.target.vocab_size} tokens"
    parts = [
        f"{config.kind}, layout {found.layout}, {found.stored}",
        f"width {config.width}",
        f"states {', '.join(map(str, config.features))} of {config.target.layers}",
        vocabulary if config.reduced else f"all {vocabulary.split(' of ')[1]}",
        f"made for {config.target.name}",
    ]
    if config.kind == "medusa":
        parts.insert(1, f"{config.medusa_heads} heads of {config.medusa_layers} blocks")
    return "; ".join([*parts, f"flags {', '.join(given) or 'none'}"])
