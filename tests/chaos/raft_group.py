"""A Raft group of real processes that are killed at random, and the account of what they promised.
Now and then a minority loses its disks as well, and rejoins.

Every acknowledgement that a process wrote before it died is kept here. `check` asks every node for
its state and holds it against the account: each acknowledged number is there, on every node, and
all nodes have applied the same commands in the same order.
"""

from __future__ import annotations

import json
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.raft_node import CLUSTER
from tocsin_node import certs

PATIENCE_S = 60.0
# Where a process ends: by a signal from outside, or in the middle of what its disk does.
INSTANTS = ("any", "any", "journal", "segment", "snapshot", "compaction")
DIE_WITHIN_S = 5.0
LOSE_DISKS = 0.3  # of the kills of a minority, how many take the disks with them
ELECTION_S = 1.0  # the longest silence of a leader before an election


class Process:
    """One node: what it acknowledged, and its answers."""

    def __init__(self, node_id: str, peers: dict[str, str], folder: Path, *, rejoin: bool) -> None:
        self.node_id = node_id
        self.acknowledged: deque[tuple[str, int]] = deque()  # filled by the reader's thread
        self.started = False
        self.ready = threading.Event()  # or ended
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._log = folder / f"{node_id}.log"
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-m", "tests.chaos.raft_node", "--node", node_id,
                    "--peers", json.dumps(peers), "--folder", str(folder),
                    *(["--rejoin"] if rejoin else []),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=Path(__file__).resolve().parents[2],
            )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            word, _, rest = line.decode().strip().partition(" ")
            if word == "A":
                writer, number = rest.split(" ")
                self.acknowledged.append((writer, int(number)))
            elif word == "=":
                self._answers.put(json.loads(rest))
            else:
                self.started = True
                self.ready.set()
        self._answers.put(None)
        self.ready.set()

    def ask(self, do: str, **order: Any) -> Any:
        """What the node answers.

        Raises:
            AssertionError: it is dead, or does not answer; with the end of its log.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **order}).encode() + b"\n")
            self.process.stdin.flush()
            answer = self._answers.get(timeout=PATIENCE_S)
        except (OSError, queue.Empty):
            answer = None
        if answer is None:
            raise AssertionError(f"{self.node_id} did not answer to {do}:\n{self.tail()}")
        return answer

    def order_death(self, at: str, count: int) -> None:
        assert self.process.stdin is not None
        order = json.dumps({"do": "die", "at": at, "count": count}).encode()
        self.process.stdin.write(order + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kills it, if it lives, and reads what it said until then."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue  # an order that it never read

    def tail(self, lines: int = 15) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-lines:])


class Group:
    """The processes by node id, and all that they ever acknowledged."""

    def __init__(self, folder: Path, size: int, seed: int) -> None:
        self.folder = folder
        self.random = random.Random(seed)
        self.node_ids = [f"n{number + 1}" for number in range(size)]
        self.peers = dict(zip(self.node_ids, free_addresses(size), strict=True))
        self.processes: dict[str, Process] = {}
        self.acknowledged: defaultdict[str, set[int]] = defaultdict(set)
        self.kills: Counter[str] = Counter()
        self.most_at_once = 0
        self.disks_lost = 0
        folder.mkdir(parents=True, exist_ok=True)
        certs.create(folder / "certs", CLUSTER, self.node_ids)

    def start(self, node_ids: Sequence[str], *, rejoin: bool = False) -> None:
        for node_id in node_ids:
            self.processes[node_id] = Process(node_id, self.peers, self.folder, rejoin=rejoin)
        for node_id in node_ids:
            process = self.processes[node_id]
            assert process.ready.wait(PATIENCE_S), f"{node_id} does not start:\n{process.tail()}"
            assert process.started, f"{node_id} did not start:\n{process.tail()}"

    def stop(self) -> None:
        for node_id in list(self.processes):
            self._bury(node_id)

    def leader(self) -> str:
        """The node that serves, once there is one."""

        def serving() -> str | None:
            states = {node_id: p.ask("status") for node_id, p in self.processes.items()}
            leading = [(s["term"], node_id) for node_id, s in states.items() if s["serving"]]
            return max(leading)[1] if leading else None

        return str(self.until("somebody leads", serving))

    def until(self, what: str, condition: Any) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while not (found := condition()):
            if time.monotonic() > deadline:
                tails = "\n".join(f"{p.node_id}:\n{p.tail()}" for p in self.processes.values())
                raise AssertionError(f"not within {PATIENCE_S:g} s: {what}\n{tails}")
            time.sleep(0.02)
        return found

    def let_them_write(self, seconds: float) -> None:
        """Kills need something to hit; how long is chance, and nothing is judged by it."""
        time.sleep(seconds)

    def kill_some(self) -> int:
        """Ends one to all of the nodes at one kind of instant, and starts them again."""
        chance = self.random
        count = chance.choice((1, 1, 1, 2, len(self.node_ids) // 2 + 1, len(self.node_ids)))
        victims = chance.sample(self.node_ids, count)
        lose_disks = chance.random() < LOSE_DISKS and self._can_lose(count)
        at = chance.choice(INSTANTS)
        if at != "any":
            for node_id in victims:
                self.processes[node_id].order_death(at, chance.randint(1, 6))
            deadline = time.monotonic() + DIE_WITHIN_S
            for node_id in victims:
                self._wait_for_end(node_id, deadline)
        for node_id in victims:
            by_itself = self.processes[node_id].process.poll() == -signal.SIGKILL
            self.kills[at if by_itself else "any"] += 1
            self.processes[node_id].process.kill()  # all at once, before any is buried
        for node_id in victims:
            self._bury(node_id)
        self.most_at_once = max(self.most_at_once, count)
        for node_id in self.node_ids:
            if node_id not in victims:
                process = self.processes[node_id]
                assert process.process.poll() is None, f"{node_id} ended:\n{process.tail()}"
        self.let_them_write(chance.uniform(0, 0.4))
        if lose_disks:
            self.disks_lost += count
            for node_id in victims:
                shutil.rmtree(self.folder / node_id)
        self.start(victims, rejoin=lose_disks)
        return count

    def _can_lose(self, count: int) -> bool:
        """Only a minority may be without what it acknowledged at one time."""
        if 2 * count >= len(self.node_ids):
            return False
        return self.all_vote()

    def all_vote(self) -> bool:
        return all(process.ask("status")["vote"] for process in self.processes.values())

    def _wait_for_end(self, node_id: str, deadline: float) -> None:
        left = deadline - time.monotonic()
        try:
            self.processes[node_id].process.wait(max(0.01, left))
        except subprocess.TimeoutExpired:
            return  # it did not come to that operation; it is killed where it stands

    def _bury(self, node_id: str) -> None:
        process = self.processes.pop(node_id)
        process.end()
        for writer, number in process.acknowledged:
            self.acknowledged[writer].add(number)

    def check(self) -> int:
        """Nothing acknowledged is missing on any node, and all nodes are alike.

        Returns:
            How many acknowledgements there are by now.
        """
        self.leader()
        for process in self.processes.values():
            process.ask("pause")
        self.until("all nodes have applied the same", self._settled)
        # What was on its way when the pause came is acknowledged after it. So the account is closed
        # before the states are asked for that it is held against.
        for process in self.processes.values():
            while process.acknowledged:
                writer, number = process.acknowledged.popleft()
                self.acknowledged[writer].add(number)
        states = self.until("all nodes have applied the same", self._settled)
        for node_id, state in states.items():
            missing = self._missing(state["writers"])
            assert not missing, f"{node_id} has lost {len(missing)} acknowledged: {missing[:10]}"
        chains = {node_id: state["chain"] for node_id, state in states.items()}
        assert len(set(chains.values())) == 1, f"the nodes differ: {chains}"
        for process in self.processes.values():
            process.ask("go")
        return sum(map(len, self.acknowledged.values()))

    def _settled(self) -> dict[str, Any] | None:
        leader = self.leader()
        last = self.processes[leader].ask("status")["last"]
        states = {node_id: process.ask("state") for node_id, process in self.processes.items()}
        return states if {state["applied"] for state in states.values()} == {last} else None

    def _missing(self, writers: dict[str, Any]) -> list[tuple[str, int]]:
        found = []
        for writer, numbers in self.acknowledged.items():
            highest, gaps = writers.get(writer, (-1, ()))
            absent = set(gaps)
            found += [(writer, n) for n in numbers if n > highest or n in absent]
        return found


@contextmanager
def running(folder: Path, size: int, seed: int) -> Iterator[Group]:
    group = Group(folder, size, seed)
    try:
        group.start(group.node_ids)
        group.leader()
        yield group
    finally:
        group.stop()


def free_addresses(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()


def kill_many(folder: Path, *, size: int, kills: int, seed: int) -> dict[str, Any]:
    """Kills processes until there were so many; checks on the way and at the end."""
    with running(folder, size, seed) as group:
        done = rounds = acknowledged = 0
        while done < kills:
            group.let_them_write(group.random.uniform(0.1, 0.6))
            done += group.kill_some()
            rounds += 1
            if rounds % 5 == 0:
                acknowledged = group.check()
        acknowledged = group.check()
        group.until("all nodes vote again", group.all_vote)
        return {
            "nodes": size,
            "seed": seed,
            "kills": done,
            "at once at most": group.most_at_once,
            "disks lost": group.disks_lost,
            "acknowledged": acknowledged,
            **{f"kills: {at}": group.kills[at] for at in dict.fromkeys(INSTANTS)},
        }


def cut_followers_off(folder: Path, *, times: int, seed: int) -> dict[str, Any]:
    """Cuts one follower off for longer than two elections take, again and again.

    Returns:
        How often the leader of before led on, in the same term, after the follower had caught up.
    """
    with running(folder, 3, seed) as group:
        kept = 0
        for _ in range(times):
            leader = group.leader()
            before = group.processes[leader].ask("status")
            follower = group.random.choice([n for n in group.node_ids if n != leader])
            group.processes[follower].ask("cut")
            group.let_them_write(2 * ELECTION_S)
            missed = group.processes[leader].ask("status")["last"]
            group.processes[follower].ask("mend")
            group.until(
                "the follower has caught up",
                lambda node=follower, index=missed: (
                    group.processes[node].ask("status")["applied"] >= index
                ),
            )
            group.let_them_write(ELECTION_S)
            after = group.processes[leader].ask("status")
            kept += after["serving"] and after["term"] == before["term"]
        return {"seed": seed, "followers cut off": times, "leader kept": kept}


def cut_leaders_off(folder: Path, *, times: int, seed: int) -> dict[str, Any]:
    """Cuts the leader off, again and again, and asks it when it stopped taking proposals."""
    with running(folder, 3, seed) as group:
        seconds = []
        for _ in range(times):
            leader = group.leader()
            group.processes[leader].ask("cut")
            seconds.append(group.processes[leader].ask("refused"))
            group.processes[leader].ask("mend")
            group.until("another round may begin", group.leader)
        acknowledged = group.check()
        ordered = sorted(seconds)
        return {
            "seed": seed,
            "leaders cut off": times,
            "refused within 1 s": sum(taken <= 1 for taken in seconds),
            "p50 s": round(ordered[times // 2], 3),
            "max s": round(ordered[-1], 3),
            "acknowledged": acknowledged,
        }
