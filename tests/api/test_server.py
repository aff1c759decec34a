"""A node's beginning and end: who serves, and what is said when it cannot start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.api.conftest import (
    DEADLINE_S,
    Cluster,
    Stubs,
    config,
    config_text,
    create,
    job,
    refusal,
    rid,
    running,
    until,
)
from tocsin.v1 import cluster_pb2, cluster_pb2_grpc, job_pb2, run_pb2
from tocsin_node.__main__ import main
from tocsin_node.core.command import SCHEMA
from tocsin_node.raft.engine import AddressInUse, DataDirInUse, RaftError
from tocsin_node.server import Server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health(channel: grpc.aio.Channel, service: str) -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
    status: int = answer.status
    return status


async def test_only_the_leader_reports_that_it_leads(three: Cluster) -> None:
    leader = await three.leader()
    for node_id, stubs in three.stubs.items():
        assert await health(stubs.channel, "") == SERVING
        expected = SERVING if node_id == leader else NOT_SERVING
        assert await health(stubs.channel, "tocsin.leader") == expected
    await three.stop_node(leader)
    new = await three.leader()
    channel = three.stubs[new].channel
    async with asyncio.timeout(DEADLINE_S):
        while await health(channel, "tocsin.leader") != SERVING:
            pass


async def test_a_term_begins_with_its_number_and_limits(tmp_path: Path) -> None:
    made = config(tmp_path, more="limits: {jobs: 7, runs_per_job: 3}")
    async with running(made) as cluster:
        server = cluster.servers["n1"]
        state = server.replica.state
        assert state.term == server.engine.term
        assert (state.limits.jobs, state.limits.runs_per_job) == (7, 3)
        assert server.dispatcher.started
        await server.leadership.stop()
        assert not server.leadership.serves
        assert not server.dispatcher.started


async def test_a_restarted_node_has_its_state_again(tmp_path: Path) -> None:
    made = config(tmp_path)
    async with running(made) as cluster:
        await create(cluster.stubs["n1"])
    async with running(made) as cluster:
        await until(lambda: "default/report" in cluster.servers["n1"].replica.state.jobs)


async def test_a_second_node_on_the_same_api_port_is_refused(tmp_path: Path) -> None:
    made = config(tmp_path)
    with socket.socket() as taken:
        host, _, port = made.node("n1").api_address.rpartition(":")
        taken.bind((host, int(port)))
        taken.listen()
        server = Server(made, "n1", on_fatal=_unexpected)
        with pytest.raises(AddressInUse, match=f"{port}.*n1.*another"):
            await server.start()
    assert not made.node_data_dir("n1").exists(), "nothing was changed"


async def test_a_second_node_on_the_same_raft_port_leaves_nothing_running(tmp_path: Path) -> None:
    made = config(tmp_path)
    host, _, port = made.node("n1").raft_address.rpartition(":")
    with socket.socket() as taken:
        taken.bind((host, int(port)))
        taken.listen()
        with pytest.raises(AddressInUse, match=port):
            await Server(made, "n1", on_fatal=_unexpected).start()
    async with running(made):
        pass  # neither the API port nor the folder is held


async def test_a_second_node_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    async with running(config(tmp_path)):
        with pytest.raises(DataDirInUse, match="folder"):
            await Server(config(tmp_path), "n1", on_fatal=_unexpected).start()


async def test_a_state_machine_that_raises_ends_the_node(tmp_path: Path) -> None:
    fatal: list[BaseException] = []
    server = Server(config(tmp_path), "n1", on_fatal=fatal.append)
    await server.start()
    try:
        await until(lambda: server.leadership.serves)
        with pytest.raises(RaftError):
            await server.engine.propose(b"no command at all")
        await until(lambda: fatal)
        assert "cannot be applied" in str(fatal[0])
    finally:
        await server.stop()


def _unexpected(error: BaseException) -> None:
    raise AssertionError("the node must not fail") from error


# -- the process -----------------------------------------------------------------------------------


async def spawn(*flags: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tocsin_node", *flags, stdout=PIPE, stderr=PIPE
    )


async def finished(process: Process) -> tuple[int, str]:
    """Exit code and everything said on stderr."""
    try:
        async with asyncio.timeout(DEADLINE_S):
            out, said = await process.communicate()
    except BaseException:
        process.kill()
        raise
    assert out == b""
    code = process.returncode
    assert code is not None
    return code, said.decode()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(config_text(1))
    return path


def edit(file: Path, old: str, new: str) -> None:
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_node_says_when_it_is_ready_and_stops_on_a_signal(
    file: Path, number: signal.Signals
) -> None:
    process = await spawn("--node", "n1", "-c", str(file))
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        while not (line := await process.stderr.readline()).startswith(b"node n1 ready: "):
            assert line
    words = line.decode().split()
    assert words[3::2] == ["api", "raft", "pid"]
    assert words[8] == str(process.pid)
    async with grpc.aio.insecure_channel(words[4]) as channel:
        stub: Any = cluster_pb2_grpc.ClusterServiceStub(channel)
        status = await stub.GetStatus(cluster_pb2.GetStatusRequest())
        assert status.process_id == process.pid
    process.send_signal(number)
    code, _ = await finished(process)
    assert code == 0


async def test_logs_can_be_json(file: Path) -> None:
    edit(file, "data_dir: data", "data_dir: data\nlog: {format: json}")
    process = await spawn("--node", "n1", "-c", str(file), "--data-dir", str(file.parent / "x"))
    assert process.stderr is not None
    async with asyncio.timeout(DEADLINE_S):
        while b"serves as leader" not in (line := await process.stderr.readline()):
            assert line
    said = json.loads(line)
    assert (said["level"], said["logger"]) == ("info", "tocsin_node.server")
    process.terminate()
    assert (await finished(process))[0] == 0
    assert (file.parent / "x" / "n1").is_dir()
    assert not (file.parent / "data").exists()


def test_every_fault_of_the_file_is_said(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit(file, "version: 1", "version: 2\nleases: {defalt: 3s}")
    assert main(["--node", "n1", "-c", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "version" in said
    assert "did you mean default?" in said


def test_an_unknown_node_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--node", "n7", "-c", str(file)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "lists n1" in said
    assert not (file.parent / "data").exists()


def test_wrong_flags_are_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["-c", str(file)])
    assert caught.value.code == 2
    assert "--node" in capsys.readouterr().err


async def test_what_is_in_use_is_said_in_one_line(file: Path) -> None:
    first = await spawn("--node", "n1", "-c", str(file))
    try:
        assert first.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while b" ready: " not in await first.stderr.readline():
                pass
        code, said = await finished(await spawn("--node", "n1", "-c", str(file)))
        assert code == 1
        assert said.count("\n") == 1
        assert said.startswith("error: API address ")
        # The same folder, at other addresses.
        other = file.with_name("other.yaml")
        other.write_text(config_text(1))
        code, said = await finished(await spawn("--node", "n1", "-c", str(other)))
        assert code == 1
        assert said.count("\n") == 1
        assert said.startswith("error: data folder ")
    finally:
        first.terminate()
        code, _ = await finished(first)
    assert code == 0


async def test_a_fatal_error_ends_the_process_with_its_own_code(file: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from tocsin_node import __main__ as m; m._die(RuntimeError('disk'))",
        stderr=PIPE,
        stdout=PIPE,
        env={**os.environ},
    )
    code, said = await finished(process)
    assert code == 70
    assert "error: node stopped: disk" in said


async def test_every_member_says_how_much_of_the_log_it_understands(three: Cluster) -> None:
    for server in three.servers.values():
        heard = server.engine.peer_status
        await until(lambda heard=heard: [peer.schema for peer in heard()] == [SCHEMA, SCHEMA])


async def test_a_caller_that_means_another_cluster_is_refused(one: Stubs) -> None:
    created = job_pb2.CreateJobRequest(job=job(), request_id=rid())
    wrong: Any = (("tocsin-cluster-id", "prod-eu"),)
    refused = await refusal(one.jobs.CreateJob(created, metadata=wrong))
    assert (refused.reason, refused.code) == (
        "CLUSTER_ID_MISMATCH",
        grpc.StatusCode.INVALID_ARGUMENT,
    )
    assert refused.detail == {"cluster_id": "test"}
    watch = one.runs.WatchRuns(run_pb2.WatchRunsRequest(), metadata=wrong)
    assert (await refusal(watch.read())).reason == "CLUSTER_ID_MISMATCH"
    session = one.workers.Session(metadata=wrong)
    assert (await refusal(session.read())).reason == "CLUSTER_ID_MISMATCH"
    listed = await one.jobs.ListJobs(job_pb2.ListJobsRequest())
    assert not listed.jobs, "nothing was done"
    await one.jobs.CreateJob(created, metadata=(("tocsin-cluster-id", "test"),))
