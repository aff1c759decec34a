"""Turns the text of a crontab into jobs, and says of every line what became of it.

The rule: no line changes its meaning silently. A line is imported only if Tocsin fires it when
cron does and runs the command that cron runs; otherwise it is refused, with the reason and with
what to write instead. What cron does is taken from crontab(5) and from the sources of cronie and
of Debian's cron; where they would fire at different times, the line is refused, not guessed at.

This is pure: text in, plan out, the same plan for the same text. It contacts no cluster and does
not run or look up commands. The server checks every schedule again, and knows the time zones;
machine_zone, at the end, is the one function that looks at the machine.

    line of the crontab                 becomes
    30 4 * * 1-5  /opt/report.sh        schedule "30 4 * * 1-5", command "/opt/report.sh"
    @daily  mail -s hi ann%Hello%you    schedule "@daily", stdin "Hello\\nyou\\n"
    NAME = value                        environment of the commands below it
    CRON_TZ = Europe/Berlin             time zone of the lines below it
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from tocsin.errors import TocsinError
from tocsin.workers.shell_payload import DEFAULT_SHELL, ENV_NAME, ShellPayload

# What cron gives a command that the crontab does not set. HOME, LOGNAME and USER are those of the
# user, and so the worker's own.
CRON_PATH = "/usr/bin:/bin"

EXPRESSION_CHARS_MAX = 256
# A job name has 63 characters: prefix, slug, 8 of a hash, two dashes, and room for "-999".
PREFIX_CHARS_MAX = 22
SLUG_CHARS_MAX = 26
HASH_CHARS = 8

NICKNAMES = frozenset(
    {"@yearly", "@annually", "@monthly", "@weekly", "@daily", "@midnight", "@hourly"}
)

# What a user of cron should know once, and not on every line.
DIFFERENCES_FROM_CRON = (
    "A command that exits with another code than 0 failed, and is tried again (3 attempts unless "
    "the cluster says otherwise); cron never repeats.",
    "While a run is active the next one waits, and covers those that come meanwhile "
    "(overlap: queue_one); cron starts another beside it.",
    "What was due while nothing could run is run late, once (misfire: latest); cron forgets it.",
    "Output is kept with the run; cron mails it.",
    "A command runs where a shell worker is, as the worker's user.",
)


class CrontabError(TocsinError, ValueError):
    """An option that no line of the crontab could be imported with, such as a bad time zone."""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that the user should know about one line.

    Attributes:
        line_number: from 1.
        severity: refused, and the line is not in the plan; or warning, and it is.
        message: what was found, and why it matters.
        fix: what to write or pass instead.
    """

    line_number: int
    severity: Literal["refused", "warning"]
    message: str
    fix: str


