"""Do a target and a drafter fit together? Facts of both in, rows with a remedy out.

Pure functions over `ModelFacts` and heads' configs: no file is opened and no model is run here
(`preflight_files.py` and `preflight_probe.py` do that). A row fails where guesses would be wrong or
nothing would run, warns where fewer guesses would be accepted or a person has to decide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from outrider.models.heads.config import HeadConfig, TargetFacts

Status = Literal["pass", "warn", "fail"]
STATUSES: tuple[Status, ...] = ("pass", "warn", "fail")
LISTED = 5
SMALL_ENOUGH = 0.5  # of the target's bytes: a draft model beyond this hardly pays
PERMISSIVE = ("apache-2.0", "mit", "bsd", "cc0", "cc-by-4.0", "unlicense", "isc")


@dataclass(frozen=True)
class Row:
    """One check.

    Attributes:
        name: what was checked.
        detail: what was found.
        remedy: what to do about it; empty for a pass.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class ModelFacts:
    """What is known of a model from its files.

    Attributes:
        name: how it was named.
        pieces: every token as the vocabulary spells it, by id.
        rows: of its weights' vocabulary; more than pieces is padding.
        special: special tokens by how they are written. `added`: all tokens outside the merges.
        normaliser, pre_tokeniser: as canonical JSON; empty for none.
        template_hash: of the chat template; empty without one.
        renderings: conversation's name to its tokens; `None` where the template refuses it.
        samples: text to its tokens.
        ends: ids that end an answer.
        context: positions that it was made for.
        dtype: of its weights. `nbytes`: their size on disk.
        licence: as its files tell; empty if they do not.
        hash: of its files.
        recurrent: why its cache cannot roll back; empty where it can.
    """

    name: str
    pieces: tuple[str, ...]
    rows: int
    special: Mapping[str, int]
    added: Mapping[str, int]
    normaliser: str
    pre_tokeniser: str
    template_hash: str
    renderings: Mapping[str, tuple[int, ...] | None]
    samples: Mapping[str, tuple[int, ...]]
    ends: frozenset[int]
    context: int
    dtype: str
    nbytes: int
    licence: str
    hash: str
    recurrent: str = ""


