"""What a client reads: a cluster.yaml or a list of addresses, without the node's validation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tocsin._cluster_file import ClusterFileError, endpoints

REPOSITORY = Path(__file__).resolve().parents[2]


def test_a_cluster_yaml_gives_its_id_and_the_api_of_each_node() -> None:
    for given in (REPOSITORY / "cluster.yaml", str(REPOSITORY / "cluster.yaml")):
        found = endpoints(given)
        assert found.cluster_id == "local"
        assert list(found.api.items()) == [
            ("n1", "127.0.0.1:7102"),
            ("n2", "127.0.0.1:7202"),
            ("n3", "127.0.0.1:7302"),
        ]


def test_a_list_of_addresses_stands_for_itself() -> None:
    found = endpoints("localhost:7102, [::1]:7202,n3.example:7302")
    assert found.cluster_id is None
    assert list(found.api.items()) == [
        ("localhost:7102", "localhost:7102"),
        ("[::1]:7202", "[::1]:7202"),
        ("n3.example:7302", "n3.example:7302"),
    ]


def test_what_only_a_newer_node_knows_does_not_stop_a_client(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "version: 9\ncluster_id: no\nshards: 12\n"
        "nodes: [{id: a, api: 'a.example:22', gossip: 'a.example:23'}]\n",
        encoding="utf-8",
    )
    found = endpoints(file)
    assert (found.cluster_id, dict(found.api)) == ("no", {"a": "a.example:22"})


@pytest.mark.parametrize(
    "given", ["", "localhost", "localhost:0", "localhost:65536", "a:1,,b:2", "a b:1"]
)
def test_neither_a_file_nor_addresses(given: str) -> None:
    with pytest.raises(ClusterFileError) as caught:
        endpoints(given)
    assert "expected host:port with a port from 1 to 65535" in str(caught.value)
    assert str(caught.value).endswith(
        "; pass the path of a cluster.yaml, or API addresses as host:port,host:port"
    )


def test_a_missing_file_names_the_fix(tmp_path: Path) -> None:
    missing = tmp_path / "cluster.yaml"
    with pytest.raises(ClusterFileError) as caught:
        endpoints(str(missing))
    assert str(caught.value) == (
        f"{missing}: cannot be read (No such file or directory); pass the path of the cluster.yaml "
        "that the nodes use, or API addresses as host:port"
    )


def test_all_faults_of_a_file_are_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(
        "nodes:\n  - {id: a, api: here}\n  - {api: 'b:1'}\n  - {id: c, api: 'c:1'}\n"
        "  - {id: c, api: 'c:2'}\n  - just text\n",
        encoding="utf-8",
    )
    with pytest.raises(ClusterFileError) as caught:
        endpoints(file)
    assert [str(fault) for fault in caught.value.faults] == [
        "cluster_id: got nothing, expected the cluster's name",
        "nodes[0].api: got 'here', expected host:port with a port from 1 to 65535",
        "nodes[1].id: got nothing, expected an id that no other node has",
        "nodes[3].id: got 'c', expected an id that no other node has",
        "nodes[4].id: got nothing, expected an id that no other node has",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "got nothing, expected cluster_id and nodes"),
        ("cluster_id: a\nnodes: []", "nodes: got an empty list, expected a list of nodes"),
        ("cluster_id: a\ncluster_id: b",
         "cluster_id: got the key again on line 2 after line 1, expected it once"),
    ],
)  # fmt: skip
def test_files_that_describe_no_cluster(tmp_path: Path, text: str, fault: str) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ClusterFileError) as caught:
        endpoints(file)
    assert fault in [str(found) for found in caught.value.faults]


def test_a_client_needs_no_validation_library() -> None:
    code = (
        "import sys; sys.modules['pydantic'] = None; sys.modules['tocsin_node'] = None\n"
        "from tocsin._cluster_file import endpoints; print(endpoints('a:1').api)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