@dataclass(frozen=True, slots=True)
class Entry:
    """One line that becomes a job.

    Attributes:
        line_number: from 1.
        job_name: the job's part of the name, without a namespace; see _job_name for its stability.
        schedule: cron expression or nickname, one blank between fields.
        time_zone: IANA name; always stated, never the server's.
        command: as the shell gets it: up to the first plain percent sign, escaped ones restored.
        stdin: what the command can read, ending in a newline; None for nothing.
        env: the whole environment that the crontab gives, SHELL and PATH included.
        shell: absolute path.
        cwd: absolute path from HOME; None for the home of the worker's user.
        user: who runs it.
        original: the line as written.
        notes: what was decided for this line, for the plan.
    """

    line_number: int
    job_name: str
    schedule: str
    time_zone: str
    command: str
    stdin: str | None
    env: Mapping[str, str]
    shell: str
    cwd: str | None
    user: str
    original: str
    notes: tuple[str, ...]

    def payload(self) -> ShellPayload:
        """The payload of the job, for the handler `shell`."""
        return ShellPayload(
            command=self.command, shell=self.shell, env=self.env, stdin=self.stdin, cwd=self.cwd
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """What an import would do, in the order of the lines."""

    source_name: str
    entries: tuple[Entry, ...]
    problems: tuple[Problem, ...]

    @property
    def refused(self) -> tuple[Problem, ...]:
        return tuple(one for one in self.problems if one.severity == "refused")

    @property
    def warnings(self) -> tuple[Problem, ...]:
        return tuple(one for one in self.problems if one.severity == "warning")


def parse_crontab(
    text: str,
    *,
    system: bool,
    default_zone: str | None,
    worker_user: str,
    source_name: str,
    job_prefix: str | None = None,
) -> Plan:
    """Reads a crontab.

    Args:
        text: the whole file.
        system: whether each line names its user before the command (/etc/crontab, /etc/cron.d).
        default_zone: IANA name for lines without CRON_TZ; None if not known.
        worker_user: the user that the shell workers run as; lines of others are refused.
        source_name: the file's name; its last part begins every job name, so that a second import
            of the same file finds its jobs again wherever it was run from.
        job_prefix: begins every job name in place of source_name.

    Returns:
        The plan. Every line that is neither blank nor a comment is in it: as an entry, as a
        problem, or as part of the environment of entries below.

    Raises:
        CrontabError: default_zone or job_prefix cannot be used with any line.
    """
    if default_zone is not None and not is_zone_name(default_zone):
        raise CrontabError(f"got the time zone {default_zone!r}, expected {_ZONE_EXPECTED}")
    prefix = _slug(Path(source_name).name, PREFIX_CHARS_MAX) if job_prefix is None else job_prefix
    if len(prefix) > PREFIX_CHARS_MAX or not _NAME_PART.fullmatch(prefix):
        raise CrontabError(
            f"got the prefix {prefix!r}, expected 1 to {PREFIX_CHARS_MAX} of a-z 0-9 . _ -, "
            "beginning with a letter or digit"
        )
    reader = _Reader(
        system=system, default_zone=default_zone, worker_user=worker_user, prefix=prefix
    )
    lines = text.removeprefix("\ufeff").split("\n")
    reader.check_line_ends(lines)
    for line_number, line in enumerate(lines, start=1):
        reader.read(line_number, line.removesuffix("\r"))
    problems = sorted(reader.problems, key=lambda problem: problem.line_number)
    return Plan(source_name, tuple(reader.entries), tuple(problems))


def is_zone_name(name: str) -> bool:
    """Whether text has the form of an IANA time zone name; the server knows which ones exist."""
    return len(name) <= 64 and _ZONE_NAME.fullmatch(name) is not None


_BLANKS = " \t"
_NAME_PART = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_ZONE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_+-]*(?:/[A-Za-z0-9_+-]+)*")
_ZONE_EXPECTED = "an IANA name such as Europe/Berlin or UTC"
# Also what is left of bytes that are not UTF-8, which no payload could carry.
_UNSTORABLE = re.compile("[\x00-\x08\x0a-\x1f\x7f\ud800-\udfff]")
# The two quotes of a name or value must match, and nothing may follow a quoted value.
_ASSIGNMENT = re.compile(
    r"""(?: "(?P<double_name>[^"=]+)" | '(?P<single_name>[^'=]+)' | (?P<name>[^\s"'=][^\s=]*) )
    [ \t]* = [ \t]*
    (?: "(?P<double>[^"]*)" | '(?P<single>[^']*)' | (?P<plain>[^"'\s].*?)? ) [ \t]*""",
    re.VERBOSE,
)
_ALMOST_ASSIGNMENT = re.compile(r"""["']?([A-Za-z_][A-Za-z0-9_]*)["']?[ \t]*=""")
_FIVE_FIELDS = re.compile(r"([^ \t]+)[ \t]+([^ \t]+)[ \t]+([^ \t]+)[ \t]+([^ \t]+)[ \t]+([^ \t]+)")


class _Refusal(Exception):
    """Ends the reading of one line; becomes its Problem."""

    def __init__(self, message: str, fix: str) -> None:
        self.message = message
        self.fix = fix
        super().__init__(message)


