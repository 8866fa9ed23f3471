"""From a target to a folder of training data: prompts, answers and features, resumable.

A round writes user turns with the target itself, draws tasks, lets the target answer both, and then
answers tasks about those answers. Rounds follow until the wanted number of answer tokens is there.
Each round is a function of the seed and its number, and a finished one is not written again.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import Tensor

from outrider.core.sampling import SamplingParams
from outrider.engine.budget import FixedBudget
from outrider.engine.engine import Engine, EngineConfig
from outrider.errors import InvalidParameter, NoSpace
from outrider.models.heads.config import TargetFacts
from outrider.models.target import Target
from outrider.models.tokenizer import Tokenizer
from outrider.train.checkpoint import disk_full
from outrider.train.features import (
    Features,
    FeatureStore,
    OnlineFeatures,
    Recorder,
    cut_last_line,
    feature_bytes,
)
from outrider.train.prompts import TrainPrompt, Writer, held_out_ids, make_prompt, unique
from outrider.train.samples import (
    AnswerConfig,
    LeftOut,
    Sample,
    answer_all,
    append_samples,
    read_samples,
)

RECORDER = "recorder"
ROWS_PER_TOKEN = 1.6  # rows of prompt and answer per answer token; 1.39 with SmolLM2-135M
SAMPLES = "samples.jsonl"


@dataclass(frozen=True)
class DataConfig:
    """How much data, and of what.

    Attributes:
        tokens: answer tokens wanted.
        own_turns, tasks, texts: prompts of each well per round.
        answers: how the target answers.
        slots: sequences that are generated at once.
        seed: of everything.
    """

    tokens: int = 2_000_000
    own_turns: int = 300
    tasks: int = 300
    texts: int = 300
    answers: AnswerConfig = field(default_factory=AnswerConfig)
    slots: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "slots"):
            if vars(self)[name] < 1:
                raise InvalidParameter(f"{name} is {vars(self)[name]}; use 1 or more")


@dataclass(frozen=True)
class Progress:
    """Attributes:
    tokens: answer tokens so far, of `wanted` (0 where a file of prompts decides).
    per_second: answer tokens per second of this run.
    samples: so far.
    share: how much is done, 0 to 1.
    """

    tokens: int
    wanted: int
    per_second: float
    samples: int
    share: float = 0.0


@dataclass
class TrainingData:
    """A folder of samples, with features for all of them.

    Attributes:
        samples: all, in the order they were written.
        store: their features.
        left_out: prompts that were not answered in this session.
        complete: nothing is missing that was asked for.
    """

    folder: Path
    samples: list[Sample]
    store: Features
    left_out: LeftOut = field(default_factory=LeftOut)
    complete: bool = True
    _mended: bool = False

    @classmethod
    def open(cls, folder: Path, *, features: tuple[int, ...], width: int) -> TrainingData:
        """What a folder holds; an empty one is fine. Changes nothing that is there."""
        folder.mkdir(parents=True, exist_ok=True)
        store = FeatureStore(folder / "features", features=features, width=width)
        found = {s.id: s for s in read_samples(folder / SAMPLES) if s.id in store}
        return cls(folder, list(found.values()), store)

    @classmethod
    def online(cls, folder: Path, target: Target, *, features: tuple[int, ...]) -> TrainingData:
        """The samples of a folder, with features that the target computes when they are wanted."""
        folder.mkdir(parents=True, exist_ok=True)
        store = OnlineFeatures(target, features)
        found = {s.id: s for s in read_samples(folder / SAMPLES)}
        for sample in found.values():
            store.note(sample.id, sample.tokens)
        return cls(folder, list(found.values()), store)

    def split(self, held_out: bool) -> list[Sample]:
        """The samples to train on, or those that are held out."""
        return [s for s in self.samples if s.held_out is held_out]

    @property
    def answer_tokens(self) -> int:
        return sum(len(s.answer) for s in self.samples)

    def add(self, sample: Sample, features: Tensor) -> None:
        """Keep a sample: features first, so that a listed sample always has them. One process at a
        time may add.

        Raises:
            NoSpace: the disk is full; what was kept before is whole.
        """
        try:
            self.store.add(sample.id, features)
            if not self._mended and (self.folder / SAMPLES).exists():
                cut_last_line(self.folder / SAMPLES)
            self._mended = True
            append_samples(self.folder / SAMPLES, [sample])
        except OSError as error:
            if not disk_full(error):
                raise
            raise NoSpace(
                f"no space left for {self.folder} after {len(self.samples)} samples, which are "
                "whole: make room and run the same command again"
            ) from None
        self.samples.append(sample)


def claim(folder: Path, facts: TargetFacts, *, fingerprint: str) -> list[str]:
    """Note in a folder whose data it holds, or compare with what stands there.

    Returns:
        Warnings, one line each.

    Raises:
        InvalidParameter: it holds data of another target.
    """
    path = folder / "target.json"
    mine = {**asdict(facts), "fingerprint": fingerprint}
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(mine, indent=1))
        return []
    try:
        theirs = json.loads(path.read_text())
    except ValueError:
        raise InvalidParameter(
            f"{path} is damaged; remove it if the data is {facts.name}'s"
        ) from None
    for key in ("config_hash", "tokenizer_hash", "vocab_size"):
        if theirs.get(key) != mine[key]:
            raise InvalidParameter(
                f"{folder} holds data of {theirs.get('name')} ({key} {str(theirs.get(key))[:12]}, "
                f"{facts.name} has {str(mine[key])[:12]}); use another folder (--work)"
            )
    if theirs.get("template_hash") != mine["template_hash"]:
        return [
            f"{folder} holds data of another chat template (template_hash "
            f"{str(theirs.get('template_hash'))[:12]}, now {facts.template_hash[:12]}); "
            "fewer guesses may be accepted"
        ]
    if theirs.get("fingerprint") != fingerprint:
        return [f"{folder} holds data of other weights, or weights in another precision"]
    return []


def estimate_bytes(
    folder: Path,
    config: DataConfig,
    *,
    features: tuple[int, ...],
    width: int,
    lengths: Sequence[int] | None = None,
) -> int:
    """Bytes of features that are still to be written.

    Args:
        lengths: tokens of each of a user's prompts, an upper bound then; `None` where the target
            writes them.
    """
    data = TrainingData.open(folder, features=features, width=width)
    if lengths is not None:
        answers = config.answers
        rows = sum(n + answers.max_tokens for n in lengths if n <= answers.max_prompt)
        rows = max(rows - data.store.rows, 0)
    else:
        rows = int(max(config.tokens - data.answer_tokens, 0) * ROWS_PER_TOKEN)
    return feature_bytes(rows, features=len(features), width=width)


def check_space(folder: Path, needed: int) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        NoSpace: with the numbers.
    """
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise NoSpace(
            f"the data needs about {needed / 1e9:,.2f} GB in {folder}, {free / 1e9:,.2f} GB are "
            "free: make room, give another folder (--work), want fewer tokens (--tokens), or use "
            "--online"
        )


