"""cluster.yaml: what each setting becomes, and that every fault is found at once and named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tocsin_node.config import (
    Config,
    ConfigError,
    UnknownNode,
    duration_ms,
    load,
    parse,
    size_bytes,
    whole_number,
)

REPOSITORY = Path(__file__).resolve().parents[2]

MINIMAL = """
version: 1
cluster_id: test
nodes:
  - {id: n1, raft: "127.0.0.1:7101", api: "127.0.0.1:7102"}
  - {id: n2, raft: "127.0.0.1:7201", api: "127.0.0.1:7202"}
  - {id: n3, raft: "127.0.0.1:7301", api: "127.0.0.1:7302"}
data_dir: data
"""


def read(text: str, env: Mapping[str, str] | None = None) -> Config:
    return parse(text, path=Path("/etc/tocsin/cluster.yaml"), env=env or {})


def faults(text: str, env: Mapping[str, str] | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(text, env)
    return [str(fault) for fault in caught.value.faults]


def with_nodes(*nodes: str) -> str:
    lines = "".join(f"  - {node}\n" for node in nodes)
    return f"version: 1\ncluster_id: test\ndata_dir: data\nnodes:\n{lines}"


def test_defaults_are_those_that_the_documentation_states() -> None:
    config = read(MINIMAL)
    assert config.cluster_id == "test"
    assert config.node_ids == ("n1", "n2", "n3")
    assert (config.raft.profile, config.raft.election_timeout_ms) == ("lan", (500, 1000))
    assert config.raft.heartbeat_interval_ms == 100
    assert config.scheduler.misfire_grace_ms == 60_000
    assert (config.scheduler.misfire, config.scheduler.overlap) == ("latest", "queue_one")
    assert (config.leases.default_ms, config.leases.heartbeats_per_lease) == (30_000, 3)
    assert (config.retry.max_attempts, config.retry.initial_ms) == (3, 10_000)
    assert (config.retry.factor, config.retry.max_ms) == (2.0, 3_600_000)
    assert (config.limits.payload_bytes, config.limits.result_bytes) == (262_144, 16_384)
    assert (config.limits.jobs, config.limits.jobs_per_namespace) == (1_000_000, 1_000_000)
    assert (config.limits.pending_runs, config.limits.finished_runs) == (1_000_000, 1_000_000)
    assert (config.limits.runs_per_job, config.limits.run_retention_ms) == (20, 2_592_000_000)
    assert (config.log.level, config.log.format) == ("info", "text")


def test_the_repository_cluster_writes_out_exactly_the_defaults() -> None:
    config = load(REPOSITORY / "cluster.yaml", env={})
    plain = read(MINIMAL)
    for section in ("raft", "scheduler", "leases", "retry", "limits", "log"):
        assert getattr(config, section) == getattr(plain, section), section
    assert config.raft_addresses() == {
        "n1": "127.0.0.1:7101",
        "n2": "127.0.0.1:7201",
        "n3": "127.0.0.1:7301",
    }
    assert config.api_addresses() == {
        "n1": "127.0.0.1:7102",
        "n2": "127.0.0.1:7202",
        "n3": "127.0.0.1:7302",
    }
    assert config.data_dir == REPOSITORY / "data"


def test_every_setting_is_read_with_its_unit() -> None:
    config = read(
        MINIMAL
        + """
raft: {election_timeout: [1s, 2.5s], heartbeat_interval: 250ms, first_index: 1900000000000000}
scheduler: {misfire_grace: 2m, misfire: all, overlap: allow}
leases: {default: 3s, heartbeats_per_lease: 4}
retry: {max_attempts: 5, initial: 500ms, factor: 1.5, max: 2h}
limits: {payload: 1KiB, result: 64B, jobs: 10, pending_runs: 20, runs_per_job: 3,
         run_retention: 7d, finished_runs: 50}