@dataclass(slots=True)
class _Reader:
    """The state of reading: what the lines so far set for the lines below."""

    system: bool
    default_zone: str | None
    worker_user: str
    prefix: str
    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    zone_line: int = 0
    # Settings that could not be read, by name, with their line. Lines below must not run with what
    # was set before or with nothing, so they are refused until the name is set again.
    unreadable: dict[str, int] = field(default_factory=dict)
    names_taken: dict[str, int] = field(default_factory=dict)

    def check_line_ends(self, lines: list[str]) -> None:
        if any(line.endswith("\r") for line in lines):
            first = next(n for n, line in enumerate(lines, start=1) if line.endswith("\r"))
            self._warn(
                first,
                "lines end in a carriage return, which cron gives to the command; it is left out",
                "convert the file to Unix line ends",
            )
        if lines[-1].strip(_BLANKS) and not lines[-1].lstrip(_BLANKS).startswith("#"):
            self._warn(
                len(lines),
                "the last line does not end in a newline, so cron ignores it; it is imported",
                "end the file with a newline, or delete the line",
            )

    def read(self, line_number: int, line: str) -> None:
        content = line.lstrip(_BLANKS)
        if not content or content.startswith("#"):
            return
        try:
            if unstorable := _UNSTORABLE.search(content):
                raise _Refusal(
                    f"got {unstorable[0]!r}, a control character or a byte that is not UTF-8",
                    "remove it, or save the file as UTF-8",
                )
            if assignment := _assignment(content):
                self._assign(line_number, *assignment)
            else:
                self._enter(line_number, line, content)
        except _Refusal as refusal:
            if almost := _ALMOST_ASSIGNMENT.match(content):
                self.unreadable[almost[1]] = line_number
            self.problems.append(Problem(line_number, "refused", refusal.message, refusal.fix))

    def _warn(self, line_number: int, message: str, fix: str) -> None:
        self.problems.append(Problem(line_number, "warning", message, fix))

    # ---- NAME = value

    def _assign(self, line_number: int, name: str, value: str) -> None:
        if not ENV_NAME.fullmatch(name):
            raise _Refusal(
                f"got the variable name {name!r}, which no shell can read",
                "use letters, digits and _ only, or delete the line",
            )
        if name in ("LOGNAME", "USER"):
            # cron sets both itself after reading the crontab.
            self._warn(
                line_number,
                f"{name} is always the user that runs the command; cron ignores this line too",
                "delete the line",
            )
            return
        self._check_setting(name, value)
        self._remark_on_setting(line_number, name, value)
        self.env[name] = value
        self.unreadable.pop(name, None)
        if name == "CRON_TZ":
            self.zone_line = line_number

    def _check_setting(self, name: str, value: str) -> None:
        if name in ("SHELL", "HOME") and not value.startswith("/"):
            raise _Refusal(
                f"got {name}={value!r}, expected an absolute path",
                f"write {name}=/... with the whole path",
            )
        if name == "CRON_TZ" and value and not is_zone_name(value):
            raise _Refusal(
                f"got CRON_TZ={value!r}, expected {_ZONE_EXPECTED}",
                "write CRON_TZ=Region/City",
            )

    def _remark_on_setting(self, line_number: int, name: str, value: str) -> None:
        if name == "MAILTO" and value:
            self._warn(
                line_number,
                f"no mail is sent to {value}; the output is kept with each run instead",
                "read it with `tocsin run get`, or send it from the command itself",
            )
        elif name == "TZ":
            self._warn(
                line_number,
                "TZ reaches the commands but does not move their times, as in cron",
                "write CRON_TZ= for the times of the lines below",
            )
        elif name == "RANDOM_DELAY" and value.strip("0"):
            self._warn(
                line_number,
                "RANDOM_DELAY does not delay runs; they are due at the time written",
                "spread the minutes of the lines, or delete this one",
            )

    # ---- schedule command

    def _enter(self, line_number: int, original: str, content: str) -> None:
        notes: list[str] = []
        if almost := _ALMOST_ASSIGNMENT.match(content):
            raise _Refusal(
                f"got a value of {almost[1]} with a quote that does not close, or text after it",
                f"quote the whole value of {almost[1]} once, or not at all",
            )
        if content.startswith("-"):
            content = content[1:]
            notes.append("the leading '-' only kept cron from logging, and is left out")
        fields, rest = _split_schedule(content)
        time_zone, zone_note = self._time_zone()
        column, raw_command = self._split_user(line_number, rest)
        schedule = _checked_schedule(fields, column, raw_command, time_zone)
        user = self._checked_user(column)
        if self.unreadable:
            name, broken_line = next(iter(self.unreadable.items()))
            raise _Refusal(
                f"{name} on line {broken_line} could not be read, and this line needs it",
                f"correct line {broken_line}",
            )
        if time_zone is None:
            raise _Refusal(
                "no CRON_TZ stands above this line, and this machine's time zone is not known",
                "pass --tz with an IANA name such as Europe/Berlin, or write CRON_TZ= above",
            )
        command, stdin = _split_stdin(raw_command)
        if not command.strip():
            raise _Refusal(*_NO_COMMAND)
        home = self.env.get("HOME")
        if home is not None:
            notes.append(f"runs in {home}, from HOME")
        self.entries.append(
            Entry(
                line_number=line_number,
                job_name=self._job_name(schedule, user, raw_command, command),
                schedule=schedule,
                time_zone=time_zone,
                command=command,
                stdin=stdin,
                env=MappingProxyType({"PATH": CRON_PATH, "SHELL": DEFAULT_SHELL, **self.env}),
                shell=self.env.get("SHELL", DEFAULT_SHELL),
                cwd=home,
                user=user,
                original=original,
                notes=(zone_note, *notes),
            )
        )

    def _split_user(self, line_number: int, rest: str) -> tuple[str, str]:
        """The user column with the blanks after it, empty in a user's crontab; and the command."""
        if self.system:
            user = re.split(r"[ \t]", rest, maxsplit=1)[0]
            if not user.startswith("*") and ("/" in user or "=" in user):
                raise _Refusal(
                    f"got {user!r} where a system crontab names the user of the command",
                    "write the user before the command, or leave out --system for a user's crontab",
                )
            command = rest[len(user) :].lstrip(_BLANKS)
            return rest[: len(rest) - len(command)], command
        if rest.startswith(("root ", "root\t")):
            self._warn(
                line_number,
                "the command begins with the word root, which looks like a user",
                "pass --system if this is a system crontab",
            )
        return "", rest

    def _checked_user(self, column: str) -> str:
        if not self.system:
            return self.worker_user
        user = column.strip(_BLANKS)
        if user != self.worker_user:
            raise _Refusal(
                f"runs as {user}, and the worker's user is {self.worker_user}",
                f"pass --user {user} where the shell workers run as {user}; "
                f"or write `{self.worker_user} sudo -u {user} ...`",
            )
        return user

    def _time_zone(self) -> tuple[str | None, str]:
        """The zone of the line being read, and the note that says where it is from."""
        explicit = self.env.get("CRON_TZ")
        if explicit:
            return explicit, f"time zone {explicit} from CRON_TZ on line {self.zone_line}"
        return self.default_zone, f"time zone {self.default_zone}, without CRON_TZ"

    def _job_name(self, schedule: str, user: str, raw_command: str, command: str) -> str:
        """A name that only the line decides, so that moving it in the file does not rename its job.

        The hash covers the schedule, the command, the user of a system crontab and CRON_TZ, but
        not other settings nor --tz: changing those changes the job instead of making another.
        Equal lines are told apart by their order.
        """
        parts = (
            self.env.get("CRON_TZ", ""),
            schedule,
            user if self.system else "",
            raw_command,
        )
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        name = f"{self.prefix}-{_command_slug(command)}-{digest[:HASH_CHARS]}"
        count = self.names_taken[name] = self.names_taken.get(name, 0) + 1
        return name if count == 1 else f"{name}-{count}"


