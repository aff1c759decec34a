"""The drills there are: what each does to a cluster, and what it asks for beyond the rules."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from tocsin import ApiError, AsyncClient, Job, OverlapPolicy
from tocsin.types import OccurrenceOutcome
from tocsin_node.verify import rude
from tocsin_node.verify.cluster import api_addresses
from tocsin_node.verify.drill import DONE_MS, Drill, Planned, Scenario
from tocsin_node.verify.history import Bounds, History, Misfire, Overlap
from tocsin_node.verify.judge import lateness_ms, nominal_times, outcome_at
from tocsin_node.verify.load import CALL_WITHIN_S
from tocsin_node.verify.target import Target

TICK = Planned("tick", overlap=Overlap.ALLOW)
SOLO = Planned("solo", work={"work_ms": 300})
SLOW = Planned("slow", work={"work_ms": 2500, "stubborn": True})
MIXED = (TICK, SOLO, SLOW)
# Leases of 30 s, retries after 10 s; only the history is longer and the disk is used sparingly.
SHIPPED = """\
limits: {runs_per_job: 100000}
raft: {segment: 4MiB, disk_reserve: 1MiB}
"""


async def kill_leader(drill: Drill, *, down_s: float, why: str = "") -> None:
    leader = await drill.cluster.leader()
    drill.say(f"kills the leader {leader}{why}")
    await drill.cluster.kill_nodes([leader], down_s=down_s, kind="leader killed")


async def brief(drill: Drill) -> None:
    await kill_leader(drill, down_s=1)
    worker = drill.random.choice(drill.workers)
    drill.say(f"freezes {worker} past its leases")
    await drill.cluster.freeze(worker, for_s=5)
    await drill.rest(3)


async def leader_churn(drill: Drill) -> None:
    for _ in range(4):
        await kill_leader(drill, down_s=drill.random.uniform(0, 4))
        await drill.rest(drill.random.uniform(4, 8))


async def leader_kills(drill: Drill) -> None:
    for number in range(17):
        began = time.monotonic()
        await kill_leader(drill, down_s=drill.random.uniform(0, 5), why=f", {number + 1} of 17")
        await drill.rest(max(began + 12 - time.monotonic(), drill.random.uniform(1, 2)))


async def follower_killed(drill: Drill) -> None:
    leader = await drill.cluster.leader()
    followers = [node for node in drill.cluster.node_ids if node != leader]
    for follower in followers:
        drill.say(f"kills the follower {follower}")
        await drill.cluster.kill_nodes([follower], down_s=drill.random.uniform(1, 5))
        await drill.rest(3)


async def all_down(drill: Drill) -> None:
    drill.say("kills every node for 25 s")
    await drill.cluster.kill_nodes(drill.cluster.node_ids, down_s=25, kind="all killed")
    await drill.settle()
    await drill.rest(5)


def misfires_as_configured(drill: Drill, history: History) -> Iterator[str]:
    """`all` ran each, `skip` ran none that was long past, `latest` ran one for all of them."""
    down = history.faults[0]
    from_ms, to_ms = down.start_ms + history.utc_offset_ms, down.end_ms + history.utc_offset_ms
    for job in history.jobs:
        inside = [t for t in nominal_times(job) if from_ms + 1000 <= t <= to_ms - 8000]
        outcomes = {outcome_at(job, time_ms) for time_ms in inside}
        wanted = {
            Misfire.ALL: {OccurrenceOutcome.RUN},
            Misfire.SKIP: {OccurrenceOutcome.MISSED},
            Misfire.LATEST: {OccurrenceOutcome.COALESCED},
        }[job.misfire]
        if outcomes != wanted:
            yield f"{job.name}: of what fell into the outage {inside}, {outcomes}, not {wanted}"


async def worker_frozen(drill: Drill) -> None:
    for worker in drill.workers:
        drill.say(f"freezes {worker} past its leases")
        await drill.cluster.freeze(worker, for_s=drill.random.uniform(5, 8))
        await drill.rest(5)


def something_stale_was_refused(drill: Drill, history: History) -> Iterator[str]:
    """The scenario is worth nothing if no late report or write came."""
    refused = sum(run.refused_report_count for run in history.runs)
    late = sum(not write.accepted for write in history.writes)
    if not refused and not late:
        yield "nothing stale came, so nothing stale was refused"


async def worker_killed(drill: Drill) -> None:
    for _ in range(4):
        worker = drill.random.choice(drill.workers)
        drill.say(f"kills {worker}")
        drill.cluster.processes[worker].kill()
        await drill.rest(drill.random.uniform(5, 8))


async def leader_cut_off(drill: Drill) -> None:
    leader = await drill.cluster.leader()
    others = [node for node in drill.cluster.node_ids if node != leader]
    drill.say(f"cuts the leader {leader} off for 15 s")
    ways = [(leader, other) for other in others] + [(other, leader) for other in others]
    await drill.cluster.cut(ways, for_s=15, name=leader)
    await drill.rest(6)


async def one_way_cuts(drill: Drill) -> None:
    for outwards in (True, False):
        leader = await drill.cluster.leader()
        others = [node for node in drill.cluster.node_ids if node != leader]
        drill.say(f"the leader {leader} can no longer {'speak' if outwards else 'hear'}")
        ways = [(leader, other) if outwards else (other, leader) for other in others]
        await drill.cluster.cut(ways, for_s=8, name=leader)
        await drill.rest(6)


async def bad_weather(drill: Drill) -> None:
    relay = drill.cluster.relay
    assert relay is not None, "this scenario has links"
    drill.say("links take 20 ms, and lose 2 of 100 packets")
    await relay.weather(delay_ms=20, jitter_ms=15, loss=0.02)
    await drill.rest(10)
    await kill_leader(drill, down_s=2)
    await drill.rest(10)
    await relay.weather()


async def rolling_restart(drill: Drill) -> None:
    for node_id in drill.cluster.node_ids:
        drill.say(f"restarts {node_id}")
        await drill.cluster.stop_node(node_id)
        await drill.rest(3)


async def leader_frozen(drill: Drill) -> None:
    for _ in range(2):
        leader = await drill.cluster.leader()
        drill.say(f"freezes the leader {leader}")
        await drill.cluster.freeze(leader, for_s=drill.random.uniform(5, 8), kind="leader frozen")
        await drill.rest(5)


async def host_frozen(drill: Drill) -> None:
    drill.say("freezes everything for 40 s")
    everything = [*drill.cluster.node_ids, *drill.workers]
    await asyncio.gather(
        *(drill.cluster.freeze(name, for_s=40, kind="host frozen") for name in everything)
    )
    await drill.rest(6)


async def two_of_five_gone(drill: Drill) -> None:
    leader = await drill.cluster.leader()
    others = [node for node in drill.cluster.node_ids if node != leader]
    for node_id in (leader, others[0]):
        drill.say(f"kills {node_id} for good")
        drill.cluster.kill(node_id)
    start_ms = drill.now_ms()
    await drill.cluster.leader()
    drill.cluster.mended("two killed", f"{leader},{others[0]}", start_ms)
    await drill.rest(15)


async def no_worker(drill: Drill) -> None:
    drill.say("all workers are frozen for 20 s")
    await asyncio.gather(
        *(drill.cluster.freeze(name, for_s=20, kind="no worker") for name in drill.workers)
    )
    await drill.rest(6)


async def repeated_reports(drill: Drill) -> None:
    """Reports sent twice, too late, by somebody else and to the next leader; runs dropped."""
    client, job = drill.cluster.client, "default/rude"
    await client.create_job(Job(name=job, handler=rude.HANDLER, overlap_policy=OverlapPolicy.ALLOW))
    nodes, target = api_addresses(drill.cluster), Target(drill.cluster.target_file)
    done: list[rude.Assignment] = []
    stale: list[rude.Assignment] = []

    async def once(worker: rude.Rude, other: rude.Rude) -> None:
        await drill.load.trigger("rude", client, job)
        item = await worker.take()
        worker.work(target, item)
        await _told(drill, worker, item, "APPLIED")
        for again in (worker, other):
            await _told(drill, again, item, "ALREADY_APPLIED")
        await _told(drill, worker, item, "FENCED", error="after the success")
        done.append(item)

    async def after_lease_loss(worker: rude.Rude) -> None:
        await drill.load.trigger("rude", client, job)
        old = await worker.take()
        await drill.rest(1)  # acknowledged and confirmed, and then never named again
        worker.forget(old)
        new = await worker.take()
        drill.expect(new.lease.run == old.lease.run, f"{old.lease.run} came back")
        drill.expect(new.lease.fencing_token > old.lease.fencing_token, "under a newer token")
        await _told(drill, worker, old, "FENCED", current=new.lease.fencing_token)
        worker.work(target, new)
        await _told(drill, worker, new, "APPLIED")
        await _told(drill, worker, old, "FENCED", current=new.lease.fencing_token)
        done.append(new)
        stale.append(old)

    try:
        drill.say("reports are sent twice, and by another worker")
        async with rude.Rude(nodes, drill.reports) as worker:
            async with rude.Rude(nodes, drill.reports, slots=0) as idle:
                for _ in range(5):
                    await once(worker, idle)
            drill.say("and after their leases were lost")
            for _ in range(3):
                await after_lease_loss(worker)
        drill.say("a worker vanishes before it has acknowledged")
        await drill.load.trigger("rude", client, job)
        async with rude.Rude(nodes, drill.reports) as worker:
            dropped = await worker.take(acknowledge=False)
        async with rude.Rude(nodes, drill.reports) as worker:
            again = await worker.take()
            drill.expect(again.lease.run == dropped.lease.run, "the dropped run came back")
            drill.expect(again.lease.attempt == 1, f"{again.lease.run} used up an attempt")
            worker.work(target, again)
            await _told(drill, worker, again, "APPLIED")
            await _told(drill, worker, dropped, "FENCED", current=again.lease.fencing_token)
            done.append(again)
            stale.append(dropped)
        await kill_leader(drill, down_s=1, why=" and repeats everything to the next one")
        async with rude.Rude(nodes, drill.reports) as worker:
            for item in done:
                await _told(drill, worker, item, "ALREADY_APPLIED")
            for item in stale:
                await _told(drill, worker, item, "FENCED")
    finally:
        target.close()


async def _told(
    drill: Drill,
    worker: rude.Rude,
    item: rude.Assignment,
    wanted: str,
    *,
    current: int = 0,
    error: str = "",
) -> None:
    """Sends one report, and notes an answer that is not the one wanted."""
    told = await worker.report(item, error=error)
    outcome = drill.reports[-1].outcome
    lease = item.lease
    drill.expect(
        outcome == wanted, f"{lease.run} under {lease.fencing_token}: {outcome}, not {wanted}"
    )
    if current:
        drill.expect(told.current_token == current, f"{lease.run}: told of {told.current_token}")


async def retried_triggers(drill: Drill) -> None:
    """Each id goes to every node at once, again through a leader's death, and once more later."""
    nodes = list(api_addresses(drill.cluster).values())
    clients = [AsyncClient(address, timeout=CALL_WITHIN_S) for address in nodes]
    names: dict[str, set[str]] = {}

    async def ask(client: AsyncClient, request_id: str) -> None:
        run = await drill.load.try_trigger(client, request_id)
        if run:
            names.setdefault(request_id, set()).add(run)

    async def everywhere(request_ids: Iterable[str]) -> None:
        asked = [ask(client, each) for each in request_ids for client in clients]
        await asyncio.gather(*asked)

    try:
        for kill in range(4):
            ids = [f"again-{kill}-{number}" for number in range(40)]
            dying = asyncio.create_task(kill_leader(drill, down_s=1, why=" amid repeated triggers"))
            for number in range(0, len(ids), 4):
                await everywhere(ids[number : number + 4])
            await dying
            await drill.settle()
            await everywhere(ids)
            drill.expect(names.keys() >= set(ids), "each id was answered in the end")
        for request_id, found in names.items():
            drill.expect(len(found) == 1, f"{request_id} made {found}")
    finally:
        for client in clients:
            await client.close()


