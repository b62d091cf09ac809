"""`servecast cluster`: several replicas behind a router."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from sim.cli.options import ScenarioOptions, scenario_options
from sim.cli.plan import MAX_RATE
from sim.commands.numbers import real, whole
from sim.errors import BadInput

if TYPE_CHECKING:
    from sim.planning.cluster import ClusterOutcome, Member
    from sim.profile import Profile
    from sim.provenance import Note
    from sim.scenario import Scenario
    from sim.workload.spec import WorkloadSpec


@click.command()
@scenario_options
@click.option("--replicas", metavar="N,N,…", help="Replicas of each scenario.  [default: 1]")
@click.option(
    "--router",
    "routers",
    metavar="NAME,NAME,…",
    default="least-requests",
    show_default=True,
    help="round-robin, least-requests, least-kv, prefix-affinity; several are compared.",
)
@click.option("--prefill", metavar="N", help="Instead of --replicas: replicas that only prefill …")
@click.option("--decode", metavar="N", help="… and replicas that only decode; the KV moves between them.")
@click.option("--link", metavar="GB/S", help="KV transfer rate of a --prefill replica.  [default: 50]")
@click.option("--link-latency", metavar="MS", help="Added to each KV transfer.  [default: 1]")
@click.option(
    "--traffic", type=click.Path(path_type=Path), help="Tenants, sessions, daily profile: a YAML file."
)
@click.option("--traffic-rate", metavar="RPS", help="Mean rate instead of the traffic file's.")
@click.option("--no-model-error", is_flag=True, help="Leave out the runs with longer and shorter step times.")
@click.option("--profile", type=click.Path(path_type=Path), help="Calibration profile to use.")
@click.option("--json", "json_to", metavar="FILE|-", help="Write the figures as JSON.")
def cluster(
    inputs: ScenarioOptions,
    replicas: str | None,
    routers: str,
    prefill: str | None,
    decode: str | None,
    link: str | None,
    link_latency: str | None,
    traffic: Path | None,
    traffic_rate: str | None,
    no_model_error: bool,
    profile: Path | None,
    json_to: str | None,
) -> None:
    """Predict replicas of SCENARIO.yaml behind a router; several scenarios make a mixed cluster.

    \b
    servecast cluster scenario.yaml --replicas 4 --router round-robin,prefix-affinity --traffic tenants.yaml

    Without --traffic, the load is that of the (first) scenario's benchmark command.
    """
    from sim.cli.outputs import check_outputs
    from sim.cli.progress import ShownCount
    from sim.planning.cluster import Link, run_cluster
    from sim.planning.cluster_error import (
        gpus,
        hardware_words,
        largest_error,
        notes_of,
        other_clusters,
        ranges,
    )
    from sim.planning.cluster_text import (
        COLUMNS,
        About,
        about_client,
        about_traffic,
        error_words,
        figures_of,
        render_clusters,
        until,
        verdict_of,
    )
    from sim.planning.hardware import parse_names
    from sim.planning.mix import read_traffic
    from sim.planning.router import make_router
    from sim.planning.sessions import singles
    from sim.profile import load_profile
    from sim.results_io.atomic import write_text
    from sim.workload.generate import generate

    sources = inputs.sources()
    check_outputs({"--json": json_to}, [*inputs.reads(sources), traffic, profile])
    scenarios = [source.build() for source in sources]
    names = parse_names("--router", routers)
    for name in names:
        make_router(name)
    known = None if profile is None else load_profile(profile)
    members = members_of(scenarios, replicas, prefill, decode, known)
    spec: WorkloadSpec | None = scenarios[0].workload
    cap = scenarios[0].workload.max_concurrency
    told: tuple[Note, ...] = ()
    offered: float | None
    arriving: float | None = None
    if traffic is not None:
        rate = (
            None
            if traffic_rate is None
            else real("--traffic-rate", traffic_rate, above=0.0, maximum=MAX_RATE)
        )
        mix = read_traffic(traffic)
        inputs.say_replaced("--traffic", sources[0])
        sessions, cap, spec, told = mix.generate(scenarios[0].seed, rate), None, None, mix.notes
        offered, load = about_traffic(mix, sessions)
        arriving = mix.duration
    elif traffic_rate is not None:
        raise BadInput("--traffic-rate", traffic_rate, "goes with --traffic; else use --set request-rate=…")
    else:
        requests = generate(scenarios[0].workload)
        sessions = singles(requests)
        offered, load = about_client(scenarios[0].workload, requests)
    for flag, value in (("--link", link), ("--link-latency", link_latency)):
        if value is not None and prefill is None:
            raise BadInput(flag, value, "belongs to --prefill and --decode: mixed replicas transfer nothing")
    wire = Link(
        real("--link", link or "50", above=0.0) * 1e9,
        real("--link-latency", link_latency or "1", minimum=0.0) / 1e3,
    )

    def run(who: list[Member], name: str, done: Callable[[], None]) -> ClusterOutcome:
        outcome = run_cluster(
            who,
            sessions,
            make_router(name),
            decode_router=make_router("least-requests"),
            link=wire,
            max_concurrency=cap,
        )
        done()
        return outcome

    others = [] if no_model_error else other_clusters(members, known)
    keys = [key for key, *_ in COLUMNS]
    found = {}
    with ShownCount() as count:
        outcomes = [(name, run(members, name, count)) for name in names]
        for name, outcome in outcomes if others else ():
            runs = [outcome, *(run(other, name, count) for other in others)]
            found[name] = ranges([figures_of(o.records, o.duration) for o in runs], keys)
    about = About(
        tuple(hardware_words(members)),
        offered,
        load,
        found,
        error_words(largest_error(members, known), len(others)),
        (*told, *notes_of(members, outcomes[0][1], known)),
        arriving,
    )
    if json_to != "-":
        click.echo(render_clusters(outcomes, spec, about))
    if json_to is not None:
        content = {
            name: {
                **figures_of(o.records, o.duration),
                "regime": asdict(verdict_of(o, spec)),
                "offered_request_rate": offered,
                "while_arriving": None if arriving is None else figures_of(*until(o, arriving)),
                "gpus": gpus(members),
                "ranges": {key: list(ends) for key, ends in found.get(name, {}).items()},
                "notes": [asdict(note) for note in about.notes],
            }
            for name, o in outcomes
        }
        text = json.dumps(content, indent=1) + "\n"
        if json_to == "-":
            click.echo(text, nl=False)
        else:
            write_text(json_to, text, "--json")
            click.echo(f"figures: {json_to}", err=True)


def members_of(
    scenarios: list[Scenario],
    replicas: str | None,
    prefill: str | None,
    decode: str | None,
    profile: Profile | None,
) -> list[Member]:
    """The replicas that were asked for, by number or by role.

    Raises:
        BadInput: both ways at once, half of a split, or too many.
    """
    if (prefill is None) != (decode is None):
        raise BadInput("--prefill", prefill, "goes together with --decode")
    if prefill is None or decode is None:
        return equal_members(scenarios, replicas or "1", profile)
    if replicas is not None:
        text = "--prefill and --decode give the numbers of replicas already; leave one or the other out"
        raise BadInput("--replicas", replicas, text)
    return split_members(scenarios, whole("--prefill", prefill, 1), whole("--decode", decode, 1), profile)


def equal_members(scenarios: list[Scenario], replicas: str, profile: Profile | None) -> list[Member]:
    """Replicas of each scenario; one number for all of them, or one for each."""
    from sim.planning.cluster import Member

    counts = [whole("--replicas", word, 1) for word in replicas.split(",")]
    if len(counts) == 1:
        counts *= len(scenarios)
    if len(counts) != len(scenarios):
        raise BadInput("--replicas", replicas, f"must be one number, or one for each of {len(scenarios)}")
    check_replicas("--replicas", replicas, sum(counts))
    members = []
    for scenario, count in zip(scenarios, counts, strict=True):
        model = None if profile is None else profile.step_time(scenario)[0]
        members += [Member(scenario, step_time=model)] * count
    return members


def split_members(
    scenarios: list[Scenario], prefill: int, decode: int, profile: Profile | None
) -> list[Member]:
    """Prefill replicas of the first scenario, decode replicas of the last."""
    from sim.planning.cluster import Member

    if len(scenarios) > 2:
        hint = f"prefill takes the first scenario and decode the last; {len(scenarios)} were given"
        raise BadInput("SCENARIO", None, hint)
    check_replicas("--prefill", prefill, prefill + decode)
    members = []
    for scenario, role, count in ((scenarios[0], "prefill", prefill), (scenarios[-1], "decode", decode)):
        model = None if profile is None else profile.step_time(scenario)[0]
        members += [Member(scenario, role, model)] * count
    return members


def check_replicas(flag: str, given: str | int, total: int) -> None:
    """Refuse more replicas than can be simulated together.

    Raises:
        BadInput: there are more than `MAX_REPLICAS`.
    """
    from sim.planning.cluster import MAX_REPLICAS

    if total > MAX_REPLICAS:
        raise BadInput(flag, given, f"are {total:,} replicas; at most {MAX_REPLICAS:,} can be simulated")