def empty_user_turn(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The chat template up to where a user begins to write.

    Raises:
        InvalidParameter: the template has no such place.
    """
    ids = tokenizer.chat([{"role": "user", "content": ""}], add_generation_prompt=False)
    ends = [i for i, token in enumerate(ids) if token in tokenizer.end_tokens]
    if not ends:
        raise InvalidParameter(
            "this model's chat template does not end a turn with an end token, so it cannot write "
            "prompts itself; give a file of prompts (--prompts)"
        )
    return tuple(ids[: ends[-1]])


def own_turns(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    count: int,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
) -> list[TrainPrompt]:
    """User turns that the target writes itself; none where it was stopped."""
    start = empty_user_turn(tokenizer)
    draw = random.Random(seed)
    requests = []
    for _ in range(count):
        params = SamplingParams(
            temperature=draw.choice((0.8, 1.0, 1.0)),
            top_p=0.95,
            max_tokens=min(draw.choice((48, 96, 160)), engine.context - len(start)),
            seed=draw.getrandbits(63),
        )
        requests.append(engine.add(start, params))
    stopped = False
    while engine.has_work:
        engine.step()
        if not stopped and stop():
            stopped = True
            for request in requests:
                engine.cancel(request)
    answers = [engine.take(request) for request in requests]
    prompts = []
    for answer in [] if stopped else answers:
        text = tokenizer.decode(answer.tokens).strip()
        if len(text) >= 8:
            prompts.append(make_prompt("own", [{"role": "user", "content": text}]))
    return prompts


def follow_ups(
    samples: Sequence[Sample], tokenizer: Tokenizer, writer: Writer, *, count: int, seed: int
) -> list[TrainPrompt]:
    """Tasks about answers of earlier samples; never about one that is held out."""
    draw = random.Random(seed)
    usable = [s for s in samples if 24 <= len(s.answer) <= 200 and not s.held_out]
    prompts = []
    for sample in draw.sample(usable, min(count, len(usable))):
        text = tokenizer.decode(sample.answer).strip()
        prompts.append(writer.about(text))
    return prompts


class _Preparation:
    """The engine and the folder of one call of `prepare`."""

    def __init__(
        self,
        target: Target,
        tokenizer: Tokenizer,
        data: TrainingData,
        config: DataConfig,
        *,
        progress: Callable[[Progress], None] | None,
        stop: Callable[[], bool],
    ) -> None:
        self.tokenizer, self.data, self.config = tokenizer, data, config
        self._progress, self.stop = progress, stop
        self._seen = {sample.id for sample in data.samples}
        self._recorder = Recorder(data.store.features)
        answers = config.answers
        self.engine = Engine(
            target,
            drafters={RECORDER: self._recorder},
            config=EngineConfig(
                slots=config.slots,
                context=min(target.context_length, answers.max_prompt + answers.max_tokens),
                prefill_chunk=512,
                max_nodes=0,
                max_depth=0,
            ),
            budget=FixedBudget(nodes=0, depth=0),
            tokenizer=None,
        )

    def answer(
        self, found: Sequence[TrainPrompt], *, held_out: frozenset[str] | None = None
    ) -> None:
        """Answer the prompts that have no sample yet."""
        every = list(unique(found))
        fresh = [prompt for prompt in every if prompt.id not in self._seen]
        self.data.left_out = answer_all(
            self.engine,
            self.tokenizer,
            fresh,
            self.config.answers,
            sink=self._keep,
            drafter="none" if isinstance(self.data.store, OnlineFeatures) else RECORDER,
            held_out=held_out,
            progress=lambda done, tokens, seconds: self._report(
                tokens / max(seconds, 1e-9),
                share=None if held_out is None else 1 - (len(fresh) - done) / len(every),
            ),
            stop=self.stop,
        )

    def _keep(self, sample: Sample) -> None:
        if isinstance(self.data.store, OnlineFeatures):
            self.data.store.note(sample.id, sample.tokens)
            self.data.add(sample, Tensor())
        else:
            self.data.add(sample, self._recorder.take(sample.tokens))
        self._seen.add(sample.id)

    def _report(self, speed: float, *, share: float | None) -> None:
        if self._progress is None:
            return
        total, wanted = self.data.answer_tokens, self.config.tokens
        if share is not None:
            self._progress(Progress(total, 0, speed, len(self.data.samples), share))
        else:
            done = min(total / wanted, 1.0)
            self._progress(Progress(total, wanted, speed, len(self.data.samples), done))

    def _own_turns(self, number: int, seed: int) -> list[TrainPrompt]:
        """The target's own user turns of a round, kept until its end."""
        path = self.data.folder / "own-turns.json"
        config = self.config
        key = [number, seed, config.own_turns]
        if path.exists():
            kept = json.loads(path.read_text("utf-8"))
            if kept["key"] == key:
                return [make_prompt("own", turns) for turns in kept["prompts"]]
        found = own_turns(
            self.engine, self.tokenizer, count=config.own_turns, seed=seed, stop=self.stop
        )
        if not self.stop():
            kept = {"key": key, "prompts": [prompt.messages for prompt in found]}
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(kept), "utf-8")
            fresh.replace(path)
        return found

    def round(self, number: int) -> None:
        """Write one round; what it has of it already is not written again."""
        config = self.config
        seed = config.seed * 1_000_003 + number
        writer = Writer(seed)
        first = self._own_turns(number, seed)
        if self.stop():
            return
        first += [writer.task() for _ in range(config.tasks)]
        random.Random(seed).shuffle(first)
        self.answer(first)
        if self.stop():
            return
        # of this round's prompts, in their order, so that a round that was cut off ends alike
        by_id = {sample.id: sample for sample in self.data.samples}
        samples = [by_id[p.id] for p in unique(first) if p.id in by_id]
        texts = follow_ups(samples, self.tokenizer, writer, count=config.texts, seed=seed)
        self.answer(texts)