async def full_disk(drill: Drill) -> None:
    """Files get no further room; the node stays up, and another one leads."""
    leader = await drill.cluster.leader()
    start_ms = drill.now_ms()
    drill.say(f"the disk of {leader} is full")
    drill.cluster.orders[leader].fill_disk(True)
    await _another_leads(drill, leader)
    await drill.rest(8)
    drill.cluster.orders[leader].fill_disk(False)
    await _was_up(drill, leader)
    drill.cluster.mended("disk full", leader, start_ms)
    await drill.rest(5)


async def full_file_system(drill: Drill) -> None:
    """The same on a real small file system, which only the node's own mount namespace has."""
    leader = await drill.cluster.leader()
    start_ms = drill.now_ms()
    drill.say(f"the file system of {leader} is full")
    pid = drill.cluster.processes[leader].pid
    ballast = Path(f"/proc/{pid}/root") / drill.cluster.data_of(leader).relative_to("/") / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
    await _another_leads(drill, leader)
    await drill.rest(8)
    ballast.unlink()
    await _was_up(drill, leader)
    drill.cluster.mended("disk full", leader, start_ms)
    await drill.rest(5)


def no_small_disk() -> str:
    """Why no small file system can be mounted here; empty: it can."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "unshare or mount is missing"
    tried = subprocess.run(
        ["unshare", "-Urm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    said = tried.stderr.strip().splitlines()
    return f"no file system can be mounted: {said[0] if said else ''}" if tried.returncode else ""


async def few_descriptors(drill: Drill) -> None:
    leader = await drill.cluster.leader()
    pid = drill.cluster.processes[leader].pid
    start_ms = drill.now_ms()
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    open_now = len(os.listdir(f"/proc/{pid}/fd"))
    drill.say(f"{leader} has {open_now} open files and may have 5 more, while 40 clients come")
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_now + 5, hard))
    host, port = api_addresses(drill.cluster)[leader].rsplit(":", 1)
    clients = [await asyncio.open_connection(host, int(port)) for _ in range(40)]
    most = 0
    for _ in range(40):
        await drill.rest(0.2)
        with suppress(FileNotFoundError):
            most = max(most, len(os.listdir(f"/proc/{pid}/fd")))
    drill.say(f"{leader} had {most} open files")
    drill.expect(most >= open_now + 4, f"{leader} came to its limit of {open_now + 5} files")
    for _, writer in clients:
        writer.close()
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    if leader in drill.cluster.dead():
        drill.say(f"{leader} has ended, and is started again")
        drill.cluster.start_node(leader)
    await drill.settle()
    drill.cluster.mended("few descriptors", leader, start_ms)
    await drill.rest(5)


async def little_cpu(drill: Drill) -> None:
    """A quota as a container has it: of each tenth of a second, the leader gets a fifth."""
    leader = await drill.cluster.leader()
    start_ms = drill.now_ms()
    drill.say(f"{leader} gets a fifth of its processor for 15 s")
    ends = time.monotonic() + 15
    while time.monotonic() < ends:
        drill.cluster.signal(leader, signal.SIGSTOP)
        await drill.rest(0.08)
        drill.cluster.signal(leader, signal.SIGCONT)
        await drill.rest(0.02)
    drill.cluster.mended("little CPU", leader, start_ms)
    await drill.rest(5)


async def damaged_files(drill: Drill) -> None:
    """A torn end of the journal is taken off; a flipped bit is named, and the node rejoins."""
    leader = await drill.cluster.leader()
    others = [node for node in drill.cluster.node_ids if node != leader]
    for node_id, tear in zip(others, (True, False), strict=True):
        start_ms = drill.now_ms()
        drill.cluster.kill(node_id)
        folder = drill.cluster.data_of(node_id)
        files = sorted((folder / "journal").glob("*.seg"))
        what = _tear(files[-1]) if tear else _flip(files[-1], drill)
        drill.say(f"kills {node_id} and damages its journal: {what}")
        drill.cluster.start_node(node_id)
        refused = await drill.cluster.follows_or_ends(node_id)
        if not tear:
            drill.expect(refused, f"{node_id} noticed the flipped bit")
        if refused:
            named = files[-1].name in drill.cluster.tail(node_id, 20)
            drill.expect(named, f"{node_id} named the damaged file")
            drill.say(f"{node_id} names the file and ends; its folder is lost, it rejoins")
            folder.rename(folder.with_name(f"{node_id}-damaged"))
            drill.cluster.start_node(node_id, "--rejoin")
            again = f"{node_id} has a vote again"
            await drill.cluster.until(again, partial(_votes, drill, node_id))
        drill.cluster.mended("file damaged", node_id, start_ms)
        await drill.rest(4)


def _tear(file: Path) -> str:
    """The last record is half written: the end of it is still zero."""
    content = file.read_bytes()
    used = len(content.rstrip(b"\0"))
    with file.open("r+b") as opened:
        opened.seek(used - 20)
        opened.write(bytes(20))
    return f"the last 20 bytes of {file.name} are zero"


def _flip(file: Path, drill: Drill) -> str:
    used = len(file.read_bytes().rstrip(b"\0"))
    at = drill.random.randrange(used // 4, used // 2)
    with file.open("r+b") as opened:
        opened.seek(at)
        byte = opened.read(1)[0] ^ 1 << drill.random.randrange(8)
        opened.seek(at)
        opened.write(bytes([byte]))
    return f"one bit of {file.name} is flipped, at byte {at}"


async def _votes(drill: Drill, node_id: str) -> bool:
    status = await drill.cluster.status(node_id)
    return status is not None and bool(status.leader_id) and not status.rejoining


async def _another_leads(drill: Drill, node_id: str) -> None:
    async def another() -> bool:
        return await drill.cluster.leader() != node_id

    await drill.cluster.until(f"another one than {node_id} leads", another)


async def _was_up(drill: Drill, node_id: str) -> None:
    drill.expect(node_id not in drill.cluster.dead(), f"{node_id} stayed up")
    if node_id in drill.cluster.dead():
        drill.cluster.start_node(node_id)
    await drill.settle()


async def policies_at_work(drill: Drill) -> None:
    await drill.rest(15)
    await kill_leader(drill, down_s=1)
    await drill.rest(10)


async def limits_under_churn(drill: Drill) -> None:
    for _ in range(2):
        await kill_leader(drill, down_s=1, why=" while runs wait for their limits")
        await drill.rest(4)
    worker = drill.random.choice(drill.workers)
    drill.say(f"freezes {worker}")
    await drill.cluster.freeze(worker, for_s=5)
    await drill.rest(4)


async def dying_handlers(drill: Drill) -> None:
    drill.say("handlers kill their process: at once, or after their effect")
    await drill.rest(25)


async def failing_handlers(drill: Drill) -> None:
    await drill.rest(10)
    await kill_leader(drill, down_s=1, why=" while handlers fail twice each")
    await drill.rest(10)


async def flood(drill: Drill) -> None:
    async def storm() -> None:
        async with asyncio.TaskGroup() as all_at_once:
            for number in range(300):
                all_at_once.create_task(drill.load.trigger(f"flood-{number}", drill.cluster.client))

    drill.say("leases expire while 3,000 triggers come in")
    frozen = asyncio.create_task(drill.cluster.freeze(drill.workers[0], for_s=6))
    for _ in range(10):
        await storm()
    await frozen
    await drill.rest(6)


async def slow_disk(drill: Drill) -> None:
    leader = await drill.cluster.leader()
    start_ms = drill.now_ms()
    drill.say(f"each sync of {leader} takes 2 s longer")
    drill.cluster.orders[leader].slow_disk(2.0)
    await drill.rest(10)
    drill.cluster.orders[leader].slow_disk(0)
    drill.cluster.mended("slow disk", leader, start_ms)
    await drill.rest(6)


async def handed_round(drill: Drill) -> None:
    drill.say("leadership is handed over a hundred times")
    leader = await drill.cluster.leader()
    for _ in range(100):
        others = [node for node in drill.cluster.node_ids if node != leader]
        successor = drill.random.choice(others)
        with suppress(ApiError):  # a successor that lags is refused: the next one is tried
            await drill.cluster.client.transfer_leadership(successor)
        leader = await drill.cluster.leader()
        await drill.rest(drill.random.uniform(0.3, 1.2))


def every_second_ran_soon(drill: Drill, history: History) -> Iterator[str]:
    """Whoever leads, the canary sings: each run starts within three seconds."""
    late = [ms for ms in lateness_ms(history, "default/tick") if ms > 3000]
    if late:
        yield f"{len(late)} runs of default/tick began more than 3 s late, up to {max(late)} ms"


async def clocks_stepped(drill: Drill) -> None:
    for ahead, hours in ((True, 6), (False, -6), (False, 6), (True, -6)):
        leader = await drill.cluster.leader()
        others = [node for node in drill.cluster.node_ids if node != leader]
        node = leader if ahead else drill.random.choice(others)
        start_ms = drill.now_ms()
        drill.say(f"steps the wall clock of {node} by {hours:+} h{' (it leads)' * ahead}")
        drill.cluster.orders[node].step_clock(hours * 3600)
        await drill.rest(6)
        drill.cluster.orders[node].step_clock(0)
        await drill.rest(3)
        drill.cluster.mended("clock stepped", node, start_ms)


async def as_shipped(drill: Drill) -> None:
    worker = drill.random.choice(drill.workers)
    drill.say(f"kills {worker}, and then the leader, with every setting as shipped")
    drill.cluster.processes[worker].kill()
    await drill.rest(3)
    await kill_leader(drill, down_s=2)
    await drill.rest(50)


async def failing_disk(drill: Drill) -> None:
    leader = await drill.cluster.leader()
    start_ms = drill.now_ms()
    drill.say(f"the disk of {leader} fails")
    drill.cluster.orders[leader].fail_disk(5)
    process = drill.cluster.processes[leader]

    async def stopped() -> bool:
        return process.poll() is not None

    await drill.cluster.until(f"{leader} stops", stopped)
    drill.cluster.orders[leader].fail_disk(0)
    drill.cluster.start_node(leader)
    await drill.settle()
    drill.cluster.mended("disk failed", leader, start_ms)
    await drill.rest(6)


SCENARIOS: Mapping[str, Scenario] = {
    each.name: each
    for each in (
        Scenario("brief", "the leader is killed, a worker is frozen", brief, MIXED),
        Scenario(
            "leader-churn",
            "the leader is killed again and again",
            leader_churn,
            MIXED,
            seconds=60,
        ),
        Scenario(
            "leader-kills",
            "the leader is killed every 12 s, 17 times",
            leader_kills,
            MIXED,
            seconds=230,
        ),
        Scenario("follower-killed", "each follower is killed once", follower_killed, MIXED),
        Scenario(
            "all-down",
            "all nodes are killed for 25 s, under each misfire policy",
            all_down,
            [
                Planned("latest", misfire_grace_s=5, work={"work_ms": 10}),
                Planned(
                    "all",
                    misfire=Misfire.ALL,
                    misfire_grace_s=5,
                    overlap=Overlap.QUEUE_ALL,
                    work={"work_ms": 10},
                ),
                Planned("skip", misfire=Misfire.SKIP, misfire_grace_s=5, overlap=Overlap.QUEUE_ALL),
            ],
            check=misfires_as_configured,
            seconds=50,
        ),
        Scenario(
            "worker-frozen",
            "each worker is frozen past its leases",
            worker_frozen,
            MIXED,
            check=something_stale_was_refused,
        ),
        Scenario("worker-killed", "workers are killed in mid-run", worker_killed, MIXED),
        Scenario(
            "leader-cut-off", "the leader is cut off for 15 s", leader_cut_off, MIXED, relayed=True
        ),
        Scenario(
            "one-way-cuts",
            "the leader can speak but not hear, then hear but not speak",
            one_way_cuts,
            MIXED,
            relayed=True,
        ),
        Scenario("bad-weather", "links are slow and lossy", bad_weather, MIXED, relayed=True),
        Scenario("rolling-restart", "each node is restarted in turn", rolling_restart, MIXED),
        Scenario("leader-frozen", "the leader is frozen twice", leader_frozen, MIXED),
        Scenario(
            "host-frozen",
            "everything is frozen for 40 s",
            host_frozen,
            MIXED,
            seconds=60,
        ),
        Scenario(
            "two-of-five-gone", "two of five nodes go for good", two_of_five_gone, MIXED, nodes=5
        ),
        Scenario(
            "repeated-reports",
            "reports are sent twice, after their lease, and by workers that vanished",
            repeated_reports,
            [TICK],
        ),
        Scenario(
            "retried-triggers",
            "triggers go to every node, again and again, while leaders are killed",
            retried_triggers,
            [TICK],
        ),
        Scenario(
            "full-disk",
            "files of the leader get no further room",
            full_disk,
            MIXED,
            bent=("n1", "n2", "n3"),
        ),
        Scenario(
            "full-file-system",
            "the leader's data is on a small file system, and that is full",
            full_file_system,
            MIXED,
            small_disks=True,
            missing=no_small_disk,
        ),
        Scenario(
            "few-descriptors",
            "the leader may open five more files, while forty clients come",
            few_descriptors,
            MIXED,
        ),
        Scenario("little-cpu", "the leader gets a fifth of its processor", little_cpu, MIXED),
        Scenario(
            "damaged-files",
            "the end of one journal is torn, a bit of another is flipped",
            damaged_files,
            MIXED,
        ),
        Scenario("no-worker", "no worker answers for 20 s", no_worker, MIXED),
        Scenario(
            "policies",
            "each overlap policy, under work longer than the interval",
            policies_at_work,
            [
                Planned("one", work={"work_ms": 2500}),
                Planned("all", schedule="4s", overlap=Overlap.QUEUE_ALL, work={"work_ms": 3000}),
                Planned("skip", overlap=Overlap.SKIP, work={"work_ms": 2500}),
                Planned("allow", overlap=Overlap.ALLOW, work={"work_ms": 2500}),
                Planned(
                    "cancel",
                    schedule="3s",
                    overlap=Overlap.CANCEL_RUNNING,
                    work={"work_ms": 4000},
                    refused_ok=True,
                ),
            ],
        ),
        Scenario(
            "limits",
            "the leader is killed and a worker frozen while runs wait for their limits",
            limits_under_churn,
            [
                Planned(
                    "two-at-once",
                    overlap=Overlap.ALLOW,
                    limit=2,
                    schedule="2s",
                    work={"work_ms": 3000},
                ),
                Planned(
                    "red",
                    overlap=Overlap.ALLOW,
                    limit=1,
                    group="colour",
                    schedule="2s",
                    work={"work_ms": 600},
                ),
                Planned(
                    "blue",
                    overlap=Overlap.ALLOW,
                    limit=1,
                    group="colour",
                    schedule="2s",
                    work={"work_ms": 600},
                ),
            ],
            bounds=Bounds(done_ms=3 * DONE_MS),
        ),
        Scenario(
            "dying-handlers",
            "handlers kill their process, at once or after their effect",
            dying_handlers,
            [
                TICK,
                Planned("at-once", schedule="7s", work={"die": "at_once"}),
                Planned("after-effect", schedule="7s", work={"die": "after_effect"}),
            ],
            workers=3,
        ),
        Scenario(
            "failing-handlers",
            "handlers fail twice before they succeed",
            failing_handlers,
            [TICK, Planned("third-time", schedule="3s", work={"fail": 2})],
        ),
        Scenario(
            "flood",
            "3,000 triggers come in while leases expire",
            flood,
            MIXED,
        ),
        Scenario(
            "slow-disk",
            "the leader's disk takes 2 s for each sync",
            slow_disk,
            MIXED,
            bent=("n1", "n2", "n3"),
        ),
        Scenario(
            "handed-round",
            "leadership is handed over a hundred times",
            handed_round,
            MIXED,
            check=every_second_ran_soon,
            seconds=95,
        ),
        Scenario(
            "clocks-stepped",
            "wall clocks of the leader and of followers are stepped by six hours, both ways",
            clocks_stepped,
            MIXED,
            bent=("n1", "n2", "n3"),
            seconds=55,
        ),
        Scenario(
            "as-shipped",
            "a worker and the leader are killed, with every setting as shipped",
            as_shipped,
            MIXED,
            settings=SHIPPED,
            bounds=Bounds(done_ms=80_000),
            seconds=75,
        ),
        Scenario(
            "failing-disk",
            "the leader's disk fails",
            failing_disk,
            MIXED,
            bent=("n1", "n2", "n3"),
        ),
    )
}
