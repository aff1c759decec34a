"""`tocsin verify`: the drill itself is in `tocsin_node.verify`."""

from __future__ import annotations

import importlib

import click

from tocsin.cli._needs_node import need_node


@click.command()
@click.option("--scenario", "scenarios", metavar="NAME", multiple=True, help="Hold this one.")
@click.option("--all", "everything", is_flag=True, help="Hold every scenario: about 25 minutes.")
@click.option("--list", "listing", is_flag=True, help="List the scenarios, and hold none.")
@click.option("--seed", type=int, help="Play this one again; default: a new one.")
@click.option("--seeds", type=click.IntRange(1), default=1, help="Seeds for each scenario.")
@click.option(
    "--at-once", type=click.IntRange(1), default=1, help="Drills side by side; two need two cores."
)
@click.option("--minutes", type=float, help="Begin no further drill after so long.")
@click.option("--live", metavar="ADDRESS", help="On the cluster there, which is in use: see below.")
@click.option("--namespace", help="For --live: a new one for everything it makes.")
@click.option("--json", "json_file", metavar="FILE", help="Write every figure to a file.")
@click.option("--html", "html_file", metavar="FILE", help="Write a report with pictures.")
@click.option("--keep", is_flag=True, help="Keep the scratch folders, with data and logs.")
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    *,
    scenarios: tuple[str, ...],
    everything: bool,
    listing: bool,
    seed: int | None,
    seeds: int,
    at_once: int,
    minutes: float | None,
    live: str | None,
    namespace: str | None,
    json_file: str | None,
    html_file: str | None,
    keep: bool,
) -> None:
    """Hurt scratch clusters on this machine, and check that every promise holds.

    Starts real nodes and workers in a scratch folder, kills, freezes and cuts them off while
    clients and schedules go on, and then judges from outside: what callers were told, what
    handlers did, and what their target accepted. Prints a table and one line of JSON; exit code 0
    only if no rule was broken.

    With --live ADDRESS (a node, a list of nodes, or a cluster.yaml) it starts no nodes and hurts
    none. It makes canary jobs in a namespace of its own on that cluster, runs them with workers
    of its own, which alone it kills and freezes, judges in the same way, and deletes the jobs
    when it ends, also after Ctrl-C. It takes --minutes, one by default.

    \b
    Examples:
      tocsin verify                                  four scenarios, about five minutes
      tocsin verify --scenario leader-churn --seed 7
      tocsin verify --all --html report.html
      tocsin verify --live 127.0.0.1:7101 --minutes 5
    """
    need_node("tocsin verify")
    if live and (scenarios or everything or seeds > 1 or at_once > 1):
        raise click.UsageError("--live holds one drill: no --scenario, --all, --seeds or --at-once")
    if namespace and not live:
        raise click.UsageError("--namespace is for --live")
    known = sorted(importlib.import_module("tocsin_node.verify.scenarios").SCENARIOS)
    for name in scenarios:
        if name not in known:
            raise click.UsageError(f"no scenario {name}; there are {', '.join(known)}")
    arguments = [f"--scenario={name}" for name in scenarios]
    arguments += ["--all"] * everything + ["--list"] * listing + ["--keep"] * keep
    arguments += [] if seed is None else [f"--seed={seed}"]
    arguments += [] if minutes is None else [f"--minutes={minutes}"]
    arguments += [f"--live={live}"] if live else []
    arguments += [f"--namespace={namespace}"] if namespace else []
    arguments += [f"--json={json_file}"] if json_file else []
    arguments += [f"--html={html_file}"] if html_file else []
    main = importlib.import_module("tocsin_node.verify.tell").main
    ctx.exit(main([*arguments, f"--seeds={seeds}", f"--at-once={at_once}"]))