# ---- the parts of a line


def _assignment(content: str) -> tuple[str, str] | None:
    """Name and value, if cron reads the line as an assignment; there is no expansion in values."""
    found = _ASSIGNMENT.fullmatch(content)
    if found is None:
        return None
    name = found["name"] or found["double_name"] or found["single_name"]
    return name, found["double"] or found["single"] or found["plain"] or ""


def _split_schedule(content: str) -> tuple[list[str], str]:
    """The nickname, or the five fields, and what follows them."""
    if content.startswith("@"):
        nickname = re.split(r"[ \t]", content, maxsplit=1)[0]
        return [nickname], content[len(nickname) :].lstrip(_BLANKS)
    found = _FIVE_FIELDS.match(content)
    if found is None:
        count = len(content.split())
        raise _Refusal(
            f"got {count} word{'s' if count != 1 else ''}, expected five time fields and a command",
            "write minute, hour, day of month, month, day of week and the command; "
            "or begin a comment with #",
        )
    return list(found.groups()), content[found.end() :].lstrip(_BLANKS)


def _split_stdin(raw: str) -> tuple[str, str | None]:
    """Splits at the first % that no backslash precedes, as cron does.

    In the command `\\%` is a percent sign and every other backslash stays. In the input further
    percent signs are line ends, and the last line gets one if it has none.
    """
    command, end = _read_percents(raw, 0, stop=True)
    if end >= len(raw):
        return command, None
    stdin, _ = _read_percents(raw, end, stop=False)
    if stdin and not stdin.endswith("\n"):
        stdin += "\n"
    return command, stdin


