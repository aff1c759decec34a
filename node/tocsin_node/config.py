"""cluster.yaml and the environment, read once into one frozen Config; every default and limit.

The same file serves every node and every client; which node a process is, its flags say. Reading
is strict: text never turns into a number by itself, every duration and size carries its unit,
unknown and repeated keys are refused, and all faults are reported at once, each with its path, what
was found and what was expected. Nothing here opens a port, makes a folder, or reads the file twice.

    raft.election_timeout   500ms 1.5s 2m 1h 30d     becomes whole milliseconds, names end in _ms
    limits.payload          100B 16KiB 1MiB 1GiB     becomes bytes, names end in _bytes

data_dir and every setting in a section can be overridden by an environment variable that spells
its path in capitals, with two underscores where the path has a dot: TOCSIN_RAFT__PROFILE=wan,
TOCSIN_DATA_DIR=/var/lib/tocsin, TOCSIN_RAFT__ELECTION_TIMEOUT='[1s, 2s]'. Who the cluster is
(cluster_id, nodes) cannot: clients read it from the same file and would see another cluster.
"""

from __future__ import annotations

import difflib
import ipaddress
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from tocsin._strict_yaml import Fault, Tree, join, read, shown

SCHEMA_VERSION = "1"
NODE_COUNTS = (1, 3, 5, 7)
ENVIRONMENT_PREFIX = "TOCSIN_"

DAY_MS = 24 * 60 * 60 * 1000
FIRST_INDEX_MAX = 2**60
LOOPBACK = "a loopback address (127.0.0.0/8, ::1 or localhost) until access control exists"

# A profile is a pair of timings that fit each other; either value may still be given by itself.
PROFILES: Mapping[str, Mapping[str, Tree]] = {
    "lan": {"election_timeout": ["500ms", "1s"], "heartbeat_interval": "100ms"},
    "wan": {"election_timeout": ["2s", "4s"], "heartbeat_interval": "400ms"},
}


class ConfigError(Exception):
    """A configuration that no node may start with.

    Attributes:
        source: the file.
        faults: everything that is wrong, in the order of the file's sections.
    """

    def __init__(self, source: str, faults: list[Fault]) -> None:
        self.source = source
        self.faults = faults
        super().__init__(source, faults)

    def __str__(self) -> str:
        if len(self.faults) == 1:
            return f"{self.source}: {self.faults[0]}"
        lines = [f"{self.source}: {len(self.faults)} faults", *map(str, self.faults)]
        return "\n  ".join(lines)


class UnknownNode(Exception):
    """A node id that the file does not list."""

    def __init__(self, source: str, node_id: str, known: tuple[str, ...]) -> None:
        self.node_id = node_id
        self.known = known
        super().__init__(
            f"{source} has no node {node_id!r}; it lists {', '.join(known)}: pass one of them, "
            "or add the node to the file on every machine"
        )


# ---- units


