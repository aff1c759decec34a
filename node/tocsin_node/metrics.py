"""What is measured on a node, for Prometheus, on the node's `http` address under `/metrics`.

Owns counters, histograms and gauges, and the thread that serves them. Runs are counted by the node
that leads while it leads, so sums over all nodes are right. Labels are queues and outcomes, never
jobs or runs: their number has no end. Refuses to run where no `http` address is configured: then
nothing is counted, and nothing costs anything.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    start_http_server,
)

from tocsin_node.core.model import AttemptOutcome, Cause, Run, RunState
from tocsin_node.replica import Changes, Replica

PATH = "/metrics"
REFRESH_S = 1.0
QUEUES_MAX = 100  # further ones are counted together, as `other`
SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
LONG_S = (0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 6 * 3600, 24 * 3600)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Load:
    """What the leader's memory knows.

    Attributes:
        slots, busy: of all workers with a session.
        oldest_due_time_ms: of the runs that are ready and nobody was given; None: there is none.
    """

    workers: int
    slots: int
    busy: int
    oldest_due_time_ms: int | None


class Metrics:
    """One node's measurements.

    Args:
        address: `host:port` to serve on.
        load: asked once a second while this node leads.
    """

    def __init__(self, replica: Replica, *, address: str, load: Callable[[], Load]) -> None:
        self._replica = replica
        self._host, _, port = address.rpartition(":")
        self._port = int(port)
        self._load = load
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self._task: asyncio.Task[None] | None = None
        self._queues: set[str] = set()  # that are counted by name
        self.registry = registry = CollectorRegistry()
        self._runs = Counter(
            "tocsin_runs", "Runs that ended.", ["queue", "outcome"], registry=registry
        )
        self._fire_delay = Histogram(
            "tocsin_fire_delay_seconds",
            "From the due time of an occurrence to the entry that made its run.",
            ["queue"],
            buckets=SHORT_S,
            registry=registry,
        )
        self._queue_wait = Histogram(
            "tocsin_queue_wait_seconds",
            "From the moment that a run was ready to the grant of its attempt.",
            ["queue"],
            buckets=SHORT_S,
            registry=registry,
        )
        self._duration = Histogram(
            "tocsin_run_duration_seconds",
            "From the grant of the last attempt to the end of the run.",
            ["queue"],
            buckets=LONG_S,
            registry=registry,
        )
        self._expired = Counter(
            "tocsin_lease_expired", "Attempts that ended with their lease.", registry=registry
        )
        self._fenced = Counter(
            "tocsin_fenced", "Reports that came after their lease was over.", registry=registry
        )
        errors = Gauge(
            "tocsin_internal_errors",
            "Parts of this node that raised when they were told of an entry, which is a bug.",
            registry=registry,
        )
        errors.set_function(lambda: replica.listener_errors)
        self._leader_changes = Counter(
            "tocsin_raft_leader_changes", "Leaders that this node has followed.", registry=registry
        )

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tocsin_{name}", text, registry=registry)

        self._leads = gauge("raft_is_leader", "1 on the leader, else 0.")
        self._term = gauge("raft_term", "The Raft term.")
        self._commit_index = gauge("raft_commit_index", "Log index up to which all is committed.")
        self._applied_index = gauge("raft_applied_index", "Log index up to which all is applied.")
        self._jobs = gauge("jobs", "Jobs that are stored.")
        self._active = gauge("active_runs", "Runs that have not ended.")
        self._dead_letters = gauge("dead_letters", "Runs that are kept as FAILED.")
        self._alerts = gauge("alerts", "Jobs that have not succeeded in time.")
        self._dropped_events = gauge(
            "dropped_events", "Events that subscriptions which exist were not told of."
        )
        self._workers = gauge("workers", "Workers with a session; on the leader.")
        self._slots = Gauge(
            "tocsin_slots", "Slots of all workers; on the leader.", ["state"], registry=registry
        )
        self._skew = Gauge(
            "tocsin_clock_skew_seconds",
            "The wall clock of a node less cluster time; of those that this node has measured.",
            ["node"],
            registry=registry,
        )
        self._clock_known = gauge(
            "clock_known",
            "0 on a leader that does not know the time, so that nothing fires; else 1.",
        )
        self._oldest = gauge(
            "oldest_due_age_seconds",
            "How long ago the run was due that is ready and was given to nobody; on the leader.",
        )

    def start(self) -> None:
        """Begins to count and to serve.

        Raises:
            OSError: the address is in use.
        """
        self._server, self._thread = start_http_server(
            self._port, self._host.strip("[]"), registry=self.registry
        )
        assert isinstance(self._server, WSGIServer)
        self._server.set_app(_only_metrics(self._server.get_app()))
        self.watch()
        self._task = asyncio.get_running_loop().create_task(self._refresh_often())

    def watch(self) -> None:
        """Begins to count."""
        self._replica.subscribe(self._on_changes)
        self._replica.engine.subscribe(lambda event: self._on_leader(event.kind))

    async def stop(self) -> None:
        """Ends the thread; what was counted stays readable in `registry`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._server is not None and self._thread is not None:
            # It answers one request at a time: waiting for it on the loop could take a while.
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()
            await asyncio.to_thread(self._thread.join)

    def _on_leader(self, kind: str) -> None:
        if kind == "leader_changed" and self._replica.engine.leader_id is not None:
            self._leader_changes.inc()

    def _on_changes(self, changes: Changes) -> None:
        if not self._replica.engine.is_serving:
            return
        state = self._replica.state
        for name in changes.runs:
            run = state.runs.get(name)
            if run is not None:
                self._count(run, changes.index)

    def _count(self, run: Run, index: int) -> None:
        """What one entry did to one run."""
        if run.revision != index:
            return  # changed again since, in an entry that is told of next
        spec = self._replica.state.template_of(run)
        queue = self._label(spec.queue)
        if run.create_index == index and run.cause in (Cause.SCHEDULE, Cause.MISFIRE):
            self._fire_delay.labels(queue).observe(_seconds(run.due_time_ms, run.create_time_ms))
        if run.lease is not None and run.lease.token == index:
            ready_ms = max(run.ready_time_ms, run.due_time_ms)
            self._queue_wait.labels(queue).observe(_seconds(ready_ms, self._replica.state.time_ms))
        last = run.attempts[-1] if run.attempts else None
        if last is not None and last.end_index == index:
            self._expired.inc(last.outcome is AttemptOutcome.LEASE_EXPIRED)
        if run.refused and run.refused[-1].index == index:
            self._fenced.inc()
        if run.end_index == index and run.state in _ENDS:
            self._runs.labels(queue, _ENDS[run.state]).inc()
            if last is not None:
                self._duration.labels(queue).observe(_seconds(last.start_time_ms, last.end_time_ms))

    def _label(self, queue: str) -> str:
        """A queue's name while they are few; of further ones nothing is kept."""
        if queue not in self._queues:
            if len(self._queues) >= QUEUES_MAX:
                return "other"
            self._queues.add(queue)
        return queue

    async def _refresh_often(self) -> None:
        while True:
            self.refresh()
            await asyncio.sleep(REFRESH_S)

    def refresh(self) -> None:
        """Sets the gauges: here, on the loop; the thread that serves them only reads."""
        engine, state = self._replica.engine, self._replica.state
        leads = engine.is_serving
        self._leads.set(leads)
        self._term.set(engine.term)
        self._commit_index.set(engine.commit_index)
        self._applied_index.set(engine.applied_index)
        self._jobs.set(len(state.jobs))
        self._active.set(len(state.waiting) + len(state.leases))
        self._dead_letters.set(state.failed_count)
        self._alerts.set(len(state.alerted))
        self._dropped_events.set(sum(each.count for each in state.dropped_events.values()))
        load = self._load() if leads else Load(0, 0, 0, None)
        self._workers.set(load.workers)
        self._slots.labels("busy").set(load.busy)
        self._slots.labels("free").set(load.slots - load.busy)
        clock = self._replica.clock
        self._clock_known.set(clock.is_known)
        for node_id in self._replica.config.node_ids:
            skew_ms = clock.skew_ms(node_id)
            if skew_ms is not None:
                self._skew.labels(node_id).set(skew_ms / 1_000)
        oldest_ms = load.oldest_due_time_ms
        now_ms = self._replica.clock.now_ms()
        self._oldest.set(0 if oldest_ms is None else _seconds(oldest_ms, now_ms))


def _only_metrics(serve: Any) -> Any:
    """A WSGI application that serves `/metrics` and answers 404 to every other path."""

    def application(environ: Any, start_response: Any) -> Any:
        if environ["PATH_INFO"].rstrip("/") == PATH:
            return serve(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"nothing is here; metrics are under {PATH}\n".encode()]

    return application


_ENDS = {
    RunState.SUCCEEDED: "succeeded",
    RunState.FAILED: "failed",
    RunState.CANCELLED: "cancelled",
}


def _seconds(from_ms: int, to_ms: int) -> float:
    return max(to_ms - from_ms, 0) / 1000
