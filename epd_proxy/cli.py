"""
``epd-proxy``: ``serve`` runs the proxy, ``simulate`` an engine to try it on, ``demo`` a fleet.

A value comes from the flag, else ``EPD_PROXY_<FLAG>``, else vLLM's own variable where there is
one, else the ``--config`` file, else the default. The flags of the proxy are the fields of
``Config``, those of the server are uvicorn's own.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
import uvicorn

import epd_proxy
from epd_proxy import demo
from epd_proxy.app import EPDProxy
from epd_proxy.config import Config, flag_name, flag_of
from epd_proxy.errors import ConfigError, ProxyError
from epd_proxy.servers import check
from epd_proxy.simulator import Simulator
from epd_proxy.workers import Service, run

_PROGRAM = "epd-proxy"
_LOCALHOST = "127.0.0.1"
_ROLES = ("encode", "prefill", "decode")
_FILE = "epd_proxy.file"
"""Where a context keeps the path of its configuration file."""


def main(args: Sequence[str] | None = None) -> int:
    """The command line, with its exit status: 2 for wrong words, told in one line."""
    try:
        return cli.main(args, prog_name=_PROGRAM, standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as exc:
        click.echo(exc.format_message(), err=True)
    except click.ClickException as exc:
        click.echo(f"{_PROGRAM}: {' '.join(exc.format_message().split())}", err=True)
    except ConfigError as exc:
        click.echo(f"{_PROGRAM}: {exc}", err=True)
    except click.Abort:
        return 130
    return 2


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(epd_proxy.__version__, prog_name=_PROGRAM)
def cli() -> None:
    """One OpenAI-compatible server in front of vLLM's encode, prefill and decode servers."""


def _option_of(field: msgspec.structs.FieldInfo) -> click.Option:
    """The flag that sets a field of ``Config``."""
    flag = flag_of(field)
    names = [flag_name(field.name), *([flag.alias] if flag.alias else [])]
    variables = [_variable(name) for name in names] + ([flag.env] if flag.env else [])
    switch = isinstance(field.default, bool)
    default = "" if switch or flag.many or not field.default else f"  [default: {field.default}]"
    return click.Option(
        [*names, field.name],
        envvar=variables,
        help=flag.help + default,
        is_flag=switch or None,
        multiple=flag.many,
        # The text is for `Config` to convert, wherever it comes from.
        type=click.BOOL if switch else click.UNPROCESSED,
        metavar=None if switch else "VALUE",
    )


def _uvicorn_options() -> list[click.Option]:
    """``--ssl-*``, ``--uds`` and ``--log-level``, which are uvicorn's to know."""
    found = []
    for option in uvicorn.main.params:
        name = option.name or ""
        if isinstance(option, click.Option) and (
            name in ("uds", "log_level") or name.startswith("ssl_")
        ):
            ours = copy.copy(option)
            ours.envvar = _variable(flag_name(name))
            found.append(ours)
    return found


def _server_options(port: int) -> list[click.Option]:
    return [
        click.Option(
            ["--host"],
            default=_LOCALHOST,
            show_default=True,
            envvar=_variable("--host"),
            help="address to listen on",
        ),
        click.Option(
            ["--port"],
            default=port,
            show_default=True,
            type=click.IntRange(0, 65535),
            envvar=_variable("--port"),
            help="port to listen on; 0: any that is free",
        ),
    ]


def _variable(flag: str) -> str:
    return "EPD_PROXY_" + flag.removeprefix("--").replace("-", "_").upper()


