"""`python -m serving.local.namespaces`: the cluster of serving/local/namespaces.py from the command line.

    ... up head a:pool=prefill b:pool=decode    start; the first is Ray's head; NAME[:LABEL=VALUE[,...]]
    ... deploy configs/multi-node.yaml          and wait until it answers; prints the URL
    ... replicas                                which deployment runs where
    ... exec NODE COMMAND ...                   run a command on a node, as `exec b ip addr`
    ... fault cut b | cut a b [--one-way] | slow b 200mbit | delay b 50 | heal b
    ... fault kill b [--silently] | leave b     the node is lost, or drains
    ... start b                                 a node that was lost comes back
    ... counters                                bytes sent and received by each node
    ... down                                    end everything, leave nothing

Needs root and iproute2. `--network N` names another than network 0.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from serving.errors import ConfigError, KVRelayError
from serving.local.namespaces import NamespaceCluster, take_down
from serving.local.network import VirtualNetwork, why_not
from serving.local.ray_node import Node


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    reason = why_not()
    if reason is not None:
        print(f"kvrelay: {reason}", file=sys.stderr)
        return 1
    try:
        return int(options.run(options) or 0)
    except KVRelayError as error:
        print(f"kvrelay: {error.message}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m serving.local.namespaces",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--network", type=int, default=0, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: object, *arguments: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name)
        for argument in arguments:
            added.add_argument(argument)
        added.add_argument("--network", type=int, default=argparse.SUPPRESS)
        added.set_defaults(run=run)
        return added

    command("up", _up).add_argument(
        "nodes", nargs="*", default=["head", "a:pool=prefill", "b:pool=decode"], metavar="NODE"
    )
    command("down", _down)
    command("deploy", _deploy, "config")
    command("replicas", _replicas)
    command("exec", _exec, "node").add_argument("command", nargs=argparse.REMAINDER)
    command("start", _start, "node")
    command("counters", _counters)
    command("guard", _guard)
    faults = commands.add_parser("fault").add_subparsers(required=True, metavar="FAULT")
    commands = faults
    cut = command("cut", lambda o: _attach(o).cut(o.node, o.peer, one_way=o.one_way), "node")
    cut.add_argument("peer", nargs="?")
    cut.add_argument("--one-way", action="store_true", help="from NODE to PEER only")
    command("slow", lambda o: _attach(o).slow(o.node, o.rate), "node", "rate")
    command("delay", lambda o: _attach(o).delay(o.node, float(o.ms)), "node", "ms")
    command("heal", lambda o: _attach(o).heal(o.node), "node")
    kill = command("kill", lambda o: _attach(o).kill(o.node, silently=o.silently), "node")
    kill.add_argument("--silently", action="store_true", help="as a power loss: no connection is reset")
    command("leave", lambda o: _attach(o).leave(o.node), "node")
    return parser


def _attach(options: argparse.Namespace) -> NamespaceCluster:
    cluster = NamespaceCluster.attach(options.network)
    for name in (getattr(options, "node", None), getattr(options, "peer", None)):
        if name is not None and name not in cluster.nodes:
            raise ConfigError(f"no node {name!r}; there are: {', '.join(cluster.nodes)}")
    return cluster


def _up(options: argparse.Namespace) -> None:
    cluster = NamespaceCluster(dict(map(_node, options.nodes)))
    cluster.start(guarded=False)
    number = cluster.network.number
    print(
        f"up: network {number}, dashboard {cluster.dashboard_url}, "
        + ", ".join(f"{name} {cluster.address(name)}" for name in cluster.nodes)
    )


def _node(text: str) -> tuple[str, Node]:
    name, _, labels = text.partition(":")
    pairs = [label.partition("=") for label in labels.split(",") if label]
    if not all(separator for _, separator, _ in pairs):
        raise ConfigError(f"node {text!r}; expected NAME or NAME:LABEL=VALUE[,LABEL=VALUE]")
    return name, Node(labels={key: value for key, _, value in pairs})


def _down(options: argparse.Namespace) -> None:
    take_down(VirtualNetwork(options.network))


def _guard(options: argparse.Namespace) -> None:
    """Standard input is a pipe that the owner holds open; the kernel closes it however the owner ends."""
    sys.stdin.buffer.read()
    _down(options)


def _deploy(options: argparse.Namespace) -> None:
    from serving.preflight import find_config, read_plan

    cluster = _attach(options)
    cluster.deploy(read_plan(find_config(options.config)).document)
    print(cluster.url)


def _replicas(options: argparse.Namespace) -> None:
    print(json.dumps(_attach(options).replicas(), indent=1))


def _exec(options: argparse.Namespace) -> int:
    done = _attach(options).run(options.node, options.command)
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    return done.returncode


def _start(options: argparse.Namespace) -> None:
    _attach(options).start_node(options.node)


def _counters(options: argparse.Namespace) -> None:
    cluster = _attach(options)
    print(json.dumps({node: asdict(cluster.counters(node)) for node in cluster.nodes}, indent=1))
