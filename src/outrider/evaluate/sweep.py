"""Runs cells: every setting at every temperature and load, on the same prompts in the same order.

An evaluation is a sweep with one setting. The order of the settings rotates from turn to turn, so
that a change of the machine's load hits all alike; the baseline leads the first turn, so that the
others can be judged while they run. What is hopeless is cut short, and says why.

It opens engines through what it is given and knows none of them.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from outrider.backends.base import Acceptance, Ask, Backend, EngineInfo, between
from outrider.backends.settings import BASELINE, Setting
from outrider.errors import InvalidParameter
from outrider.evaluate.load import Job, Load, Outcome, Shot, run_load
from outrider.evaluate.recommend import paired
from outrider.evaluate.runs import RunWriter, Where, sample
from outrider.evaluate.sets import EvaluationSet, Item
from outrider.evaluate.statistics import speedup

HOPELESS = 0.95
HOPELESS_AFTER = 8
HOPELESS_RESAMPLES = 500

Opener = Callable[[Setting], AbstractAsyncContextManager[Backend]]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class SweepPlan:
    """What to run.

    Attributes:
        sets: loaded ones; ids must differ among them.
        settings: the baseline first, where one is wanted.
        loads, temperatures: see `Load`; an item's own temperature wins.
        repeats: rounds; each asks every prompt once more.
        max_tokens: of answers whose prompt does not say.
        seed: of the requests that have none, and of the order.
        early_stop: cut hopeless settings short.
        keep_text: prompts and answers go into the record.
    """

    sets: tuple[EvaluationSet, ...]
    settings: tuple[Setting, ...]
    loads: tuple[Load, ...] = (Load(),)
    temperatures: tuple[float, ...] = (0.0,)
    repeats: int = 1
    max_tokens: int = 128
    seed: int = 0
    early_stop: bool = True
    keep_text: bool = False

    def __post_init__(self) -> None:
        for name in ("sets", "settings", "loads", "temperatures"):
            if not getattr(self, name):
                raise InvalidParameter(f"a sweep needs {name}; got none")
        if self.repeats < 1:
            raise InvalidParameter(f"repeats is {self.repeats}; use 1 or more")
        names = [setting.name for setting in self.settings]
        for what, values in (
            ("setting", names),
            ("load", [load.name for load in self.loads]),
            ("prompt id", [item.prompt.id for _, item in self.items]),
        ):
            twice = sorted({value for value in values if values.count(value) > 1})
            if twice:
                raise InvalidParameter(f"{what} {twice[0]!r} is there twice; give each once")

    @property
    def items(self) -> list[tuple[str, Item]]:
        """(kind of its set, item), all sets."""
        return [(found.kind, item) for found in self.sets for item in found.items]

    @property
    def cells(self) -> list[tuple[Setting, float, Load]]:
        return [(s, t, x) for s in self.settings for t in self.temperatures for x in self.loads]

    @property
    def requests(self) -> int:
        return len(self.cells) * len(self.items) * self.repeats

    def to_dict(self) -> dict[str, Any]:
        """What decides the numbers; two runs are compared by it."""
        return {
            "sets": [
                {"name": s.name, "version": s.version, "kind": s.kind, "prompts": len(s.items)}
                | {"fingerprint": s.fingerprint}
                for s in self.sets
            ],
            "settings": {s.name: s.to_dict() for s in self.settings},
            "loads": [asdict(load) for load in self.loads],
            "temperatures": list(self.temperatures),
            "repeats": self.repeats,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "early_stop": self.early_stop,
        }

    def to_text(self) -> str:
        """The plan for people, as `--dry-run` prints it."""
        sets = ", ".join(f"{s.name} ({len(s.items)} prompts, {s.kind})" for s in self.sets)
        lines = [
            f"sets: {sets}",
            f"settings: {', '.join(s.name for s in self.settings)}",
            f"loads: {', '.join(load.name for load in self.loads)}",
            f"temperatures: {', '.join(f'{t:g}' for t in self.temperatures)}",
            f"{len(self.cells)} cells x {len(self.items)} prompts x {self.repeats} rounds = "
            f"{self.requests} requests, warm-up not counted",
        ]
        return "\n".join(lines)


@dataclass
class _State:
    """What is known while a sweep runs."""

    samples: dict[tuple[str, float, str], list[Mapping[str, Any]]] = field(default_factory=dict)
    hopeless: dict[tuple[str, float], str] = field(default_factory=dict)
    warm: set[tuple[str, float, str]] = field(default_factory=set)

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> _State:
        """What the lines of a run that goes on tell."""
        state = cls()
        for line in lines:
            if line.get("kind") == "sample" and not line.get("error"):
                state.add(line)
            elif line.get("kind") == "cell" and str(line.get("stopped")).startswith("hopeless"):
                state.hopeless[line["setting"], line["temperature"]] = line["stopped"]
        return state

    def add(self, line: Mapping[str, Any]) -> None:
        key = (line["setting"], line["temperature"], line["load"])
        self.samples.setdefault(key, []).append(line)


async def run_sweep(
    plan: SweepPlan,
    open_engine: Opener,
    writer: RunWriter,
    *,
    progress: Progress,
    slice_size: int | None = None,
) -> None:
    """Run what is not there yet, and write every sample as it comes.

    Args:
        slice_size: so many prompts are asked of a setting before the next has its turn, all engines
            staying open; `None` asks a whole round of each and opens one engine at a time. Short
            slices keep a change of the machine's load out of the comparison.

    Raises:
        EngineUnfit: an engine cannot be opened.
        RecordFileError: the disk is full.
    """
    state = _State.of(writer.earlier)
    async with AsyncExitStack() as stack:
        engines = _Engines(open_engine, stack if slice_size is not None else None)
        for number in range(plan.repeats):
            for part, items in enumerate(_slices(plan, number, slice_size)):
                turn = (number + part) % len(plan.settings)
                for setting in plan.settings[turn:] + plan.settings[:turn]:
                    place = _Place(setting, number, part, items)
                    await _setting(plan, place, engines, writer, state, progress)


@dataclass
class _Engines:
    """Opens engines; with a stack, each once and until the stack is left."""

    open_engine: Opener
    stack: AsyncExitStack | None
    opened: dict[str, Backend] = field(default_factory=dict)

    @asynccontextmanager
    async def use(self, setting: Setting) -> AsyncIterator[Backend]:
        if self.stack is None:
            async with self.open_engine(setting) as backend:
                yield backend
            return
        if setting.name not in self.opened:
            opened = await self.stack.enter_async_context(self.open_engine(setting))
            self.opened[setting.name] = opened
        yield self.opened[setting.name]


@dataclass(frozen=True)
class _Place:
    """Whose turn it is, with which prompts."""

    setting: Setting
    round: int
    part: int
    items: Sequence[tuple[str, Item]]


def _slices(plan: SweepPlan, number: int, size: int | None) -> list[Sequence[tuple[str, Item]]]:
    """The prompts of a round in its order, the same for all settings, in slices."""
    items = plan.items
    random.Random(f"{plan.seed}/{number}").shuffle(items)
    step = len(items) if size is None else size
    return [items[start : start + step] for start in range(0, len(items), step)]


async def _setting(
    plan: SweepPlan,
    place: _Place,
    engines: _Engines,
    writer: RunWriter,
    state: _State,
    progress: Progress,
) -> None:
    """All cells of a setting in one turn, on one engine."""
    setting = place.setting
    todo = [
        (where, load, items)
        for temperature in plan.temperatures
        for load in plan.loads
        if (items := _missing(place, where := _where(setting, temperature, load), writer))
    ]
    if not todo:
        return
    async with engines.use(setting) as backend:
        for where, load, items in todo:
            reason = state.hopeless.get((setting.name, where.temperature))
            if reason is not None:
                writer.write(_skipped(where, place, reason))
                progress(f"{where.setting} {where.load}: skipped, {reason}")
                continue
            progress(
                f"{where.setting} {where.load} temperature {where.temperature:g}: "
                f"{len(items)} prompts, round {place.round + 1} of {plan.repeats}"
            )
            here = replace(load, warm_up=0) if where.key() in state.warm else load
            state.warm.add(where.key())
            await _cell(plan, place, where, here, items, backend, writer, state)


def _where(setting: Setting, temperature: float, load: Load) -> Where:
    return Where(setting.name, temperature, load.name, load.concurrency)


def _missing(place: _Place, where: Where, writer: RunWriter) -> list[tuple[str, Item]]:
    """The prompts of a turn that have no sample yet."""
    return [
        (kind, item)
        for kind, item in place.items
        if not writer.has(where, item.prompt.id, place.round)
    ]


async def _cell(
    plan: SweepPlan,
    place: _Place,
    where: Where,
    load: Load,
    items: Sequence[tuple[str, Item]],
    backend: Backend,
    writer: RunWriter,
    state: _State,
) -> None:
    by_id = {item.prompt.id: (kind, item) for kind, item in items}
    usual = Ask("", max_tokens=plan.max_tokens, temperature=where.temperature, seed=plan.seed)
    jobs = [Job(item.prompt.id, place.round, item.ask(usual)) for _, item in items]

    def done(shot: Shot) -> None:
        kind, item = by_id[shot.job.key]
        here = Where(where.setting, where.temperature, where.load, where.concurrency, kind)
        line = sample(shot, item, here, backend.info, text=plan.keep_text)
        writer.write(line)
        state.add(line)

    def stop() -> str:
        return _hopeless(where, state) if plan.early_stop else ""

    outcome = await run_load(backend, jobs, load, done=done, stop=stop)
    if outcome.stopped and plan.early_stop and outcome.stopped.startswith("hopeless"):
        state.hopeless[where.setting, where.temperature] = outcome.stopped
    writer.write(_cell_line(where, place, outcome, backend.info))


def _hopeless(where: Where, state: _State) -> str:
    """Why a cell need not go on: it is surely slower, and more load will not help it."""
    mine = state.samples.get(where.key(), [])
    plain = state.samples.get((BASELINE, where.temperature, where.load), [])
    if where.setting == BASELINE or len(mine) < HOPELESS_AFTER or len(mine) % 4:
        return ""
    pairs = paired(plain, mine)
    if len(pairs) < HOPELESS_AFTER:
        return ""
    interval = speedup(pairs, samples=HOPELESS_RESAMPLES).total.interval
    if interval is None or interval.high >= HOPELESS:
        return ""
    return f"hopeless: at most {interval.high:.2f}x after {len(pairs)} pairs"


def _skipped(where: Where, place: _Place, reason: str) -> dict[str, Any]:
    return {**_head(where, place), "stopped": f"skipped, {reason}"}


def _head(where: Where, place: _Place) -> dict[str, Any]:
    return {
        "kind": "cell",
        "setting": where.setting,
        "temperature": where.temperature,
        "load": where.load,
        "concurrency": where.concurrency,
        "round": place.round,
        "part": place.part,
    }


def _cell_line(where: Where, place: _Place, outcome: Outcome, info: EngineInfo) -> dict[str, Any]:
    """What was found around a cell."""
    fine = [s.answer for s in outcome.shots if s.answer.error is None]
    tokens = sum(answer.completion_tokens or 0 for answer in fine)
    line: dict[str, Any] = {
        **_head(where, place),
        "engine": info.kind,
        "version": info.version,
        "model": info.model,
        "wall_s": round(outcome.wall_s, 4),
        "requests": len(outcome.shots),
        "output_tokens": tokens,
        "stopped": outcome.stopped,
        "late_ms_max": round(1000 * max(outcome.late_s, default=0.0), 2),
        "peak_cache_use": outcome.peak_cache_use,
        "peak_waiting": outcome.peak_waiting,
        "notes": [*info.notes, *outcome.notes],
    }
    if outcome.before is not None and outcome.after is not None:
        found, why = between(outcome.before, outcome.after, engine=info.kind)
        line["counters"] = {"missing": why} if found is None else _counted(found)
    return line


def _counted(found: Acceptance) -> dict[str, Any]:
    """Acceptance of the whole cell by the engine's counters."""
    positions = found.positions()
    return {
        "accepted": found.accepted,
        "drafted": found.drafted,
        "draft_steps": found.steps,
        "accepted_by_position": None if positions is None else list(positions),
    }
