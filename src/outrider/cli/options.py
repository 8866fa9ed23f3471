"""Options that several verbs share, each written once, and what they turn into.

This file imports nothing heavy: `outrider --help` must not load a tensor library.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.core.sampling import SamplingParams

DEFAULT_TARGET = "smollm2-135m"
DEFAULT_DRAFTER = "suffix"

# What to run.
Target = Annotated[
    str,
    typer.Argument(help="A model: an alias (see `outrider models`), a GGUF file or a directory."),
]
Drafter = Annotated[
    str,
    typer.Option(
        "--drafter",
        "-d",
        help="none, ngram, suffix, eagle3, medusa:DIR, draft_model:PATH, hybrid:suffix+eagle3, ...",
    ),
]
Rule = Annotated[
    str,
    typer.Option(help="Verification rule: walk (same tokens as plain decoding), reject or block."),
]
Context = Annotated[
    int | None,
    typer.Option(help="Most tokens of prompt and answer together. Default: what the model allows."),
]
Weights = Annotated[
    str,
    typer.Option(
        help="Precision: auto, int8, int4, bf16, fp16 or fp32. auto: int8 for quantised files, "
        "else what the device computes in."
    ),
]
Exact = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Only equal bits: native kernels, or where these cannot run one row at a time (slow).",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads. Default: one for each core that may be used.")
]

# What to say.
Prompt = Annotated[str | None, typer.Option("--prompt", "-p", help="The prompt.")]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompt-file", "-f", help="A UTF-8 file that holds the prompt; - for stdin."),
]
System = Annotated[str | None, typer.Option(help="A system message before the prompt.")]
Raw = Annotated[bool, typer.Option("--raw", help="Give the prompt as it is, no chat template.")]

# How to sample.
Temperature = Annotated[
    float, typer.Option("--temperature", "-t", help="0 takes the likeliest token each time.")
]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens of this mass, in (0, 1].")]
MinP = Annotated[float, typer.Option(help="Keep tokens this fraction as likely as the likeliest.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1 makes seen tokens less likely.")]
PresencePenalty = Annotated[float, typer.Option(help="Subtracted from logits of seen tokens.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Subtracted once per occurrence.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")]
Stop = Annotated[
    list[str] | None, typer.Option(help="A string that ends the answer; may be repeated.")
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on past the model's own end of text.")
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same tokens. Default: a fresh one.")
]

# What to print.
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, for machines.")]
Records = Annotated[
    Path | None, typer.Option(help="Write JSON lines about every step to this new file.")
]


def sampling(
    *,
    temperature: float,
    max_tokens: int,
    seed: int | None,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    stop: list[str] | None = None,
    ignore_eos: bool = False,
) -> SamplingParams:
    """The request's parameters, checked before any model is loaded.

    Raises:
        InvalidParameter: a value is out of range.
    """
    from outrider.core.sampling import SamplingParams

    return SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        max_tokens=max_tokens,
        seed=seed,
    )


def one_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from the option, the file or standard input, whichever was given.

    Raises:
        InvalidParameter: none or two were given, the file cannot be read, is not UTF-8, or the
            prompt is empty.
    """
    if prompt is not None and prompt_file is not None:
        raise InvalidParameter("--prompt and --prompt-file were both given; use one of them")
    if prompt is not None:
        text = prompt
    elif prompt_file is not None:
        text = _read(prompt_file)
    else:
        raise InvalidParameter("no prompt; use --prompt TEXT, --prompt-file FILE or -f - for stdin")
    if not text.strip():
        raise InvalidParameter("the prompt is empty; give at least one word")
    return text


def messages(prompt: str, *, system: str | None) -> list[dict[str, str]]:
    """A conversation of one turn, as a chat template wants it."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return [*first, {"role": "user", "content": prompt}]


def _read(path: Path) -> str:
    """A file's text, or standard input's for ``-``."""
    name = "standard input" if str(path) == "-" else str(path)
    try:
        data = typer.get_binary_stream("stdin").read() if str(path) == "-" else path.read_bytes()
        return data.decode("utf-8")
    except OSError as error:
        raise InvalidParameter(
            f"prompt file {name} cannot be read: {error.strerror}; check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidParameter(
            f"prompt file {name} is not UTF-8 (byte {error.start}); convert it to UTF-8"
        ) from error


def check_writable(path: Path) -> None:
    """Refuse a place for results before the work is done, not after. Creates nothing.

    Raises:
        InvalidParameter: it is a folder, or nothing can be written there.
    """
    folder = path.parent
    if path.is_dir():
        reason = "it is a folder"
    elif not folder.is_dir():
        reason = f"there is no folder {folder}"
    elif not os.access(path if path.exists() else folder, os.W_OK):
        reason = "permission denied"
    else:
        return
    raise InvalidParameter(f"{path} cannot be written: {reason}; choose another path")


def write_file(path: Path, text: str) -> None:
    """Write a file that the user named.

    Raises:
        InvalidParameter: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidParameter(
            f"{path} cannot be written: {error.strerror}; choose another path"
        ) from error