def prepare(
    target: Target,
    tokenizer: Tokenizer,
    folder: Path,
    config: DataConfig,
    *,
    features: tuple[int, ...],
    width: int,
    prompts: Sequence[TrainPrompt] | None = None,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    online: bool = False,
) -> TrainingData:
    """Write training data until there is enough (a sample that is held out among it), or until
    ``prompts`` are all answered.

    Args:
        folder: goes on with what is there.
        features, width: which hidden states to keep, and their size.
        prompts: a user's; `None` lets the target and the built-in tasks write them.
        stop: asked after every step; the data is not `complete` then.
        online: keep no features; they are computed whenever they are wanted.

    Raises:
        InvalidParameter: none of the prompts can be used, or rounds bring nothing new.
        NoSpace: the disk is full; what is there is whole.
    """
    if online:
        data = TrainingData.online(folder, target, features=features)
    else:
        data = TrainingData.open(folder, features=features, width=width)
    work = _Preparation(target, tokenizer, data, config, progress=progress, stop=stop)
    if prompts is not None:
        work.answer(prompts, held_out=held_out_ids(prompts))
        data.complete = not stop()
        if not data.samples and data.complete:
            out = data.left_out
            why = f": {out.reason}" if out.reason else ""
            raise InvalidParameter(
                f"none of {len(prompts)} prompts can be used: {out.too_long} do not fit the "
                f"context, {out.refused} are refused by the chat template{why}"
            )
        return data
    number, idle = _finished_rounds(folder), 0
    while data.answer_tokens < config.tokens or not data.split(True):
        before = len(data.samples)
        work.round(number)
        if stop():
            break
        number += 1
        _note_round(folder, number, config)
        idle = idle + 1 if len(data.samples) == before else 0
        if idle > 1:
            raise InvalidParameter(
                "two whole rounds brought no new answer (the last left out "
                f"{data.left_out.too_long} prompts that do not fit the context); change the seed, "
                "or give prompts"
            )
    data.complete = data.answer_tokens >= config.tokens and bool(data.split(True))
    return data


def _finished_rounds(folder: Path) -> int:
    path = folder / "rounds.json"
    return int(json.loads(path.read_text())["rounds"]) if path.exists() else 0


def _note_round(folder: Path, number: int, config: DataConfig) -> None:
    path = folder / "rounds.json"
    path.write_text(json.dumps({"rounds": number, "config": asdict(config)}, indent=1))