@dataclass(frozen=True)
class Report:
    """All rows, in order."""

    target: str
    drafter: str
    rows: tuple[Row, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def status(self) -> Status:
        return max((row.status for row in self.rows), key=STATUSES.index, default="pass")

    def to_dict(self) -> dict[str, Any]:
        return {
            "check": 1,
            "target": self.target,
            "drafter": self.drafter,
            "status": self.status,
            "rows": [row.to_dict() for row in self.rows],
            "facts": dict(self.facts),
        }

    def to_text(self) -> str:
        """A line per row, and the remedies of those that do not pass."""
        width = max((len(row.name) for row in self.rows), default=0)
        lines = [f"{self.drafter} for {self.target}: {self.status}"]
        for row in self.rows:
            lines.append(f"  {row.status:4}  {row.name:{width}}  {row.detail}")
            if row.remedy:
                lines.append(f"        {'':{width}}  -> {row.remedy}")
        return "\n".join(lines)


# -- a draft model ----------------------------------------------------------------------------


def compare_models(target: ModelFacts, drafter: ModelFacts) -> list[Row]:
    """Everything about a draft model that its files decide."""
    return [
        vocabulary(target, drafter),
        padding(target, drafter),
        tokens_by_name("special tokens", target.special, drafter.special, failing=True),
        tokens_by_name("added tokens", target.added, drafter.added, failing=False),
        same_json("normaliser", target.normaliser, drafter.normaliser),
        same_json("pre-tokeniser", target.pre_tokeniser, drafter.pre_tokeniser),
        sample_texts(target, drafter),
        template(target, drafter),
        rendered(target, drafter),
        stop_tokens(target, drafter),
        context_lengths(target, drafter.context, what="the draft model"),
        sizes(target, drafter),
        rollback(drafter.name, drafter.recurrent),
        licence("licence of the draft model", drafter.licence),
    ]


def vocabulary(target: ModelFacts, drafter: ModelFacts) -> Row:
    """Token by token; what only one of the two has at its end must be nothing but padding."""
    shared = min(len(target.pieces), len(drafter.pieces))
    differing = [
        f"{i}: target {a!r}, drafter {b!r}"
        for i, (a, b) in enumerate(zip(target.pieces, drafter.pieces, strict=False))
        if a != b
    ]
    longer = target if len(target.pieces) > shared else drafter
    extra = [(i, piece) for i, piece in enumerate(longer.pieces) if i >= shared and piece]
    remedy = "use a draft model with the target's own tokenizer"
    if differing:
        told = "; ".join(differing[:LISTED])
        more = f" and {len(differing) - LISTED} more" if len(differing) > LISTED else ""
        return Row(
            "vocabulary",
            "fail",
            f"{len(differing):,} of {shared:,} tokens differ ({told}{more})",
            remedy,
        )
    if extra:
        told = ", ".join(f"{i}: {piece!r}" for i, piece in extra[:LISTED])
        whose = "target" if longer is target else "drafter"
        return Row("vocabulary", "fail", f"only the {whose} has {told}", remedy)
    return Row("vocabulary", "pass", f"{shared:,} tokens are equal, each by each")


def padding(target: ModelFacts, drafter: ModelFacts) -> Row:
    """Rows of the weights that belong to no token."""
    told = ", ".join(
        f"{side}: {facts.rows:,} rows for {len(facts.pieces):,} tokens"
        for side, facts in (("target", target), ("drafter", drafter))
    )
    if any(facts.rows < len(facts.pieces) for facts in (target, drafter)):
        return Row(
            "padding rows", "fail", told, "the weights lack tokens of their tokenizer: wrong files"
        )
    if drafter.rows != target.rows:
        return Row(
            "padding rows",
            "warn",
            f"{told}: the two differ by padding alone",
            "vLLM and SGLang may want equal vocab_size in both config.json files",
        )
    return Row("padding rows", "pass", told)


def tokens_by_name(
    name: str, target: Mapping[str, int], drafter: Mapping[str, int], *, failing: bool
) -> Row:
    """Tokens that have a meaning of their own, by how they are written."""
    wrong = [
        f"{token!r}: target {target.get(token, 'none')}, drafter {drafter.get(token, 'none')}"
        for token in sorted({*target, *drafter})
        if target.get(token) != drafter.get(token)
    ]
    if not wrong:
        return Row(name, "pass", f"{len(target)} are equal")
    told = "; ".join(wrong[:LISTED])
    remedy = "give the drafter the target's tokenizer files, or use another draft model"
    return Row(name, "fail" if failing else "warn", f"{len(wrong)} differ ({told})", remedy)


def same_json(name: str, target: str, drafter: str) -> Row:
    """A part of tokenizer.json."""
    if target == drafter:
        return Row(name, "pass", "equal" if target else "both have none")
    told = f"target {_brief(target or 'none')}, drafter {_brief(drafter or 'none')}"
    return Row(name, "warn", told, "text may be cut otherwise: use the target's tokenizer files")


def sample_texts(target: ModelFacts, drafter: ModelFacts) -> Row:
    """What both tokenizers make of the same texts."""
    for text, tokens in target.samples.items():
        other = drafter.samples.get(text, ())
        if other != tokens:
            told = f"{_brief(text, 24)!r} is {list(tokens[:6])} there and {list(other[:6])} here"
            return Row("sample texts", "fail", told, "use the target's tokenizer files")
    return Row("sample texts", "pass", f"{len(target.samples)} texts give equal tokens")


def template(target: ModelFacts, drafter: ModelFacts) -> Row:
    """Chat templates by hash: the engine uses the target's for both."""
    if not target.template_hash:
        return Row("chat template", "pass", "the target has none")
    told = f"target {target.template_hash[:12]}"
    if drafter.template_hash == target.template_hash:
        return Row("chat template", "pass", told)
    other = drafter.template_hash[:12] or "none"
    return Row(
        "chat template",
        "warn",
        f"{told}, drafter {other}",
        "the target's is used; a drafter tuned on another one may guess worse: measure with it",
    )


def rendered(target: ModelFacts, drafter: ModelFacts) -> Row:
    """Conversations as each side's template writes them."""
    apart = [
        name
        for name, tokens in target.renderings.items()
        if name in drafter.renderings and drafter.renderings[name] != tokens
    ]
    refused = [name for name, tokens in target.renderings.items() if tokens is None]
    told = f"{len(target.renderings)} conversations"
    if refused:
        told += f" (the target's template refuses: {', '.join(refused)})"
    if not apart:
        return Row("rendered samples", "pass", f"{told} give equal tokens")
    return Row(
        "rendered samples",
        "warn",
        f"{told}; these differ: {', '.join(apart)}",
        "measure acceptance with the target's template before you trust other figures",
    )


def stop_tokens(target: ModelFacts, drafter: ModelFacts) -> Row:
    """Ids that end an answer."""
    told = f"target {sorted(target.ends)}, drafter {sorted(drafter.ends)}"
    if target.ends == drafter.ends:
        return Row("stop tokens", "pass", told)
    return Row(
        "stop tokens",
        "fail",
        told,
        "set eos_token_id in both generation_config.json files to the same ids",
    )


def context_lengths(target: ModelFacts, positions: int, *, what: str) -> Row:
    """How far the drafter reaches."""
    told = f"target {target.context:,} positions, {what} {positions:,}"
    if positions >= target.context:
        return Row("context lengths", "pass", told)
    return Row(
        "context lengths",
        "warn",
        told,
        f"nothing is guessed beyond {positions:,} positions: keep contexts below, or use n-gram "
        "or suffix there",
    )


def sizes(target: ModelFacts, drafter: ModelFacts) -> Row:
    """Bytes and dtypes of both."""
    share = drafter.nbytes / max(target.nbytes, 1)
    told = (
        f"target {target.nbytes / 1e6:,.0f} MB {target.dtype}, drafter {drafter.nbytes / 1e6:,.0f} "
        f"MB {drafter.dtype} ({share:.0%})"
    )
    if share <= SMALL_ENOUGH:
        return Row("size and dtype", "pass", told)
    return Row(
        "size and dtype", "warn", told, "a drafter this large hardly pays: measure before use"
    )


# -- a head -----------------------------------------------------------------------------------


def compare_head(
    target: ModelFacts,
    facts: TargetFacts,
    head: HeadConfig,
    *,
    draft_ids: Sequence[int] | None,
    stored: str,
    provenance: Mapping[str, Any],
) -> list[Row]:
    """Everything about a draft head that its files decide.

    Args:
        facts: the target's own, as `folder_facts` gives them.
        draft_ids: target ids of the draft vocabulary; `None` for the whole vocabulary.
        stored: dtype of its matrices.
    """
    return [
        binding(facts, head.target),
        features(facts, head),
        norm_flags(head),
        draft_vocabulary(target, draft_ids),
        head_template(facts, head.target),
        context_lengths(target, head.context_length, what="the head"),
        Row("dtype", "pass", f"the head's matrices are {stored}, the target's {target.dtype}"),
        licence("licence of the head", _licence_in(provenance)),
    ]


def binding(facts: TargetFacts, made_for: TargetFacts) -> Row:
    """Was the head made for this target? By sizes and hashes."""
    pairs = (
        ("width", made_for.width, facts.width),
        ("layers", made_for.layers, facts.layers),
        ("vocabulary", made_for.vocab_size, facts.vocab_size),
        ("configuration", made_for.config_hash[:12], facts.config_hash[:12]),
        ("tokenizer", made_for.tokenizer_hash[:12], facts.tokenizer_hash[:12]),
    )
    wrong = [
        f"{name} {theirs} is not {ours}"
        for name, theirs, ours in pairs
        if theirs and theirs != ours
    ]
    unknown = [name for name, theirs, _ in pairs if not theirs]
    told = f"made for {made_for.name}"
    if wrong:
        return Row(
            "binding", "fail", f"{told}: {'; '.join(wrong)}", f"use a head made for {facts.name}"
        )
    if unknown:
        return Row(
            "binding",
            "warn",
            f"{told}; its files do not tell {', '.join(unknown)}",
            "convert it with `outrider convert`, which writes the target's hashes into it",
        )
    return Row("binding", "pass", f"{told}: sizes, configuration and tokenizer agree by hash")


def features(facts: TargetFacts, head: HeadConfig) -> Row:
    """Which hidden states the head reads."""
    told = f"hidden states {list(head.features)} of 0 to {facts.layers}"
    if any(layer > facts.layers for layer in head.features):
        return Row("feature layers", "fail", told, "the target has fewer layers: wrong head")
    if head.kind == "eagle3" and len(set(head.features)) != 3:
        return Row(
            "feature layers", "warn", told, "EAGLE-3 reads three different layers as a rule: check"
        )
    return Row("feature layers", "pass", told)


def norm_flags(head: HeadConfig) -> Row:
    """Flags that change what the head computes; tools disagree about their defaults."""
    flags = {
        "norm_before_residual": head.norm_before_residual,
        "norm_before_fc": head.norm_before_fc,
        "fc_norm": head.fc_norm,
        "norm_output": head.norm_output,
        "token_residual": head.token_residual,
    }
    told = ", ".join(name for name, on in flags.items() if on) or "none set"
    if head.kind == "eagle3" and head.fc_norm != head.norm_output:
        return Row(
            "norm flags",
            "warn",
            f"{head.kind}: {told}",
            "EAGLE-3.1 sets fc_norm and norm_output together; one alone is an unusual head",
        )
    return Row("norm flags", "pass", f"{head.kind}: {told}")


def draft_vocabulary(target: ModelFacts, draft_ids: Sequence[int] | None) -> Row:
    """The map from the head's tokens to the target's."""
    name, total = "draft vocabulary map", len(target.pieces)
    if draft_ids is None:
        return Row(name, "pass", "the head guesses every token")
    outside = [i for i in draft_ids if not 0 <= i < target.rows]
    if outside or len(set(draft_ids)) != len(draft_ids):
        told = f"{len(outside)} ids outside, {len(draft_ids) - len(set(draft_ids))} named twice"
        return Row(name, "fail", told, "d2t is damaged or of another target: export the head anew")
    told = f"{len(draft_ids):,} of {total:,} tokens, each once"
    missing = sorted(target.ends - set(draft_ids))
    if missing:
        return Row(
            name,
            "warn",
            f"{told}; end tokens {missing} are not among them",
            "ends of answers are never guessed: add the end tokens when you train the next head",
        )
    return Row(name, "pass", told)


def head_template(facts: TargetFacts, made_for: TargetFacts) -> Row:
    """The chat template that the head was trained with."""
    ours, theirs = facts.template_hash[:12], made_for.template_hash[:12]
    if not theirs:
        return Row(
            "chat template",
            "warn",
            f"target {ours or 'none'}; the head's files do not tell theirs",
            "ask whoever trained it; another template costs acceptance",
        )
    if ours != theirs:
        return Row(
            "chat template",
            "warn",
            f"target {ours or 'none'}, trained with {theirs}",
            "fewer guesses may be accepted: retrain on answers rendered with this template",
        )
    return Row("chat template", "pass", f"{ours}, as in training")


def _licence_in(provenance: Mapping[str, Any]) -> str:
    """The licence that a head's provenance names."""
    for key in ("licence", "license"):
        value = provenance.get(key)
        if isinstance(value, str) and value:
            return value
    data = provenance.get("data")
    return _licence_in(data) if isinstance(data, Mapping) else ""


# -- both kinds -------------------------------------------------------------------------------


def licence(name: str, text: str) -> Row:
    """What a person has to read before this is shipped."""
    if not text:
        return Row(name, "warn", "its files name none", "find out under which terms it may be used")
    known = any(text.lower().startswith(short) for short in PERMISSIVE)
    if known:
        return Row(name, "pass", text)
    return Row(name, "warn", text, "not one of the permissive licences: read its terms")


def rollback(name: str, recurrent: str) -> Row:
    """Can guesses that were refused be taken out of the cache?"""
    if recurrent:
        return Row(
            "rollback",
            "fail",
            f"{name}: {recurrent}",
            "a state that cannot be rolled back keeps refused guesses: use another model",
        )
    return Row("rollback", "pass", f"{name}: cache rows are dropped where guesses were refused")


def memory(parts: Mapping[str, int], *, available: int, what: str) -> Row:
    """The memory plan: bytes by part against what is free (0: cannot be told)."""
    total = sum(parts.values())
    told = ", ".join(f"{name} {size / 2**20:,.0f} MB" for name, size in parts.items())
    told = f"{what}: {told}; {total / 2**20:,.0f} MB in all"
    if not available:
        return Row("memory plan", "warn", told, "what is free cannot be told here: check it")
    told += f", {available / 2**20:,.0f} MB free"
    if total > available:
        return Row("memory plan", "fail", told, "lower the slots or the context, or free memory")
    if total > 0.9 * available:
        return Row("memory plan", "warn", told, "little is left: lower the slots or the context")
    return Row("memory plan", "pass", told)


def acceptance(
    by_position: Sequence[tuple[int, int]], *, floor: float, per_step: float, fault: str = ""
) -> Row:
    """The short probe: accepted and tried guesses by position, the first against a floor.

    Args:
        by_position: (accepted, tried) at positions 1, 2, ...
        per_step: accepted guesses per step that had one.
        fault: the drafter's own error, if it failed.
    """
    name = "acceptance probe"
    if fault:
        return Row(name, "fail", fault, "the drafter fails at run time: see the error")
    tried = [(a, t) for a, t in by_position if t]
    if not tried:
        return Row(
            name,
            "warn",
            "nothing was guessed on the probe's prompts",
            "drafters that copy need text that repeats: measure on your own prompts",
        )
    shares = ", ".join(f"{a / t:.2f}" for a, t in tried)
    told = f"by position {shares}; {per_step:.2f} accepted per step ({tried[0][1]} steps)"
    if tried[0][0] / tried[0][1] < floor:
        return Row(
            name,
            "fail",
            f"{told}; the floor is {floor:g}",
            "almost nothing is accepted: wrong layers, wrong norms or a head of other weights",
        )
    return Row(name, "pass", told)


def lock(found: Mapping[str, str], locked: Mapping[str, str] | None, *, written: bool) -> Row:
    """The binding of target and drafter by hashes in a lock file.

    Args:
        found: hashes now, by name.
        locked: those of the file; `None` if there was none.
        written: this run wrote it.
    """
    told = ", ".join(f"{name} {value[:12]}" for name, value in found.items())
    if locked is None:
        if written:
            return Row("lock file", "pass", f"written: {told}")
        return Row(
            "lock file", "warn", f"none ({told})", "bind the two by --lock FILE and keep that file"
        )
    changed = [
        f"{name} was {locked.get(name, 'absent')[:12]}"
        for name, value in found.items()
        if locked.get(name) != value
    ]
    if changed:
        return Row(
            "lock file",
            "fail",
            f"{told}; {', '.join(changed)}",
            "one of the two was replaced: test the new pair, then delete the file to lock it anew",
        )
    return Row("lock file", "pass", f"as locked: {told}")


def _brief(text: str, size: int = 40) -> str:
    return text if len(text) <= size else f"{text[: size - 1]}…"
