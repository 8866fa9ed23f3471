"""`outrider serve`: the OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli import options
from outrider.cli.session import Session, check_drafter
from outrider.errors import InvalidParameter

if TYPE_CHECKING:
    from outrider.rollout.config import RolloutConfig
    from outrider.serve.config import ServerConfig

What = Annotated[
    str | None, typer.Argument(help="A model, or a YAML file that describes a server or a rollout.")
]
Drafter = Annotated[
    str | None,
    typer.Option(
        "--drafter",
        "-d",
        help="Serve one speculative profile of this drafter, as the default beside baseline.",
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on. Default: 127.0.0.1.")]
Port = Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")]
AdminPort = Annotated[
    int | None, typer.Option(help="Serve /metrics on this port of its own, not with the API.")
]
Slots = Annotated[int | None, typer.Option(help="Requests that run at once. Default: 16.")]
LogJson = Annotated[bool, typer.Option("--log-json", help="Log lines are JSON objects.")]
LogLevel = Annotated[str | None, typer.Option(help="debug, info, warning or error.")]
Ui = Annotated[bool, typer.Option("--ui", help="Serve a page to try the model with, at /ui.")]
HashKey = Annotated[
    bool, typer.Option("--hash-key", help="Read an API key from stdin, print its hash, and end.")
]


def serve(
    context: typer.Context,
    what: What = None,
    drafter: Drafter = None,
    host: Host = None,
    port: Port = None,
    admin_port: AdminPort = None,
    slots: Slots = None,
    context_length: options.Context = None,
    weights: Annotated[str | None, typer.Option(help="Precision, as for generate.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    exact: options.Exact = False,
    threads: options.Threads = None,
    ui: Ui = False,
    log_level: LogLevel = None,
    log_json: LogJson = False,
    hash_key: HashKey = False,
) -> None:
    """Serve a model to OpenAI clients; Ctrl-C finishes what is under way and ends."""
    session: Session = context.obj
    if hash_key:
        _print_hash(session)
        return
    if what is None:
        raise InvalidParameter("nothing to serve; name a model or a YAML file")
    given = {
        "host": host,
        "port": port,
        "admin_port": admin_port,
        "weights": weights,
        "device": device,
        "exact": exact or None,
        "ui": ui or None,
        "log_level": log_level,
        "log_json": log_json or None,
    }
    engine = {"slots": slots, "context": context_length}
    if _describes_rollout(what):
        _run_rollout(
            session, Path(what), drafter=drafter, given=given, engine=engine, threads=threads
        )
        return
    from outrider.serve.run import check_tls

    config = configuration(what, drafter=drafter, given=given, engine=engine)
    check_tls(config.tls)
    _check_ports(config)
    for profile in config.profiles.values():
        check_drafter(profile.drafter)
    _run(session, config, threads=threads)


def configuration(
    what: str, *, drafter: str | None, given: dict[str, Any], engine: dict[str, Any]
) -> ServerConfig:
    """The server's configuration: a file's or a model's, with what the command line says on top.

    Raises:
        InvalidParameter: the file or an option is wrong.
    """
    from outrider.serve.config import load_config, make_config
    from outrider.serve.keys import keys_from_environment

    from_file = Path(what).suffix in (".yaml", ".yml")
    values: dict[str, Any] = {"target": what}
    if from_file:
        values = load_config(Path(what)).model_dump(mode="json", exclude_unset=True)
    values |= {name: value for name, value in given.items() if value is not None}
    said = {name: value for name, value in engine.items() if value is not None}
    values["engine"] = {**values.get("engine", {}), **said}
    if drafter is not None:
        name = drafter.partition(":")[0].replace("_", "-")
        profiles = values.setdefault("profiles", {})
        profiles[name] = {**profiles.get(name, {}), "drafter": drafter}
        values["default_profile"] = name
    keys = [key.model_dump() for key in keys_from_environment()]
    if keys:
        values["keys"] = [*values.get("keys", ()), *keys]
    return make_config(values, source=what if from_file else "options")


def _check_ports(config: ServerConfig | RolloutConfig) -> None:
    """A port that is taken is told before a model is loaded."""
    from outrider.serve.run import check_ports

    places = [(config.host, config.port)]
    if config.admin_port is not None:
        places.append((config.admin_host, config.admin_port))
    check_ports(places)


def _describes_rollout(what: str) -> bool:
    """Is it a file with profiles that are rolled out, and not of a single server?"""
    path = Path(what)
    if path.suffix not in (".yaml", ".yml"):
        return False
    import yaml

    from outrider.rollout.config import is_rollout

    try:
        return is_rollout(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return False  # `configuration` says what is wrong with it


PORTS = ("host", "port", "admin_port")
OF_ENGINE = ("weights", "device", "exact")


def _run_rollout(
    session: Session,
    path: Path,
    *,
    drafter: str | None,
    given: dict[str, Any],
    engine: dict[str, Any],
    threads: int | None,
) -> None:
    """The gateway, with the embedded engine behind it where a profile wants that."""
    import uvloop

    from outrider.evaluate.redact import Redactor
    from outrider.rollout.config import load_rollout
    from outrider.serve.gateway.engines import embedded_config
    from outrider.serve.gateway.run import serve_rollout
    from outrider.serve.logs import set_up_logs
    from outrider.serve.service import Service

    if drafter is not None or given["ui"]:
        raise InvalidParameter("--drafter and --ui are for a server; a rollout's file says it all")
    config = load_rollout(path)
    said = {name: given[name] for name in PORTS if given[name] is not None}
    config = config.model_copy(update=said)
    _check_ports(config)
    options: dict[str, Any] = {n: given[n] for n in OF_ENGINE if given[n] is not None}
    options["engine"] = {name: value for name, value in engine.items() if value is not None}
    embedded, server = None, embedded_config(config, options)
    set_up_logs(level=given["log_level"] or "info", as_json=bool(given["log_json"]))
    if server is not None:
        for profile in server.profiles.values():
            check_drafter(profile.drafter)
        loaded = session.model(
            server.target,
            weights=server.weights,
            device=server.device,
            exact=server.exact,
            threads=threads,
        )
        embedded = Service(server, loaded)
    session.err.print(
        f"profiles: {', '.join(config.profiles)}; page at "
        f"http://{config.admin_host}:{config.admin_port}/ui/rollout",
        markup=False,
    )

    def listening(address: str) -> None:
        session.err.print(f"listening on {address}", markup=False)

    redactor = Redactor()

    def redact(text: str) -> str:
        return redactor.conversation([text])[0]

    uvloop.run(
        serve_rollout(config, source=path, embedded=embedded, listening=listening, redact=redact)
    )


def _print_hash(session: Session) -> None:
    from outrider.serve.keys import hash_key

    key = typer.get_text_stream("stdin").readline().strip()
    if len(key) < 8:
        raise InvalidParameter("the key on stdin has fewer than 8 characters; use a longer one")
    session.out.print(hash_key(key), markup=False)


def _run(session: Session, config: ServerConfig, *, threads: int | None) -> None:
    import uvloop

    from outrider.serve.logs import set_up_logs
    from outrider.serve.run import serve as serve_until_told
    from outrider.serve.service import Service

    loaded = session.model(
        config.target,
        weights=config.weights,
        device=config.device,
        exact=config.exact,
        threads=threads,
    )
    set_up_logs(level=config.log_level, as_json=config.log_json)
    service = Service(config, loaded)
    page = " (try it at /ui)" if config.ui else ""
    names = ", ".join(f"{config.served_name}@{p}" for p in config.profile_names)
    models = f"models: {config.served_name} = @{config.default}; {names}{page}"
    session.err.print(models, markup=False)
    if not config.keys and config.host not in ("127.0.0.1", "localhost", "::1"):
        session.err.print(
            f"warning: {config.host} is open to others and no keys are set", markup=False
        )

    def listening(address: str) -> None:
        session.err.print(f"listening on {address}", markup=False)

    uvloop.run(serve_until_told(service, listening=listening))