log: {level: debug, format: json}
"""
    )
    assert config.raft.election_timeout_ms == (1000, 2500)
    assert config.raft.heartbeat_interval_ms == 250
    assert config.raft.first_index == 1_900_000_000_000_000
    assert config.scheduler.misfire_grace_ms == 120_000
    assert (config.scheduler.misfire, config.scheduler.overlap) == ("all", "allow")
    assert (config.leases.default_ms, config.leases.heartbeats_per_lease) == (3000, 4)
    assert (config.retry.max_attempts, config.retry.initial_ms) == (5, 500)
    assert (config.retry.factor, config.retry.max_ms) == (1.5, 7_200_000)
    assert (config.limits.payload_bytes, config.limits.result_bytes) == (1024, 64)
    # One limit on jobs is meant for the cluster and so for each namespace too.
    assert (config.limits.jobs, config.limits.jobs_per_namespace) == (10, 10)
    assert (config.limits.pending_runs, config.limits.runs_per_job) == (20, 3)
    assert (config.limits.run_retention_ms, config.limits.finished_runs) == (604_800_000, 50)
    assert (config.log.level, config.log.format) == ("debug", "json")


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1ms", 1),
        ("500ms", 500),
        ("1s", 1000),
        ("1.5s", 1500),
        ("0.25s", 250),
        ("2m", 120_000),
        ("1h", 3_600_000),
        ("30d", 2_592_000_000),
    ],
)
def test_durations(text: str, milliseconds: int) -> None:
    assert duration_ms(text) == milliseconds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "100",
        "1.5",
        "s",
        "-1s",
        "0s",
        "0.5ms",
        "1 s",
        "1S",
        "1sec",
        "1h30m",
        "\u0661s",
        "1e3ms",
        None,
    ],
)
def test_durations_that_are_refused(text: str | None) -> None:
    with pytest.raises(ValueError, match="expected"):
        duration_ms(text)


@pytest.mark.parametrize(
    ("text", "count"),
    [("1B", 1), ("16KiB", 16_384), ("1MiB", 1_048_576), ("2GiB", 2_147_483_648)],
)
def test_sizes(text: str, count: int) -> None:
    assert size_bytes(text) == count


@pytest.mark.parametrize("text", ["", "256", "256KB", "256kib", "1.5MiB", "0KiB", "-1B", "1 KiB"])
def test_sizes_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a size with a unit"):
        size_bytes(text)


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", "1_000", "0x10", "22:22", "1e3", "1.0", "\u0661", " 1"]
)
def test_whole_numbers_that_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a whole number in plain digits"):
        whole_number(text)


def test_all_faults_are_reported_at_once_with_their_paths() -> None:
    found = faults(
        """
version: 2
cluster_id: No
nodes:
  - {id: n1, raft: "127.0.0.1:7101", api: "10.0.0.1:7102"}
  - {id: n1, raft: "127.0.0.1:7101", api: "127.0.0.1:70000"}
  - {id: n2, raft: "127.0.0.1:7301", api: "127.0.0.1:7301"}
  - {raft: localhost:7401, api: "127.0.0.1:7402", htpp: "127.0.0.1:7403"}
