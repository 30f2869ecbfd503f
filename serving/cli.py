"""The `kvrelay` command.

    kvrelay serve [CONFIG]    a Ray of its own on this machine, with CONFIG deployed on it, until Ctrl-C
    kvrelay check CONFIG      validate, start nothing; find what cannot work and what is wasted
    kvrelay capacity CONFIG   weights, KV and sequences of each pool, and which limit binds
    kvrelay env [CONFIG]      what to export before `ray start` on each node of a cluster of your own
    kvrelay models            the names that `weights` knows
    kvrelay prepare NAME      make a model's files ready on this machine
    kvrelay admin VERB        operate a running application: drain workers, shift traffic, settings

Exit codes: 0 stopped or done; 1 it was refused or failed; 2 the command or the configuration is wrong, or
names what is not there.
Imports are lazy: `--help` answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from serving import __version__, admin_command
from serving.errors import ConfigError, KVRelayError

if TYPE_CHECKING:
    from serving.preflight import Plan


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except ConfigError as error:
        print(f"kvrelay: {error.message}", file=sys.stderr)
        return 2
    except KVRelayError as error:
        print(f"kvrelay: {error.message}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, `head` perhaps, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvrelay", description="LLM serving on Ray, prefill and decode apart."
    )
    parser.add_argument("--version", action="version", version=f"kvrelay {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a configuration on this machine until Ctrl-C")
    serve.add_argument(
        "config", nargs="?", default="quickstart", help="a file, or a shipped name (%(default)s)"
    )
    serve.add_argument(
        "--port", type=_number(int, 1, 65535), help="HTTP port; default: the configuration's"
    )
    serve.add_argument("--host", help="interface to listen on; default: the configuration's")
    serve.add_argument(
        "--cpus", type=_number(float, 0), help="CPUs the pools may use; default: this machine's"
    )
    serve.set_defaults(run=_serve)

    check = commands.add_parser("check", help="validate a configuration, start nothing")
    check.add_argument("config", nargs="+", help="files, or shipped names")
    _add_sizing(check)
    check.set_defaults(run=_check)

    capacity = commands.add_parser("capacity", help="what each pool of a configuration holds")
    capacity.add_argument("config", help="a file, or a shipped name")
    _add_sizing(capacity)
    count = _number(int, 1)
    capacity.add_argument(
        "--concurrency", type=count, metavar="N", help="p95 of sequences at once; default: full batches"
    )
    capacity.add_argument(
        "--prompt-tokens", type=count, metavar="N", help="p99; default: 4096, or the variant's limit"
    )
    capacity.add_argument("--output-tokens", type=count, metavar="N", help="p99; default: 512")
    capacity.add_argument(
        "--headroom", type=_number(float, 0), metavar="PERCENT", default=20, help="per cent; default: 20"
    )
    capacity.add_argument(
        "--reserve-gib",
        type=_number(float, 0),
        metavar="GIB",
        help="memory of a GPU for CUDA, graphs and NCCL; default: 2 or 3",
    )
    capacity.set_defaults(run=_capacity)

    env = commands.add_parser("env", help="print what to export before `ray start` on each node")
    env.add_argument(
        "config", nargs="?", default="quickstart", help="a file, or a shipped name (%(default)s)"
    )
    env.set_defaults(run=_env)

    models = commands.add_parser("models", help="list the model names that `weights` knows")
    models.set_defaults(run=_models)

    prepare = commands.add_parser("prepare", help="make a model's files ready on this machine")
    prepare.add_argument("name", help="one that `kvrelay models` lists, or a directory")
    prepare.set_defaults(run=_prepare)

    admin_command.add_parser(commands)
    return parser


def _add_sizing(parser: argparse.ArgumentParser) -> None:
    """What `capacity` and `check` are told about machines and models that are not here."""
    parser.add_argument(
        "--gpu", metavar="NAME", help="the GPUs' type, e.g. H200; default: what the variants require"
    )
    parser.add_argument(
        "--shape",
        action="append",
        default=[],
        metavar="[MODEL=]FILE",
        help="config.json of a model whose weights are not on this machine",
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def _number(kind: type[int] | type[float], least: int, most: int | None = None) -> Callable[[str], float]:
    """An argparse type: a number from `least` up to `most`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = least - 1
        if not value >= least or (most is not None and value > most):
            what = "a whole number" if kind is int else "a number"
            allowed = f", {least} or more" if most is None else f" from {least} to {most}"
            raise argparse.ArgumentTypeError(f"{text!r}; allowed: {what}{allowed}")
        return value

    return parse


def _serve(options: argparse.Namespace) -> int:
    from serving import preflight
    from serving.local.start_lock import StartLock
    from serving.local_cluster import available_cpus
    from serving.serve_command import serve

    plan = preflight.read_plan(preflight.find_config(options.config))
    host, port = options.host or plan.host, options.port or plan.port
    cpus = available_cpus() if options.cpus is None else options.cpus
    preflight.check_resources(plan, cpus)
    lock = StartLock(host, port)
    try:
        preflight.check_port(host, port)
        preflight.check_files(plan)
        preflight.prepare_weights(plan)
        return serve(
            plan,
            host=host,
            port=port,
            cpus=cpus,
            ready=lambda url, logs: print(_ready(plan, url, logs), flush=True),
        )
    finally:
        lock.release()


def _ready(plan: Plan, url: str, logs: Path) -> str:
    where = f"  Logs while it runs: {logs}/worker-*.err"
    if not plan.model_names:
        return f"Ready: {url}    (Ctrl-C stops it)\n{where}"
    body = {
        "model": plan.model_names[0],
        "stream": True,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Say hello."}],
    }
    key = ""
    if plan.applications[0].security.api_keys_file is not None:
        key = "    -H 'authorization: Bearer KEY' \\\n"
        where = f"  KEY: one of {plan.applications[0].security.api_keys_file}\n{where}"
    return (
        f"Ready: {url}    (Ctrl-C stops it)   Try:\n"
        f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' \\\n"
        f"{key}    -d '{json.dumps(body)}'\n{where}"
    )


def _check(options: argparse.Namespace) -> int:
    from serving.check_command import run
    from serving.pool_capacity import Options, parse_shapes

    said = Options(gpu=options.gpu, shapes=parse_shapes(options.shape))
    return run(options.config, said, as_json=options.json)


def _capacity(options: argparse.Namespace) -> int:
    from serving.capacity_command import run
    from serving.pool_capacity import Options, parse_shapes

    said = Options(
        gpu=options.gpu,
        shapes=parse_shapes(options.shape),
        concurrency=options.concurrency,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        headroom=options.headroom / 100,
        reserve_gib=options.reserve_gib,
    )
    return run(options.config, said, as_json=options.json)


def _env(options: argparse.Namespace) -> int:
    from serving.local.environment import network_environment, node_environment
    from serving.preflight import find_config, read_plan

    plan = read_plan(find_config(options.config))
    longest_s = plan.longest_request_s
    for name, value in {**node_environment(longest_s), **network_environment(longest_s)}.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _models(options: argparse.Namespace) -> int:
    from serving.manifest import KNOWN

    for name, source in sorted(KNOWN.items()):
        print(f"{name:<20} from the package {source.distribution}")
    return 0


def _prepare(options: argparse.Namespace) -> int:
    from serving.manifest import resolve_weights

    print(Path(resolve_weights(options.name)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