def _read_percents(raw: str, start: int, *, stop: bool) -> tuple[str, int]:
    """Text from start to the end, or to the first plain % if that stops; and the next position."""
    out: list[str] = []
    escaped = False
    for position in range(start, len(raw)):
        char = raw[position]
        if char == "%" and escaped:
            out[-1] = "%"
        elif char == "%" and stop:
            return "".join(out), position + 1
        else:
            out.append("\n" if char == "%" else char)
        # In the command a backslash is itself escaped by one before it; in the input it is not.
        escaped = char == "\\" and not (escaped and stop)
    return "".join(out), len(raw)


# ---- schedules


@dataclass(frozen=True, slots=True)
class _Field:
    title: str
    low: int
    high: int
    names: Mapping[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return self.high - self.low + 1


_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_WEEKDAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
_MINUTE = _Field("minute", 0, 59)
_HOUR = _Field("hour", 0, 23)
_DAY = _Field("day of month", 1, 31)
_MONTH = _Field("month", 1, 12, {name: n for n, name in enumerate(_MONTHS, start=1)})
_WEEKDAY = _Field("day of week", 0, 6, {name: n for n, name in enumerate(_WEEKDAYS)})
_FIELDS = (_MINUTE, _HOUR, _DAY, _MONTH, _WEEKDAY)
_ALL_DAYS = frozenset(range(1, 32))
_ALL_WEEKDAYS = frozenset(range(7))
_MONTH_DAYS_MAX = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_ITEM = re.compile(
    r"(?:\*|(?P<first>[0-9]{1,9}|[A-Za-z]{3})(?:-(?P<last>[0-9]{1,9}|[A-Za-z]{3}))?)"
    r"(?:/(?P<step>[0-9]{1,9}))?"
)
# Marks of other crons in a field; words of letters only are names, unless they are one of these.
_OTHER_CRONS = re.compile(r"[?#]|[0-9(][LWH]|[LWHR][0-9(/-]|L|W|LW|H|R")
_NO_COMMAND = ("got no command", "write the command after the time fields")


def _checked_schedule(fields: list[str], column: str, command: str, time_zone: str | None) -> str:
    """The schedule to store, if cron and Tocsin fire it at the same times.

    Args:
        fields: a nickname alone, or the five fields.
        column: the user of a system crontab; with command, to write the line again in a fix.
        time_zone: for a fix that has to ask for the date.
    """
    # A sixth field stands where the user or the command should.
    if len(fields) == 5 and (column or command).startswith("*"):
        raise _Refusal(
            "got six time fields, or a command that begins with *; cron refuses both",
            "leave out the seconds; for seconds use `tocsin job create --cron`",
        )
    if not command:
        raise _Refusal(*_NO_COMMAND)
    if len(fields) == 1:
        return _checked_nickname(fields[0], column + command)
    schedule = " ".join(fields)
    if len(schedule) > EXPRESSION_CHARS_MAX:
        raise _Refusal(
            f"got {len(schedule)} characters of schedule, expected {EXPRESSION_CHARS_MAX} at most",
            "write ranges and steps in place of long lists, or two lines",
        )
    values = [_field_values(text, spec) for text, spec in zip(fields, _FIELDS, strict=True)]
    _check_days(fields, values, column, command, time_zone)
    return schedule


def _checked_nickname(nickname: str, rest: str) -> str:
    if nickname == "@reboot":
        raise _Refusal(
            "@reboot runs when a machine starts, and a cluster has no such moment",
            "start the command from the machine's init system, or give it a schedule",
        )
    if nickname not in NICKNAMES:
        close = nickname.lower()
        fix = f"write {close} {rest}" if close in NICKNAMES else "write five time fields"
        raise _Refusal(
            f"got {nickname}, expected one of {', '.join(sorted(NICKNAMES))}",
            fix,
        )
    return nickname


def _field_values(text: str, spec: _Field) -> frozenset[int]:
    """The values that a field names; Sunday is 0."""
    values: set[int] = set()
    for item in text.split(","):
        values |= _item_values(item, text, spec)
    return frozenset(values)


def _item_values(item: str, text: str, spec: _Field) -> set[int]:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise _unknown_item(item, spec)
    # Sunday is 7 too, and a range may end there.
    high = 7 if spec is _WEEKDAY else spec.high
    first = spec.low if found["first"] is None else _number(found["first"], high, text, spec)
    last = _last_value(found, first, high, text, spec)
    step = 1 if found["step"] is None else int(found["step"])
    if step == 0:
        raise _Refusal(
            f"got the step /0 in {item!r} for the {spec.title}", "write a step of 1 or more"
        )
    if step > spec.size:
        raise _Refusal(
            f"got the step /{step} in {item!r} for the {spec.title}, which has {spec.size} values: "
            f"cron matches {first} alone, Tocsin refuses it",
            f"write {first} in place of {item}",
        )
    if found["step"] is not None and found["first"] is not None and found["last"] is None:
        raise _Refusal(
            f"got {item!r} for the {spec.title}: cron refuses it or reads {first} alone, Tocsin "
            f"would read {first}-{spec.high}/{step}",
            f"write {first}, or {first}-{spec.high}/{step}",
        )
    if first > last:
        wrapped = [*range(first, spec.high + 1), *range(spec.low, last + 1)][::step]
        raise _Refusal(
            f"got the range {item!r} for the {spec.title}, which ends before it begins: some "
            "crons refuse it, some never fire, some go round",
            f"write {_compact(set(wrapped))} to go round",
        )
    values = range(first, last + 1, step)
    return {value % 7 for value in values} if spec is _WEEKDAY else set(values)


def _last_value(found: re.Match[str], first: int, high: int, text: str, spec: _Field) -> int:
    if found["last"] is not None:
        return _number(found["last"], high, text, spec)
    return spec.high if found["first"] is None else first


def _number(word: str, high: int, text: str, spec: _Field) -> int:
    if word.isdigit():
        if spec.low <= int(word) <= high:
            return int(word)
    elif word.lower() in spec.names:
        return spec.names[word.lower()]
    names = f" or {'-'.join(list(spec.names)[:: spec.size - 1]).upper()}" if spec.names else ""
    raise _Refusal(
        f"got {word!r} in {text!r} for the {spec.title}, expected {spec.low} to {high}{names}",
        f"correct the {spec.title}",
    )


def _unknown_item(item: str, spec: _Field) -> _Refusal:
    if not item:
        return _Refusal(
            f"got an empty item in the list for the {spec.title}", "remove the spare comma"
        )
    if "~" in item:
        return _Refusal(
            f"got the random range {item!r} for the {spec.title}, which cronie draws at its start",
            "choose one value of that range and write it",
        )
    found = _OTHER_CRONS.fullmatch(item) if item.isalpha() else _OTHER_CRONS.search(item)
    if found:
        return _Refusal(
            f"got {item!r} for the {spec.title}, which crontab(5) does not have",
            "use `tocsin job create --cron` for what Tocsin has beyond cron",
        )
    return _Refusal(
        f"got {item!r} for the {spec.title}, expected *, a value or a range, perhaps with /step",
        f"correct the {spec.title}",
    )


def _check_days(
    fields: list[str],
    values: list[frozenset[int]],
    column: str,
    command: str,
    time_zone: str | None,
) -> None:
    """Refuses day fields that Tocsin joins in another way than cron, and dates that never come.

    cron: both must match if either begins with *, else one is enough. Tocsin: both must match only
    if either is * alone. They differ for */2 and the like beside another restricted field.
    """
    minute, hour, day, month, weekday = fields
    _, _, days, months, weekdays = values
    if "*" not in (day, weekday) and (day.startswith("*") or weekday.startswith("*")):
        if days == _ALL_DAYS:
            fix = f"write: {minute} {hour} * {month} {weekday} {column}{command}"
        elif weekdays == _ALL_WEEKDAYS:
            fix = f"write: {minute} {hour} {day} {month} * {column}{command}"
        else:
            guard = _weekday_guard(weekdays, time_zone)
            fix = f"guard the command: {minute} {hour} {day} {month} * {column}{guard}{command}"
        raise _Refusal(
            f"cron runs this when both the day of month ({day}) and the day of week ({weekday}) "
            "match, because one begins with *; Tocsin when either does",
            fix,
        )
    if weekday == "*" and not any(n <= _MONTH_DAYS_MAX[m - 1] for n in days for m in months):
        raise _Refusal(
            f"got day {day} of month {month}, which never comes",
            "correct the date, or delete the line",
        )


def _weekday_guard(weekdays: frozenset[int], time_zone: str | None) -> str:
    """Shell text that goes on only on these days, since no expression means both day fields.

    It asks for the date in the zone of the schedule, and it ends in success on the other days, so
    that they are not failures.
    """
    zone = f"TZ={time_zone} " if time_zone else ""
    digits = "".join(str(n) for n in sorted(n or 7 for n in weekdays))
    return f"{zone}date +\\%u | grep -q '[{digits}]' || exit 0; "


def _compact(values: set[int]) -> str:
    """A field of these values, neighbours as ranges: {0, 1, 2, 5} is 0-2,5."""
    runs: list[list[int]] = []
    for value in sorted(values):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# ---- names


def _command_slug(command: str) -> str:
    words = command.split()
    while len(words) > 1 and _ALMOST_ASSIGNMENT.match(words[0]):
        words.pop(0)
    words[0] = words[0].rstrip("/").rpartition("/")[2]
    return _slug(" ".join(words), SLUG_CHARS_MAX)


def _slug(text: str, chars_max: int) -> str:
    """Lower case letters, digits, dots and dashes of text, cut between words where possible."""
    slug = re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")
    if len(slug) > chars_max:
        whole_words = slug[: chars_max + 1].rpartition("-")[0]
        slug = (whole_words or slug[:chars_max]).strip("-.")
    return slug or "line"


# ---- the machine


def machine_zone(env: Mapping[str, str] = os.environ, etc: Path = Path("/etc")) -> str | None:
    """The IANA name of this machine's time zone, or None if it cannot be told for certain.

    TZ decides where it is set, as for every program; then the link /etc/localtime, which is what
    the C library and so cron reads; then the name in /etc/timezone.
    """
    if "TZ" in env:
        zone = env["TZ"].removeprefix(":")
        return _zone_of_path(zone) if zone.startswith("/") else _zone_or_none(zone or "UTC")
    try:
        linked = _zone_of_path(os.readlink(etc / "localtime"))
        if linked is not None:
            return linked
    except OSError:
        pass  # no link: a copied file does not carry its name
    try:
        return _zone_or_none((etc / "timezone").read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError):
        return None


def _zone_of_path(path: str) -> str | None:
    _, found, zone = path.partition("zoneinfo/")
    return _zone_or_none(zone.removeprefix("posix/")) if found else None


def _zone_or_none(zone: str) -> str | None:
    return zone if is_zone_name(zone) else None