raft: {electon_timeout: [500ms, 1s], heartbeat_interval: 100}
scheduler: {overlap: queue_two}
leases: 30s
limits: {jobs: 22:22, payload: 256}
logs: {level: info}
"""
    )
    assert found == [
        "logs: got an unknown key, expected one of version, cluster_id, nodes, data_dir, raft, "
        "scheduler, leases, retry, limits, log; did you mean log?",
        "version: got '2', expected 1",
        "cluster_id: got 'No', expected 1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit",
        "nodes: got 4 nodes, expected 1, 3, 5 or 7: an even number survives no more failures than "
        "one node less",
        "nodes[0].api: got '10.0.0.1:7102', expected a loopback address (127.0.0.0/8, ::1 or "
        "localhost) until access control exists",
        "nodes[1].api: got '127.0.0.1:70000', expected host:port with a port from 1 to 65535",
        "nodes[3].id: got nothing, expected a value",
        "nodes[3].htpp: got an unknown key, expected one of id, raft, api, http; "
        "did you mean http?",
        "nodes[1].id: got 'n1' again, nodes[0].id has it; expected ids that differ",
        "nodes[1].raft: got '127.0.0.1:7101', nodes[0].raft has it; expected an address of its own",
        "nodes[2].api: got '127.0.0.1:7301', nodes[2].raft has it; expected an address of its own",
        "data_dir: got nothing, expected a folder, absolute or relative to this file, without ~",
        "raft.heartbeat_interval: got '100', expected a duration with a unit such as 500ms, 30s, "
        "5m, 1h, 7d",
        "raft.electon_timeout: got an unknown key, expected one of profile, election_timeout, "
        "heartbeat_interval, max_clock_skew, certs, segment, snapshot_every, disk_reserve, "
        "batch_operations, batch, first_index; did you mean election_timeout?",
        "scheduler.overlap: got 'queue_two', expected queue_one, queue_all, skip, allow or "
        "cancel_running",
        "leases: got '30s', expected the keys default, heartbeats_per_lease",
        "limits.payload: got '256', expected a size with a unit such as 512B, 256KiB, 1MiB",
        "limits.jobs: got '22:22', expected a whole number in plain digits",
    ]


def test_one_fault_is_one_line_that_names_the_file() -> None:
    with pytest.raises(ConfigError) as caught:
        read(MINIMAL + "log: {level: loud}")
    assert str(caught.value) == (
        "/etc/tocsin/cluster.yaml: log.level: got 'loud', expected debug, info, warning or error"
    )


@pytest.mark.parametrize("count", [2, 4, 6, 8, 9])
def test_node_counts_that_are_refused(count: int) -> None:
    nodes = [
        f'{{id: n{n}, raft: "127.0.0.1:{n}1", api: "127.0.0.1:{n}2"}}' for n in range(1, count + 1)
    ]
    assert faults(with_nodes(*nodes)) == [
        f"nodes: got {count} nodes, expected 1, 3, 5 or 7: an even number survives no more "
        "failures than one node less"
    ]


@pytest.mark.parametrize("count", [1, 3, 5, 7])
def test_node_counts_that_are_accepted(count: int) -> None:
    nodes = [
        f'{{id: n{n}, raft: "127.0.0.1:{n}1", api: "127.0.0.1:{n}2"}}' for n in range(1, count + 1)
    ]
    assert len(read(with_nodes(*nodes)).nodes) == count


def test_two_nodes_cannot_share_an_id_or_an_address_however_it_is_spelled() -> None:
    assert faults(
        with_nodes(
            "{id: n1, raft: 'localhost:7101', api: '[::1]:7102'}",
            "{id: n1, raft: '127.0.0.1:7101', api: '[0:0:0:0:0:0:0:1]:7102'}",
            "{id: n2, raft: '127.0.0.2:7101', api: '127.0.0.1:7202', http: LOCALHOST:7202}",
        )
    ) == [
        "nodes[1].id: got 'n1' again, nodes[0].id has it; expected ids that differ",
        "nodes[1].raft: got '127.0.0.1:7101', nodes[0].raft has it; expected an address of its own",
        "nodes[1].api: got '[::1]:7102', nodes[0].api has it; expected an address of its own",
        "nodes[2].http: got 'localhost:7202', nodes[2].api has it; expected an address of its own",
    ]


@pytest.mark.parametrize(
    ("address", "read_as"),
    [
        ("127.0.0.1:7101", "127.0.0.1:7101"),
        ("127.255.3.4:1", "127.255.3.4:1"),
        ("[::1]:65535", "[::1]:65535"),
        ("LocalHost:07101", "localhost:7101"),
    ],
)
def test_addresses_that_are_accepted(address: str, read_as: str) -> None:
    text = with_nodes(f"{{id: n1, raft: '{address}', api: '127.0.0.1:9'}}")
    assert read(text).node("n1").raft_address == read_as


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("0.0.0.0:7101", "loopback"),
        ("[::]:7101", "loopback"),
        ("192.168.1.5:7101", "loopback"),
        ("node1.example:7101", "loopback"),
        ("localhost.example:7101", "loopback"),
        ("127.0.0.1", "host:port"),
        (":7101", "host:port"),
        ("127.0.0.1:0", "host:port"),
        ("127.0.0.1:http", "host:port"),
        ("::1:7101", "brackets"),
        ("127.1:7101", "a host name or an IP address"),
        ("127.0.0.256:7101", "a host name or an IP address"),
        ("local host:7101", "a host name or an IP address"),
    ],
)
def test_addresses_that_are_refused(address: str, expected: str) -> None:
    (found,) = faults(with_nodes(f"{{id: n1, raft: '{address}', api: '127.0.0.1:9'}}"))
    assert found.startswith(f"nodes[0].raft: got '{address}', expected ")
    assert expected in found


@pytest.mark.parametrize(
    ("section", "fault"),
    [
        (
            "raft: {election_timeout: [1s, 1s], heartbeat_interval: 100ms}",
            "raft.election_timeout: got ['1s', '1s'], expected the first duration below the second",
        ),
        (
            "raft: {election_timeout: 1s}",
            "raft.election_timeout: got '1s', expected two durations such as [500ms, 1s]",
        ),
        (
            "raft: {heartbeat_interval: 250ms}",
            "raft.heartbeat_interval: got 250ms, expected less than a third of the shortest "
            "election timeout (500ms)",
        ),
        ("raft: {first_index: 1e15}",
         "raft.first_index: got '1e15', expected a log index from 1 to 1152921504606846976"),
        ("raft: {profile: moon}", "raft.profile: got 'moon', expected lan or wan"),
        ("leases: {default: 500ms}", "leases.default: got '500ms', expected 1s to 24h"),
        ("leases: {default: }", "leases.default: got nothing, expected a duration with a unit such "
         "as 500ms, 30s, 5m, 1h, 7d"),
        ("leases: {heartbeats_per_lease: 1}",
         "leases.heartbeats_per_lease: got '1', expected 2 to 10"),
        ("retry: {initial: 2h}", "retry.initial: got 7200000ms, expected at most retry.max"),
        ("retry: {factor: 0.5}", "retry.factor: got '0.5', expected a number from 1 to 100"),
        ("retry: {factor: no}", "retry.factor: got 'no', expected a number from 1 to 100"),
        ("limits: {payload: 1MiB}", "limits.payload: got '1MiB', expected 1B to 512KiB"),
        (
            "limits: {jobs: 5, jobs_per_namespace: 6}",
            "limits.jobs_per_namespace: got 6, expected at most limits.jobs (5)",
        ),
    ],
)  # fmt: skip
def test_values_that_are_refused(section: str, fault: str) -> None:
    assert faults(MINIMAL + section) == [fault]


def test_a_profile_gives_what_is_not_given_by_itself() -> None:
    wan = read(MINIMAL + "raft: {profile: wan}").raft
    assert (wan.election_timeout_ms, wan.heartbeat_interval_ms) == ((2000, 4000), 400)
    mixed = read(MINIMAL + "raft: {profile: wan, heartbeat_interval: 200ms}").raft
    assert (mixed.election_timeout_ms, mixed.heartbeat_interval_ms) == ((2000, 4000), 200)


def test_a_section_with_every_line_commented_out_means_its_defaults() -> None:
    assert read(MINIMAL + "raft:\n  # profile: wan\n").raft.profile == "lan"


def test_text_never_turns_into_something_else() -> None:
    text = MINIMAL.replace("cluster_id: test", "cluster_id: no").replace("id: n1", "id: 010")
    config = read(text.replace("data_dir: data", "data_dir: 22:22"))
    assert (config.cluster_id, config.node_ids[0]) == ("no", "010")
    assert config.data_dir == Path("/etc/tocsin/22:22")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "got nothing, expected the keys version, cluster_id, nodes, data_dir, raft, "
         "scheduler, leases, retry, limits, log"),
        ("version: 1\nversion: 1",
         "version: got the key again on line 2 after line 1, expected it once"),
        ("a: &x 1\nb: *x", "line 1, column 4: got text that is not YAML (anchors and aliases are "
         "not read, write the value out), expected YAML"),
        ("a: !!int 5", "a: line 1: got the tag tag:yaml.org,2002:int, expected no tag"),
        ("a: [1", "line 1, column 6: got text that is not YAML (while parsing a flow sequence, "
         "expected ',' or ']', but got '<stream end>'), expected YAML"),
        ("[" * 100_000, "got a file nested too deeply to read, expected a few levels"),
        ("a" * 1_048_577, "got 1048577 characters, expected at most 1048576"),
    ],
)  # fmt: skip
def test_text_that_is_not_plain_yaml_is_refused(text: str, fault: str) -> None:
    assert fault in faults(text)


def test_a_relative_data_folder_starts_from_the_folder_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(MINIMAL, encoding="utf-8")
    config = load(file, env={})
    assert config.data_dir == tmp_path / "data"
    assert config.node_data_dir("n2") == tmp_path / "data" / "n2"
    absolute = read(MINIMAL.replace("data_dir: data", "data_dir: /var/lib/tocsin"))
    assert absolute.node_data_dir("n1") == Path("/var/lib/tocsin/n1")


def test_an_unknown_node_is_told_which_ones_there_are() -> None:
    config = read(MINIMAL)
    assert config.node("n2").api_address == "127.0.0.1:7202"
    for ask in (config.node, config.node_data_dir):
        with pytest.raises(UnknownNode) as caught:
            ask("n9")
        assert str(caught.value) == (
            "/etc/tocsin/cluster.yaml has no node 'n9'; it lists n1, n2, n3: pass one of them, or "
            "add the node to the file on every machine"
        )
        assert caught.value.known == ("n1", "n2", "n3")


def test_the_environment_overrides_the_file() -> None:
    config = read(
        MINIMAL + "raft: {profile: lan}\nlog:\n",
        {
            "TOCSIN_RAFT__PROFILE": "wan",
            "TOCSIN_RAFT__ELECTION_TIMEOUT": "[3s, 5s]",
            "TOCSIN_LOG__LEVEL": "debug",
            "TOCSIN_LEASES__DEFAULT": "3s",
            "TOCSIN_DATA_DIR": "/srv/tocsin",
            # Not settings of a node: what a worker gives to its commands, and a client's.
            "TOCSIN_FENCING_TOKEN": "17",
            "TOCSIN_ENDPOINTS": "127.0.0.1:7102",
            "TOCSIN_CLUSTER_ID": "other",
            "RAFT__PROFILE": "moon",
        },
    )
    assert config.raft.profile == "wan"
    assert (config.raft.election_timeout_ms, config.raft.heartbeat_interval_ms) == (
        (3000, 5000),
        400,
    )
    assert (config.log.level, config.leases.default_ms) == ("debug", 3000)
    assert (config.data_dir, config.cluster_id) == (Path("/srv/tocsin"), "test")


def test_overrides_that_name_no_setting_are_faults() -> None:
    assert faults(
        MINIMAL,
        {
            "TOCSIN_RAFTT__PROFILE": "wan",
            "TOCSIN_NODES__0__API": "127.0.0.1:1",
            "TOCSIN_RAFT__PROFIL": "wan",
            "TOCSIN_LOG__LEVEL": "",
        },
    ) == [
        "TOCSIN_NODES__0__API: got an override of no setting, expected TOCSIN_RAFT__..., "
        "TOCSIN_SCHEDULER__..., TOCSIN_LEASES__..., TOCSIN_RETRY__..., TOCSIN_LIMITS__..., "
        "TOCSIN_LOG__...",
        "TOCSIN_RAFTT__PROFILE: got an override of no setting, expected TOCSIN_RAFT__..., "
        "TOCSIN_SCHEDULER__..., TOCSIN_LEASES__..., TOCSIN_RETRY__..., TOCSIN_LIMITS__..., "
        "TOCSIN_LOG__...",
        "raft.profil: got an unknown key, expected one of profile, election_timeout, "
        "heartbeat_interval, max_clock_skew, certs, segment, snapshot_every, disk_reserve, "
        "batch_operations, batch, first_index; did you mean profile?",
        "log.level: got nothing, expected debug, info, warning or error",
    ]


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    missing = tmp_path / "no.yaml"
    with pytest.raises(ConfigError) as caught:
        load(missing, env={})
    assert str(caught.value) == (
        f"{missing}: cannot be read (No such file or directory), "
        "expected a cluster.yaml: pass -c FILE"
    )
    latin = tmp_path / "latin.yaml"
    latin.write_bytes(b"cluster_id: caf\xe9\n")
    with pytest.raises(
        ConfigError, match="got bytes that are not UTF-8 at 15, expected UTF-8 text"
    ):
        load(latin, env={})


def test_a_config_cannot_be_changed() -> None:
    config = read(MINIMAL)
    with pytest.raises(AttributeError):
        config.cluster_id = "other"  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.leases.default_ms = 1
