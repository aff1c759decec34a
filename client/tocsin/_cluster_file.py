"""Where a client finds its cluster: from cluster.yaml, or from a list of API addresses.

A client reads nodes[].id, nodes[].api and cluster_id and nothing else, so an old client keeps
working with a newer file, and the client install needs no validation library. Whether the rest of
the file is right is for the node to say (tocsin_node.config). No address is contacted here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from tocsin._strict_yaml import Fault, Tree, read, shown
from tocsin.errors import ConfigError

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_YAML_SUFFIXES = (".yaml", ".yml")


class ClusterFileError(ConfigError):
    """The cluster could not be found in what was given; repeating cannot help.

    Attributes:
        source: the path or the list of addresses as it was given.
        faults: everything that is wrong with it, each with its path in the file.
    """

    def __init__(self, source: str, faults: list[Fault], fix: str) -> None:
        self.source = source
        self.faults = faults
        self.fix = fix
        super().__init__(f"{source}: {'; '.join(map(str, faults))}; {fix}")


@dataclass(frozen=True, slots=True)
class ClusterFile:
    """What a client knows of a cluster before it has spoken to it.

    Attributes:
        cluster_id: the id that nodes must answer with; None when only addresses were given.
        api: API addresses ("host:port") by node id, in the order of the file. When only addresses
            were given the ids are not known yet, and each address stands for its own id.
    """

    cluster_id: str | None
    api: Mapping[str, str]


def endpoints(path_or_endpoints: str | Path) -> ClusterFile:
    """Reads a cluster.yaml, or a list "host:port,host:port".

    Args:
        path_or_endpoints: a Path is always a file. Text is a file if it ends in .yaml or .yml,
            contains a slash, or names a file that exists; otherwise it is a list of addresses.

    Raises:
        ClusterFileError: it is neither, or the file lacks what a client needs; names the fix.
    """
    source = str(path_or_endpoints)
    if isinstance(path_or_endpoints, Path) or _looks_like_a_path(source):
        return _from_file(Path(source))
    return _from_list(source)


def _looks_like_a_path(source: str) -> bool:
    return source.endswith(_YAML_SUFFIXES) or "/" in source or Path(source).is_file()


def _from_list(source: str) -> ClusterFile:
    faults: list[Fault] = []
    addresses: dict[str, str] = {}
    for part in source.split(","):
        address = part.strip()
        if problem := _address_problem(address):
            faults.append(Fault("", problem))
        addresses[address] = address
    if faults:
        fix = "pass the path of a cluster.yaml, or API addresses as host:port,host:port"
        raise ClusterFileError(source, faults, fix)
    return ClusterFile(cluster_id=None, api=MappingProxyType(addresses))


def _from_file(path: Path) -> ClusterFile:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        fault = Fault("", f"cannot be read ({error.strerror})")
        fix = "pass the path of the cluster.yaml that the nodes use, or API addresses as host:port"
        raise ClusterFileError(str(path), [fault], fix) from error
    except UnicodeDecodeError as error:
        fault = Fault("", f"is not UTF-8 at byte {error.start}")
        raise ClusterFileError(str(path), [fault], "save the file as UTF-8") from error
    tree, faults = read(text)
    cluster_id, api = _pick(tree, faults) if not faults else (None, {})
    if faults:
        raise ClusterFileError(str(path), faults, "use the same cluster.yaml as the nodes")
    return ClusterFile(cluster_id=cluster_id, api=MappingProxyType(api))


def _pick(tree: Tree, faults: list[Fault]) -> tuple[str | None, dict[str, str]]:
    if not isinstance(tree, dict):
        faults.append(Fault("", f"got {shown(tree)}, expected cluster_id and nodes"))
        return None, {}
    cluster_id = tree.get("cluster_id")
    if not isinstance(cluster_id, str):
        faults.append(Fault("cluster_id", f"got {shown(cluster_id)}, expected the cluster's name"))
        cluster_id = None
    nodes = tree.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        faults.append(Fault("nodes", f"got {shown(nodes)}, expected a list of nodes"))
        return cluster_id, {}
    api: dict[str, str] = {}
    for index, node in enumerate(nodes):
        node_id = node.get("id") if isinstance(node, dict) else None
        address = node.get("api") if isinstance(node, dict) else None
        if not isinstance(node_id, str) or node_id in api:
            expected = "an id that no other node has"
            faults.append(Fault(f"nodes[{index}].id", f"got {shown(node_id)}, expected {expected}"))
        elif problem := _address_problem(address):
            faults.append(Fault(f"nodes[{index}].api", problem))
        else:
            api[node_id] = str(address)
    return cluster_id, api


def _address_problem(address: Tree) -> str | None:
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if found and 1 <= int(found[2]) <= 65535:
        return None
    return f"got {shown(address)}, expected host:port with a port from 1 to 65535"