def _read_file(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Makes the values of a TOML file the defaults of this command."""
    if path is None:
        return
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise click.BadParameter(f"{path}: {exc}", context, option) from None
    context.default_map = _known(values, path, context, option)
    context.meta[_FILE] = path


def _known(
    values: Mapping[str, Any], path: Path, context: click.Context, option: click.Parameter
) -> dict[str, Any]:
    options = {
        spelling.removeprefix("--").replace("-", "_"): param
        for param in context.command.params
        if param is not option
        for spelling in param.opts
    }
    known: dict[str, Any] = {}
    for key, value in values.items():
        if key not in options:
            raise click.BadParameter(f"{path}: unknown key {key!r}", context, option)
        target = options[key]
        wants_list = target.multiple and not isinstance(value, list)
        known[target.name or key] = [value] if wants_list else value
    return known


_PROCESS_OPTIONS = [
    click.Option(
        ["--workers"],
        default=1,
        show_default=True,
        type=click.IntRange(min=1),
        envvar=_variable("--workers"),
        help="processes",
    ),
    click.Option(
        ["--shutdown-delay"],
        default=0.0,
        show_default=True,
        type=click.FloatRange(min=0),
        envvar=_variable("--shutdown-delay"),
        help="seconds for which requests are still taken after SIGTERM, while /health is red",
    ),
    click.Option(
        ["--graceful-timeout"],
        default=30.0,
        show_default=True,
        type=click.FloatRange(min=0),
        envvar=_variable("--graceful-timeout"),
        help="seconds after that in which running requests may finish",
    ),
]

_CONFIG_FILE = click.Option(
    ["--config"],
    type=click.Path(dir_okay=False, path_type=Path),
    envvar=_variable("--config"),
    callback=_read_file,
    expose_value=False,
    is_eager=True,
    help="TOML file; its keys are the flags with underscores, instances are [[encode]] tables",
)


def serve(**values: Any) -> int:
    """Run the proxy."""
    given = _given(values)
    given.update(_keep_alive_of_engines())
    fields = {field.name for field in msgspec.structs.fields(Config)}
    config = Config(**{name: value for name, value in given.items() if name in fields})
    workers, delay = values["workers"], values["shutdown_delay"]
    if workers > 1 and config.dynamic_registration and not config.registry:
        reason = "engines would register with one of them alone: give them a --registry"
        raise ConfigError("--workers", reason)
    names = {name for name in given if name not in fields} - {"workers", "shutdown_delay"}
    options = {name: values[name] for name in names - {"graceful_timeout"}}
    options |= {"host": values["host"], "port": values["port"]}
    check(EPDProxy(config=config), options)
    options["timeout_graceful_shutdown"] = values["graceful_timeout"]
    options["log_config"] = _logging(options.get("log_level") or "info")
    return run(Service(config, options, _file_of(config), delay), workers)


class Reread:
    """
    Reads the configuration file again.

    ``roles`` are those whose instances it may set, ``known`` the keys that it may hold.
    """

    def __init__(self, config: Config, roles: Sequence[str], known: Collection[str]) -> None:
        self._config = config
        self._roles = roles
        self._known = known

    def __call__(self, path: Path) -> Config:
        """Raises ValueError, OSError."""
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        if unknown := values.keys() - set(self._known):
            raise ValueError(f"unknown keys {', '.join(sorted(unknown))}")
        fields = {name: getattr(self._config, name) for name in self._config.__struct_fields__}
        for role in self._roles:
            fields[role] = values.get(role, values.get(f"{role}_servers_urls", ()))
        return Config(**fields)


def _file_of(config: Config) -> tuple[Path, Reread] | None:
    context = click.get_current_context()
    path = context.meta.get(_FILE)
    if path is None:
        return None
    below = (click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)
    roles = [role for role in _ROLES if context.get_parameter_source(role) in below]
    spellings = [spelling for option in context.command.params for spelling in option.opts]
    known = [spelling.removeprefix("--").replace("-", "_") for spelling in spellings]
    return path, Reread(config, roles, known)


def _keep_alive_of_engines() -> dict[str, float]:
    """Half of what vLLM's own variable says, unless something nearer was said."""
    name = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
    source = click.get_current_context().get_parameter_source("keep_alive")
    nearer = (click.core.ParameterSource.COMMANDLINE, click.core.ParameterSource.ENVIRONMENT)
    if source in nearer or name not in os.environ:
        return {}
    try:
        return {"keep_alive": float(os.environ[name]) / 2}
    except ValueError:
        raise ConfigError(name, f"{os.environ[name]!r} is no number of seconds") from None


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without what nobody said."""
    source = click.get_current_context().get_parameter_source
    default = click.core.ParameterSource.DEFAULT
    return {name: value for name, value in values.items() if source(name) is not default}


def _logging(level: str) -> dict[str, Any]:
    """uvicorn's logging, and the proxy's own lines in the same form."""
    found = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    own = {"handlers": ["default"], "level": level.upper(), "propagate": False}
    found["loggers"]["epd_proxy"] = own
    # The proxy has told in a line of its own why it broke an answer off.
    found["filters"] = {"told": {"()": _filter}}
    found["handlers"]["default"]["filters"] = ["told"]
    return found


def _was_not_told(record: logging.LogRecord) -> bool:
    told = ProxyError | asyncio.CancelledError
    return not (record.exc_info and isinstance(record.exc_info[1], told))


def _filter() -> Callable[[logging.LogRecord], bool]:
    return _was_not_told


def simulate(role: str, host: str, port: int, model: str, latency_ms: float, chunks: int) -> None:
    """Run one scripted engine, which behaves and refuses as vLLM would, without a GPU."""
    engine = Simulator(
        role, model=model, latency=latency_ms / 1e3, chunks=chunks, name=f"{role}-{port}"
    )
    check(engine, {"host": host, "port": port})
    uvicorn.run(engine, host=host, port=port, log_level="info", access_log=False)


_LATENCY = click.Option(
    ["--latency-ms"],
    type=click.FloatRange(min=0),
    default=0.0,
    show_default=True,
    help="milliseconds an engine takes before it answers",
)
_CHUNKS = click.Option(
    ["--chunks"],
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="content chunks of a streamed answer",
)

cli.add_command(
    click.Command(
        "serve",
        callback=serve,
        params=[
            *_server_options(8000),
            *_PROCESS_OPTIONS,
            *map(_option_of, msgspec.structs.fields(Config)),
            _CONFIG_FILE,
            *_uvicorn_options(),
        ],
        help=serve.__doc__,
    )
)
cli.add_command(
    click.Command(
        "simulate",
        callback=simulate,
        params=[
            click.Option(
                ["--role"],
                required=True,
                type=click.Choice(["encode", "prefill", "decode", "prefill_decode"]),
                help="what the engine does",
            ),
            *_server_options(8100),
            click.Option(
                ["--model"], default="*", show_default=True, help="model it serves; *: any"
            ),
            _LATENCY,
            _CHUNKS,
        ],
        help=simulate.__doc__,
    )
)
cli.add_command(
    click.Command(
        "demo",
        callback=demo.main,
        params=[
            *_server_options(8000),
            click.Option(["--once"], is_flag=True, help="exit after the first answer"),
        ],
        help=demo.main.__doc__,
    )
)