def duration_ms(value: object) -> int:
    """Reads a duration with its unit ("1.5s") as whole milliseconds, at least 1."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(_expected(value, "a duration with a unit such as 500ms, 30s, 5m, 1h, 7d"))
    milliseconds = Decimal(found[1]) * _DURATION_UNITS_MS[found[2]]
    if milliseconds != int(milliseconds) or milliseconds < 1:
        raise ValueError(_expected(value, "a whole number of milliseconds, at least 1ms"))
    return int(milliseconds)


def size_bytes(value: object) -> int:
    """Reads a size with its unit ("256KiB") as bytes, at least 1."""
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None or int(found[1]) < 1:
        raise ValueError(_expected(value, "a size with a unit such as 512B, 256KiB, 1MiB"))
    return int(found[1]) * _SIZE_UNITS_BYTES[found[2]]


def whole_number(value: object) -> int:
    """Reads digits and nothing else."""
    if not isinstance(value, str) or not _DIGITS.fullmatch(value):
        raise ValueError(_expected(value, "a whole number in plain digits"))
    return int(value)


_DURATION = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)(ms|s|m|h|d)")
_DURATION_UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": DAY_MS}
_SIZE = re.compile(r"([0-9]{1,12})(B|KiB|MiB|GiB)")
_SIZE_UNITS_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
_DIGITS = re.compile(r"[0-9]{1,15}")
_INDEX = re.compile(r"[0-9]{1,19}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_FACTOR = re.compile(r"[0-9]{1,3}(?:\.[0-9]{1,3})?")
_HOST_NAME = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?", re.IGNORECASE)


def _expected(value: object, expected: str) -> str:
    return f"got {shown(value)}, expected {expected}"


def _within(reader: Callable[[object], int], least: str, most: str) -> Callable[[object], int]:
    """A reader that also holds the value between two bounds, both written as in the file."""
    lowest, highest = reader(least), reader(most)

    def bounded(value: object) -> int:
        number = reader(value)
        if not lowest <= number <= highest:
            raise ValueError(_expected(value, f"{least} to {most}"))
        return number

    return bounded


def _name(value: object) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError(
            _expected(value, "1 to 63 of a-z 0-9 . _ -, beginning with a letter or digit")
        )
    return value


def _log_index(value: object) -> int:
    text = value if isinstance(value, str) else ""
    if not _INDEX.fullmatch(text) or not 1 <= int(text) <= FIRST_INDEX_MAX:
        raise ValueError(_expected(value, f"a log index from 1 to {FIRST_INDEX_MAX}"))
    return int(text)


def _factor(value: object) -> float:
    if not isinstance(value, str) or not _FACTOR.fullmatch(value) or not 1 <= float(value) <= 100:
        raise ValueError(_expected(value, "a number from 1 to 100"))
    return float(value)


def _duration_pair(value: object) -> tuple[int, int]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError(_expected(value, "two durations such as [500ms, 1s]"))
    least, most = (_within(duration_ms, "50ms", "60s")(item) for item in value)
    if least >= most:
        raise ValueError(_expected(value, "the first duration below the second"))
    return least, most


def _folder(value: object) -> str:
    if not isinstance(value, str) or not value or "\0" in value or value.startswith("~"):
        raise ValueError(_expected(value, "a folder, absolute or relative to this file, without ~"))
    return value


def _loopback_address(value: object) -> str:
    """Reads "host:port" into its one spelling; names are lower case, IPv6 is in brackets."""
    text = value if isinstance(value, str) else ""
    host, _, port = text.rpartition(":")
    if not _DIGITS.fullmatch(port) or not 1 <= int(port) <= 65535 or not host:
        raise ValueError(_expected(value, "host:port with a port from 1 to 65535"))
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(_expected(value, "an IPv6 address in brackets such as [::1]:7101"))
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        if not _HOST_NAME.fullmatch(host) or host.replace(".", "").isdigit():
            raise ValueError(
                _expected(value, "a host name or an IP address before the port")
            ) from None
        if host.lower() != "localhost":
            raise ValueError(_expected(value, LOOPBACK)) from None
        return f"localhost:{int(port)}"
    if not ip.is_loopback or getattr(ip, "scope_id", None):
        raise ValueError(_expected(value, LOOPBACK))
    return f"[{ip}]:{int(port)}" if ip.version == 6 else f"{ip}:{int(port)}"


# ---- sections, each as it stands in the file


class _Section(BaseModel):
    """Unknown keys are faults, and nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Name = Annotated[str, BeforeValidator(_name)]
Address = Annotated[str, BeforeValidator(_loopback_address)]
Count = Annotated[int, BeforeValidator(_within(whole_number, "1", "1000000000"))]


class NodeConfig(_Section):
    """One node: its id, and its addresses as "host:port" (IPv6 in brackets)."""

    id: Name
    raft_address: Address = Field(alias="raft")
    api_address: Address = Field(alias="api")
    # Where its metrics are served, under /metrics; without it nothing is measured.
    http_address: Address | None = Field(default=None, alias="http")


