"""From a style and a target to a drafter on disk, in one resumable call: data, then training.

`run_training` is what `outrider train` does. It knows where things lie in a working folder and
which settings suit a style; how anything is shown is up to the caller.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.drafters.heads import runnable
from outrider.errors import InvalidParameter
from outrider.models.heads.files import Precision, check_new
from outrider.models.heads.fit import folder_facts
from outrider.models.load import LoadedModel
from outrider.train.acceptance import Probe
from outrider.train.config import TrainConfig
from outrider.train.loop import Progress as TrainProgress
from outrider.train.prepare import (
    DataConfig,
    TrainingData,
    check_space,
    claim,
    estimate_bytes,
    prepare,
)
from outrider.train.prepare import Progress as DataProgress
from outrider.train.prompts import TrainPrompt
from outrider.train.run import DRAFT_MODEL, OWN_DATA, Outcome, RunConfig, plain_name, train_head
from outrider.train.setup import STYLES, default_features, stored_features

KINDS = (*STYLES, DRAFT_MODEL)
WELL = 300  # prompts of each well in a round
_CHAIN = Probe()
_TREE = Probe(nodes=15, depth=6, chain=False)
PROBES: dict[str, dict[str, Probe]] = {
    "eagle": {"tree": _TREE, "chain": _CHAIN},
    "medusa": {"tree": Probe(nodes=15, depth=4, chain=False)},
    DRAFT_MODEL: {"chain": _CHAIN},
}
DRAFT_MODEL_ROWS = 1024  # of a batch: each has logits over the whole vocabulary


@dataclass(frozen=True)
class Plan:
    """What to make.

    Attributes:
        style: one of `KINDS`.
        out: where the drafter goes; must not exist yet.
        work: data and checkpoints; goes on with what is there.
        prompts: a user's; `None` lets the target write them.
        prompts_name: what they are called in the provenance.
        data, train: settings.
        vocab: tokens that a head can guess.
        layers: of a draft model.
        gate: memorise one sample first.
        precision: of a head's weights.
        online: keep no features on disk; the target computes them for every batch.
    """

    style: str
    out: Path
    work: Path
    prompts: list[TrainPrompt] | None = None
    prompts_name: str = ""
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    vocab: int = 4096
    layers: int = 4
    gate: bool = True
    precision: Precision = "bf16"
    online: bool = False

    def __post_init__(self) -> None:
        if self.style not in KINDS:
            raise InvalidParameter(f"style {self.style!r}; use one of {', '.join(KINDS)}")
        if self.vocab < 2:
            raise InvalidParameter(f"the draft vocabulary has {self.vocab} tokens; use 2 or more")
        check_new(self.out)

    def run_config(self) -> RunConfig:
        """The settings of the training itself."""
        return RunConfig(
            style=self.style,
            draft_vocab_size=self.vocab,
            train=self.train,
            probes=PROBES.get(self.style, {"chain": _CHAIN, "tree": _TREE}),
            gate_steps=RunConfig.gate_steps if self.gate else 0,
            precision=self.precision,
            layers=self.layers,
            data_source=self.prompts_name or OWN_DATA,
        )


@dataclass(frozen=True)
class Watch:
    """Who is told what.

    Attributes:
        say: one line for people. `warn`: one that they should not miss.
        data, train: progress.
        stop: asked often; True stops with everything saved.
    """

    say: Callable[[str], None]
    warn: Callable[[str], None]
    data: Callable[[DataProgress], None]
    train: Callable[[TrainProgress], None]
    stop: Callable[[], bool] = lambda: False


def round_of(tokens: int) -> DataConfig:
    """The data settings for a number of answer tokens: small wants get small rounds."""
    well = min(WELL, max(8, tokens // 600))
    return DataConfig(tokens=tokens, own_turns=well, tasks=well, texts=well)


def run_training(loaded: LoadedModel, plan: Plan, watch: Watch) -> Outcome:
    """Prepare data and train; both go on where an earlier call stopped.

    Raises:
        InvalidParameter: a target or a folder that does not fit the plan.
        NoSpace: the disk cannot hold the data; said before anything is written.
        TrainingFailed: see `train_head`.
    """
    target = runnable(loaded.target)
    if STYLES.get(plan.style, ("", {}))[0] == "eagle3":
        default_features(target.layers)  # refuse what is too small before hours of work
    facts = folder_facts(loaded.source, name=plain_name(loaded), tokenizer=loaded.tokenizer)
    for warning in claim(plan.work, facts, fingerprint=_weights(target.fingerprint)):
        watch.warn(warning)
    data = _data(loaded, plan, watch, stored_features(target.layers), target.config.width)
    if not data.complete:
        return Outcome(None, {})
    return train_head(
        loaded,
        data,
        plan.run_config(),
        work=plan.work / plan.style,
        out=plan.out,
        stop=watch.stop,
        report=watch.train,
        say=watch.say,
    )


def _data(
    loaded: LoadedModel, plan: Plan, watch: Watch, features: tuple[int, ...], width: int
) -> TrainingData:
    folder = plan.work / "data"
    if not plan.online:
        _check_size(loaded, plan, watch, folder, features, width)
    data = prepare(
        loaded.target,
        loaded.tokenizer,
        folder,
        plan.data,
        features=features,
        width=width,
        prompts=plan.prompts,
        progress=watch.data,
        stop=watch.stop,
        online=plan.online,
    )
    out = data.left_out
    if out.too_long:
        most = min(plan.data.answers.max_prompt, loaded.target.context_length - 1)
        watch.warn(f"{out.too_long} prompts have more than {most} tokens and are left out")
    if out.refused:
        watch.warn(f"{out.refused} prompts are left out: {out.reason}")
    held_out = len(data.split(True))
    watch.say(
        f"data: {len(data.samples):,} samples ({held_out} held out), "
        f"{data.answer_tokens:,} answer tokens"
    )
    return data


def _check_size(
    loaded: LoadedModel,
    plan: Plan,
    watch: Watch,
    folder: Path,
    features: tuple[int, ...],
    width: int,
) -> None:
    """Say how much will be written, and refuse what the disk cannot hold."""
    lengths = None
    if plan.prompts is not None:
        lengths = [_length(loaded, prompt) for prompt in plan.prompts]
    needed = estimate_bytes(folder, plan.data, features=features, width=width, lengths=lengths)
    if needed:
        most = "at most" if lengths is not None else "about"
        watch.say(f"data: {most} {needed / 1e9:,.2f} GB of hidden states in {folder}")
    check_space(folder, needed)


def _length(loaded: LoadedModel, prompt: TrainPrompt) -> int:
    """Tokens of a prompt; none of one that the chat template refuses, which is counted later."""
    try:
        return len(loaded.tokenizer.chat([dict(turn) for turn in prompt.messages]))
    except InvalidParameter:
        return 0


def settings(style: str, train: TrainConfig, rows: int | None) -> TrainConfig:
    """The training settings with the batch size that suits a style, where none was given."""
    usual = DRAFT_MODEL_ROWS if style == DRAFT_MODEL else TrainConfig.rows
    return replace(train, rows=usual if rows is None else rows)


def _weights(fingerprint: str) -> str:
    """The part of a target's fingerprint that its kernels do not change."""
    return fingerprint.partition("-")[0]