class RaftConfig(_Section):
    """Timings of elections; the profile gives what is not given by itself."""

    profile: Literal["lan", "wan"] = "lan"
    election_timeout_ms: Annotated[tuple[int, int], BeforeValidator(_duration_pair)] = Field(
        alias="election_timeout"
    )
    heartbeat_interval_ms: Annotated[int, BeforeValidator(_within(duration_ms, "10ms", "30s"))] = (
        Field(alias="heartbeat_interval")
    )
    max_clock_skew_ms: Annotated[int, BeforeValidator(_within(duration_ms, "50ms", "60s"))] = Field(
        default=1_000, alias="max_clock_skew"
    )
    certs: Annotated[str, BeforeValidator(_folder)] | None = None
    segment_bytes: Annotated[int, BeforeValidator(_within(size_bytes, "4MiB", "1GiB"))] = Field(
        default=16 * 1024**2, alias="segment"
    )
    snapshot_every_bytes: Annotated[int, BeforeValidator(_within(size_bytes, "1MiB", "16GiB"))] = (
        Field(default=64 * 1024**2, alias="snapshot_every")
    )
    disk_reserve_bytes: Annotated[int, BeforeValidator(_within(size_bytes, "1MiB", "16GiB"))] = (
        Field(default=32 * 1024**2, alias="disk_reserve")
    )
    batch_operations: Annotated[int, BeforeValidator(_within(whole_number, "1", "65536"))] = 4096
    batch_bytes: Annotated[int, BeforeValidator(_within(size_bytes, "4KiB", "1MiB"))] = Field(
        default=32 * 1024, alias="batch"
    )
    first_index: Annotated[int, BeforeValidator(_log_index)] = 1

    @model_validator(mode="before")
    @classmethod
    def _fill_from_profile(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        # An unknown profile is its own fault; it should not bring two missing timings with it.
        return {**PROFILES.get(str(raw.get("profile")), PROFILES["lan"]), **raw}


class SchedulerConfig(_Section):
    """What a job gets that does not say otherwise."""

    misfire_grace_ms: Annotated[int, BeforeValidator(_within(duration_ms, "1s", "365d"))] = Field(
        default=60_000, alias="misfire_grace"
    )
    misfire: Literal["latest", "all", "skip"] = "latest"
    overlap: Literal["queue_one", "queue_all", "skip", "allow", "cancel_running"] = "queue_one"


class LeasesConfig(_Section):
    """How long a silent worker keeps a run, and how often a worker speaks up in that time."""

    default_ms: Annotated[int, BeforeValidator(_within(duration_ms, "1s", "24h"))] = Field(
        default=30_000, alias="default"
    )
    heartbeats_per_lease: Annotated[int, BeforeValidator(_within(whole_number, "2", "10"))] = 3


class RetryConfig(_Section):
    """Attempts after a failure: how many with the first, and how long the waits between them."""

    max_attempts: Annotated[int, BeforeValidator(_within(whole_number, "1", "1000"))] = 3
    initial_ms: Annotated[int, BeforeValidator(_within(duration_ms, "1ms", "365d"))] = Field(
        default=10_000, alias="initial"
    )
    factor: Annotated[float, BeforeValidator(_factor)] = 2.0
    max_ms: Annotated[int, BeforeValidator(_within(duration_ms, "1ms", "365d"))] = Field(
        default=3_600_000, alias="max"
    )


class LimitsConfig(_Section):
    """Everything that grows, and where it is refused or let go.

    payload and result stay well below the largest operation that the log takes (1 MiB).
    """

    payload_bytes: Annotated[int, BeforeValidator(_within(size_bytes, "1B", "512KiB"))] = Field(
        default=256 * 1024, alias="payload"
    )
    result_bytes: Annotated[int, BeforeValidator(_within(size_bytes, "1B", "64KiB"))] = Field(
        default=16 * 1024, alias="result"
    )
    jobs: Count = 1_000_000
    jobs_per_namespace: Count = 1_000_000
    pending_runs: Count = 1_000_000
    runs_per_job: Count = 20
    run_retention_ms: Annotated[int, BeforeValidator(_within(duration_ms, "1s", "3650d"))] = Field(
        default=30 * DAY_MS, alias="run_retention"
    )
    finished_runs: Count = 1_000_000
    fences: Count = 100_000

    @model_validator(mode="before")
    @classmethod
    def _namespace_within_cluster(cls, raw: Any) -> Any:
        # A single limit on jobs is meant for the cluster and so for each namespace too.
        jobs = raw.get("jobs") if isinstance(raw, dict) else None
        if isinstance(jobs, str) and _DIGITS.fullmatch(jobs):
            return {"jobs_per_namespace": jobs, **raw}
        return raw


class LogConfig(_Section):
    """How much a node says, and in which form."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"


# ---- the whole


@dataclass(frozen=True, slots=True)
class Config:
    """One cluster.yaml, checked; see the sections for units.

    Attributes:
        path: the file it was read from, absolute.
        data_dir: absolute; each node keeps its own below, see node_data_dir.
    """

    path: Path
    cluster_id: str
    nodes: tuple[NodeConfig, ...]
    data_dir: Path
    raft: RaftConfig
    scheduler: SchedulerConfig
    leases: LeasesConfig
    retry: RetryConfig
    limits: LimitsConfig
    log: LogConfig

    @property
    def node_ids(self) -> tuple[str, ...]:
        return tuple(node.id for node in self.nodes)

    def node(self, node_id: str) -> NodeConfig:
        """The node of that id.

        Raises:
            UnknownNode: the file does not list it; names those it lists.
        """
        for node in self.nodes:
            if node.id == node_id:
                return node
        raise UnknownNode(str(self.path), node_id, self.node_ids)

    @property
    def certs_dir(self) -> Path:
        """The folder of the nodes' certificates: raft.certs, else data_dir/certs."""
        if self.raft.certs is None:
            return self.data_dir / "certs"
        return self.path.parent / self.raft.certs

    def node_data_dir(self, node_id: str) -> Path:
        """The folder that belongs to one node alone: data_dir/<node id>."""
        return self.data_dir / self.node(node_id).id

    def raft_addresses(self) -> dict[str, str]:
        """Raft addresses by node id, this node among them."""
        return {node.id: node.raft_address for node in self.nodes}

    def api_addresses(self) -> dict[str, str]:
        """API addresses by node id."""
        return {node.id: node.api_address for node in self.nodes}


def load(path: str | os.PathLike[str], env: Mapping[str, str] = os.environ) -> Config:
    """Reads a cluster.yaml and the overrides in the environment.

    Raises:
        ConfigError: with every fault of the file and of the overrides.
    """
    file = Path(os.path.abspath(path))
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        fault = Fault(
            "", f"cannot be read ({error.strerror}), expected a cluster.yaml: pass -c FILE"
        )
        raise ConfigError(str(file), [fault]) from error
    except UnicodeDecodeError as error:
        fault = Fault("", f"got bytes that are not UTF-8 at {error.start}, expected UTF-8 text")
        raise ConfigError(str(file), [fault]) from error
    return parse(text, path=file, env=env)


def parse(text: str, *, path: Path, env: Mapping[str, str]) -> Config:
    """Reads the text of a cluster.yaml; a relative data_dir is relative to the folder of path.

    Raises:
        ConfigError: with every fault of the text and of the overrides.
    """
    tree, faults = read(text)
    if not isinstance(tree, dict):
        if not faults:
            faults.append(Fault("", f"got {shown(tree)}, expected the keys {', '.join(_TOP_KEYS)}"))
        raise ConfigError(str(path), faults)
    _override(tree, env, faults)
    _check_keys(tree, faults)
    if tree.get("version") != SCHEMA_VERSION:
        faults.append(Fault("version", _expected(tree.get("version"), SCHEMA_VERSION)))
    cluster_id = _text(tree, "cluster_id", _name, faults)
    nodes = _nodes(tree.get("nodes"), faults)
    data_dir = _text(tree, "data_dir", _folder, faults)
    raft = _section(tree, "raft", RaftConfig, faults)
    scheduler = _section(tree, "scheduler", SchedulerConfig, faults)
    leases = _section(tree, "leases", LeasesConfig, faults)
    retry = _section(tree, "retry", RetryConfig, faults)
    limits = _section(tree, "limits", LimitsConfig, faults)
    log = _section(tree, "log", LogConfig, faults)
    _check_raft(raft, faults)
    if retry.initial_ms > retry.max_ms:
        faults.append(
            Fault("retry.initial", f"got {retry.initial_ms}ms, expected at most retry.max")
        )
    if limits.jobs_per_namespace > limits.jobs:
        found = f"got {limits.jobs_per_namespace}, expected at most limits.jobs ({limits.jobs})"
        faults.append(Fault("limits.jobs_per_namespace", found))
    if faults:
        raise ConfigError(str(path), faults)
    return Config(
        path=path,
        cluster_id=cluster_id,
        nodes=tuple(nodes),
        data_dir=Path(os.path.abspath(path.parent / data_dir)),
        raft=raft,
        scheduler=scheduler,
        leases=leases,
        retry=retry,
        limits=limits,
        log=log,
    )


_SECTIONS: Mapping[str, type[_Section]] = {
    "raft": RaftConfig,
    "scheduler": SchedulerConfig,
    "leases": LeasesConfig,
    "retry": RetryConfig,
    "limits": LimitsConfig,
    "log": LogConfig,
}
_TOP_KEYS = ("version", "cluster_id", "nodes", "data_dir", *_SECTIONS)

_SectionT = TypeVar("_SectionT", bound=_Section)


def _override(tree: dict[str, Tree], env: Mapping[str, str], faults: list[Fault]) -> None:
    """Puts what the environment says in place of what the file says.

    Only names that can be meant for this file are taken: TOCSIN_DATA_DIR, and those with a double
    underscore. Other TOCSIN_ names belong to the client and to running jobs.
    """
    for variable in sorted(env):
        keys = variable.removeprefix(ENVIRONMENT_PREFIX).lower().split("__")
        if not variable.startswith(ENVIRONMENT_PREFIX):
            continue
        if len(keys) == 1 and keys[0] != "data_dir":
            continue
        if len(keys) > 2 or (len(keys) == 2 and keys[0] not in _SECTIONS):
            expected = ", ".join(f"{ENVIRONMENT_PREFIX}{key.upper()}__..." for key in _SECTIONS)
            faults.append(Fault(variable, f"got an override of no setting, expected {expected}"))
            continue
        value, value_faults = read(env[variable])
        faults.extend(Fault(variable, fault.message) for fault in value_faults)
        section = tree
        if len(keys) == 2:
            inner = tree.get(keys[0])
            if inner is None:
                inner = tree[keys[0]] = {}
            if not isinstance(inner, dict):
                continue  # reported as a fault of the section itself
            section = inner
        section[keys[-1]] = value


def _check_keys(tree: dict[str, Tree], faults: list[Fault]) -> None:
    for key in tree:
        if key not in _TOP_KEYS:
            faults.append(Fault(key, _unknown_key(key, _TOP_KEYS)))


def _unknown_key(key: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"got an unknown key, expected one of {', '.join(known)}{hint}"


def _text(
    tree: dict[str, Tree], key: str, reader: Callable[[object], str], faults: list[Fault]
) -> str:
    """The text of a key; beside a fault, which ends the reading, any text will do."""
    try:
        return reader(tree.get(key))
    except ValueError as error:
        faults.append(Fault(key, str(error)))
        return ""


def _section(
    tree: dict[str, Tree], key: str, model: type[_SectionT], faults: list[Fault]
) -> _SectionT:
    """The section of a key; beside a fault, which ends the reading, its defaults stand in."""
    # A section whose every line is commented out reads as nothing, and means its defaults.
    raw = tree.get(key)
    found = _validated(model, {} if raw is None else raw, key, faults)
    return model.model_validate({}) if found is None else found


def _nodes(raw: Tree, faults: list[Fault]) -> list[NodeConfig]:
    if not isinstance(raw, list) or not raw:
        faults.append(
            Fault("nodes", _expected(raw, "a list of {id: n1, raft: host:port, api: host:port}"))
        )
        return []
    if len(raw) not in NODE_COUNTS:
        faults.append(
            Fault(
                "nodes",
                f"got {len(raw)} nodes, expected 1, 3, 5 or 7: an even number survives no more "
                "failures than one node less",
            )
        )
    nodes = [_validated(NodeConfig, item, join("nodes", n), faults) for n, item in enumerate(raw)]
    _check_distinct(raw, faults)
    return [node for node in nodes if node is not None]


def _check_distinct(raw: list[Tree], faults: list[Fault]) -> None:
    """Compares ids and addresses, also those of nodes in which something else is wrong."""
    ids: dict[str, str] = {}
    bound: dict[str, str] = {}
    for index, item in enumerate(raw):
        node = item if isinstance(item, dict) else {}
        path = join("nodes", index)
        node_id = _readable(node.get("id"), _name)
        if node_id is not None and ids.setdefault(node_id, f"{path}.id") != f"{path}.id":
            found = f"got {node_id!r} again, {ids[node_id]} has it; expected ids that differ"
            faults.append(Fault(f"{path}.id", found))
        for key in ("raft", "api", "http"):
            address = _readable(node.get(key), _loopback_address)
            sockets = _sockets(address) if address is not None else []
            taken = next((bound[socket] for socket in sockets if socket in bound), None)
            if taken is not None:
                found = f"got {address!r}, {taken} has it; expected an address of its own"
                faults.append(Fault(f"{path}.{key}", found))
            for socket in sockets:
                bound.setdefault(socket, f"{path}.{key}")


def _readable(value: Tree, reader: Callable[[object], str]) -> str | None:
    try:
        return reader(value)
    except ValueError:
        return None  # already reported where the node was read


def _sockets(address: str) -> list[str]:
    """The sockets that an address can mean: localhost may be either loopback address."""
    host, _, port = address.rpartition(":")
    return [f"127.0.0.1:{port}", f"[::1]:{port}"] if host == "localhost" else [address]


def _check_raft(raft: RaftConfig, faults: list[Fault]) -> None:
    # Three heartbeats must fit in the shortest election timeout, so that one lost frame, or a slow
    # loop pass, does not depose a healthy leader.
    if raft.heartbeat_interval_ms * 3 >= raft.election_timeout_ms[0]:
        faults.append(
            Fault(
                "raft.heartbeat_interval",
                f"got {raft.heartbeat_interval_ms}ms, expected less than a third of the shortest "
                f"election timeout ({raft.election_timeout_ms[0]}ms)",
            )
        )


def _validated(
    model: type[_SectionT], raw: Tree, path: str, faults: list[Fault]
) -> _SectionT | None:
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        known = tuple(field.alias or name for name, field in model.model_fields.items())
        for detail in error.errors(include_url=False):
            where = path
            for key in detail["loc"]:
                where = join(where, key)
            faults.append(Fault(where, _message(detail, known)))
        return None


def _message(detail: Any, known: tuple[str, ...]) -> str:
    """One pydantic error in our words."""
    match detail["type"]:
        case "value_error":
            return str(detail["ctx"]["error"])
        case "missing":
            return "got nothing, expected a value"
        case "extra_forbidden":
            return _unknown_key(str(detail["loc"][-1]), known)
        case "literal_error":
            return _expected(detail["input"], detail["ctx"]["expected"].replace("'", ""))
        case "model_type":
            return _expected(detail["input"], f"the keys {', '.join(known)}")
        case _:
            return _expected(detail["input"], str(detail["msg"]))
