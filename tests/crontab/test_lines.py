"""What each line of a crontab becomes: schedules, commands, inputs, settings and names, exactly."""

from __future__ import annotations

import re

import pytest

from tocsin.crontab import CrontabError, Entry, Plan, is_zone_name, parse_crontab


def plan(
    text: str,
    *,
    system: bool = False,
    zone: str | None = "Europe/Rome",
    user: str = "ann",
    source: str = "crontab",
    prefix: str | None = None,
) -> Plan:
    return parse_crontab(
        text,
        system=system,
        default_zone=zone,
        worker_user=user,
        source_name=source,
        job_prefix=prefix,
    )


def only(text: str, *, system: bool = False) -> Entry:
    found = plan(text, system=system)
    assert found.problems == ()
    (entry,) = found.entries
    return entry


def refused(text: str, *, system: bool = False) -> tuple[str, str]:
    """Message and fix of the one refused line; nothing is imported, nothing else remarked."""
    found = plan(text, system=system)
    assert found.entries == ()
    (problem,) = found.problems
    assert problem.severity == "refused"
    return problem.message, problem.fix


# ---- schedules


@pytest.mark.parametrize(
    ("line", "schedule", "command"),
    [
        ("* * * * * true", "* * * * *", "true"),
        ("  \t*/5  0,12\t1-15/2 jan-MAR,12  Mon-fri \t true x",
         "*/5 0,12 1-15/2 jan-MAR,12 Mon-fri", "true x"),
        ("05 04 * * 7 true", "05 04 * * 7", "true"),
        ("0 0 * * 5-7 true", "0 0 * * 5-7", "true"),
        ("0 0 * * sun true", "0 0 * * sun", "true"),
        ("0 0 1,15 * 3 true", "0 0 1,15 * 3", "true"),
        ("0 0 1-31 * 1 true", "0 0 1-31 * 1", "true"),
        ("0 0 */2 * * true", "0 0 */2 * *", "true"),
        ("0 0 * * */2 true", "0 0 * * */2", "true"),
        ("0 0 29 2 * true", "0 0 29 2 *", "true"),
        ("0 0 30 2 1 true", "0 0 30 2 1", "true"),
        ("0 0 31 2,3 * true", "0 0 31 2,3 *", "true"),
        ("*/60 */24 */31 */12 * true", "*/60 */24 */31 */12 *", "true"),
        ("0 0 * * */7 true", "0 0 * * */7", "true"),
        ("0-10/20 * * * * true", "0-10/20 * * * *", "true"),
        ("@daily true", "@daily", "true"),
        ("@midnight\ttrue", "@midnight", "true"),
        ("@weekly true", "@weekly", "true"),
        ("@monthly true", "@monthly", "true"),
        ("@yearly true", "@yearly", "true"),
        ("@annually true", "@annually", "true"),
        ("@hourly   true  ", "@hourly", "true  "),
        ("* * * * * FOO=bar env", "* * * * *", "FOO=bar env"),
        ("* * * * * true # not a comment", "* * * * *", "true # not a comment"),
    ],
)  # fmt: skip
def test_lines_that_cron_and_tocsin_read_alike(line: str, schedule: str, command: str) -> None:
    entry = only(line + "\n")
    assert (entry.schedule, entry.command, entry.stdin) == (schedule, command, None)
    assert (entry.time_zone, entry.user, entry.original) == ("Europe/Rome", "ann", line)
    assert (entry.shell, entry.cwd) == ("/bin/sh", None)


BACKWARDS = "which ends before it begins: some crons refuse it, some never fire, some go round"
BEYOND = "which crontab(5) does not have"
USE_CREATE = "use `tocsin job create --cron` for what Tocsin has beyond cron"
ITEM = "expected *, a value or a range, perhaps with /step"
NICKNAMES = "expected one of @annually, @daily, @hourly, @midnight, @monthly, @weekly, @yearly"


@pytest.mark.parametrize(
    ("fields", "message", "fix"),
    [
        (
            "0 22-2 * * *",
            "got the range '22-2' for the hour, " + BACKWARDS,
            "write 0-2,22-23 to go round",
        ),
        (
            "50-10/5 * * * *",
            "got the range '50-10/5' for the minute, " + BACKWARDS,
            "write 0,5,10,50,55 to go round",
        ),
        (
            "0 0 * * sat-sun",
            "got the range 'sat-sun' for the day of week, " + BACKWARDS,
            "write 0,6 to go round",
        ),
        (
            "0 0 * * 7-2",
            "got the range '7-2' for the day of week, " + BACKWARDS,
            "write 0-2 to go round",
        ),
        (
            "0 0 * nov-feb *",
            "got the range 'nov-feb' for the month, " + BACKWARDS,
            "write 1-2,11-12 to go round",
        ),
        (
            "*/90 * * * *",
            "got the step /90 in '*/90' for the minute, "
            "which has 60 values: cron matches 0 alone, Tocsin refuses it",
            "write 0 in place of */90",
        ),
        (
            "0 0 5,10-20/40 * *",
            "got the step /40 in '10-20/40' for the day of month, "
            "which has 31 values: cron matches 10 alone, Tocsin refuses it",
            "write 10 in place of 10-20/40",
        ),
        (
            "0 0 * * */8",
            "got the step /8 in '*/8' for the day of week, "
            "which has 7 values: cron matches 0 alone, Tocsin refuses it",
            "write 0 in place of */8",
        ),
        ("*/0 * * * *", "got the step /0 in '*/0' for the minute", "write a step of 1 or more"),
        (
            "5/10 * * * *",
            "got '5/10' for the minute: cron refuses it or reads 5 alone, "
            "Tocsin would read 5-59/10",
            "write 5, or 5-59/10",
        ),
        (
            "0 0 * * mon/2",
            "got 'mon/2' for the day of week: cron refuses it or reads 1 alone, "
            "Tocsin would read 1-6/2",
            "write 1, or 1-6/2",
        ),
        (
            "0~59 * * * *",
            "got the random range '0~59' for the minute, which cronie draws at its start",
            "choose one value of that range and write it",
        ),
        (
            "~ * * * *",
            "got the random range '~' for the minute, which cronie draws at its start",
            "choose one value of that range and write it",
        ),
        ("0 0 ? * 1", "got '?' for the day of month, " + BEYOND, USE_CREATE),
        ("0 0 L * *", "got 'L' for the day of month, " + BEYOND, USE_CREATE),
        ("0 0 15W * *", "got '15W' for the day of month, " + BEYOND, USE_CREATE),
        ("0 0 * * 1#2", "got '1#2' for the day of week, " + BEYOND, USE_CREATE),
        ("0 0 * * 5L", "got '5L' for the day of week, " + BEYOND, USE_CREATE),
        ("H(0-9) * * * *", "got 'H(0-9)' for the minute, " + BEYOND, USE_CREATE),
        ("1,,2 * * * *", "got an empty item in the list for the minute", "remove the spare comma"),
        ("60 * * * *", "got '60' in '60' for the minute, expected 0 to 59", "correct the minute"),
        ("0 24 * * *", "got '24' in '24' for the hour, expected 0 to 23", "correct the hour"),
        (
            "0 0 0 * *",
            "got '0' in '0' for the day of month, expected 1 to 31",
            "correct the day of month",
        ),
        (
            "0 0 * 1-13 *",
            "got '13' in '1-13' for the month, expected 1 to 12 or JAN-DEC",
            "correct the month",
        ),
        (
            "0 0 * * 8",
            "got '8' in '8' for the day of week, expected 0 to 7 or SUN-SAT",
            "correct the day of week",
        ),
        (
            "0 0 * * mon,tur",
            "got 'tur' in 'mon,tur' for the day of week, expected 0 to 7 or SUN-SAT",
            "correct the day of week",
        ),
        ("0 0 * * monday", "got 'monday' for the day of week, " + ITEM, "correct the day of week"),
        ("5* * * * *", "got '5*' for the minute, " + ITEM, "correct the minute"),
        ("0 +5 * * *", "got '+5' for the hour, " + ITEM, "correct the hour"),
        ("\u0661 * * * *", "got '\u0661' for the minute, " + ITEM, "correct the minute"),
        (
            "0 0 30 2 *",
            "got day 30 of month 2, which never comes",
            "correct the date, or delete the line",
        ),
        (
            "0 0 31 4,6,9,11 *",
            "got day 31 of month 4,6,9,11, which never comes",
            "correct the date, or delete the line",
        ),
        (
            "@reboot",
            "@reboot runs when a machine starts, and a cluster has no such moment",
            "start the command from the machine's init system, or give it a schedule",
        ),
        ("@Daily", "got @Daily, " + NICKNAMES, "write @daily true"),
        ("@every_minute", "got @every_minute, " + NICKNAMES, "write five time fields"),
        (
            "* * * * * *",
            "got six time fields, or a command that begins with *; cron refuses both",
            "leave out the seconds; for seconds use `tocsin job create --cron`",
        ),
    ],
)
def test_schedules_that_are_refused_say_what_to_write(fields: str, message: str, fix: str) -> None:
    assert refused(f"{fields} true\n") == (message, fix)


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        # One field names every day: the line with * in its place is the same in both.
        ("0 3 */1 * 1 true", "write: 0 3 * * 1 true"),
        ("0 3 *,5 * 1 true", "write: 0 3 * * 1 true"),
        ("0 3 1-31 * */2 true", "write: 0 3 * * */2 true"),
        ("0 3 13 * */1 true", "write: 0 3 13 * * true"),
        # Neither does: only the command can ask, in the zone of the schedule.
        (
            "0 3 */2 * 1 true",
            "guard the command: 0 3 */2 * * "
            r"TZ=Europe/Rome date +\%u | grep -q '[1]' || exit 0; true",
        ),
        (
            "0 3 1-7 * */3 true",
            "guard the command: 0 3 1-7 * * "
            r"TZ=Europe/Rome date +\%u | grep -q '[367]' || exit 0; true",
        ),
        (
            "0 3 */2 6 sun,7,wed-fri cat%in",
            "guard the command: 0 3 */2 6 * "
            r"TZ=Europe/Rome date +\%u | grep -q '[3457]' || exit 0; cat%in",
        ),
    ],
)
def test_day_fields_that_cron_joins_in_another_way_are_refused(line: str, fix: str) -> None:
    day, weekday = line.split()[2], line.split()[4]
    assert refused(line + "\n") == (
        f"cron runs this when both the day of month ({day}) and the day of week ({weekday}) match, "
        "because one begins with *; Tocsin when either does",
        fix,
    )
    # What is to be written instead is accepted.
    instead = fix.partition(": ")[2]
    assert plan(instead + "\n").problems == ()


def test_the_guard_of_a_system_crontab_stands_after_the_user() -> None:
    _, fix = refused("0 3 */2 * 1 ann  true\n", system=True)
    instead = fix.removeprefix("guard the command: ")
    assert instead == (r"0 3 */2 * * ann  TZ=Europe/Rome date +\%u | grep -q '[1]' || exit 0; true")
    entry = only(instead + "\n", system=True)
    assert entry.command == "TZ=Europe/Rome date +%u | grep -q '[1]' || exit 0; true"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("true", "got 1 word, expected five time fields and a command"),
        ("* * * * ", "got 4 words, expected five time fields and a command"),
        ("* * * * *", "got no command"),
        ("* * * * *   ", "got no command"),
        ("* * * * * %in", "got no command"),
        ("@daily", "got no command"),
        ("0 0 * * * \x01", r"got '\x01', a control character or a byte that is not UTF-8"),
        ("0 0 * * * \udce9", r"got '\udce9', a control character or a byte that is not UTF-8"),
        ("0," * 130 + "0 * * * * true", "got 269 characters of schedule, expected 256 at most"),
    ],
)
def test_lines_without_a_schedule_or_a_command_are_refused(line: str, message: str) -> None:
    assert refused(line + "\n")[0] == message


def test_a_leading_dash_only_silenced_cron() -> None:
    entry = only("-*/5 * * * * true\n")
    assert entry.schedule == "*/5 * * * *"
    assert entry.notes[-1] == "the leading '-' only kept cron from logging, and is left out"


# ---- the percent sign


@pytest.mark.parametrize(
    ("written", "command", "stdin"),
    [
        ("cat", "cat", None),
        ("cat%", "cat", None),
        ("cat%hello", "cat", "hello\n"),
        ("cat%hello%", "cat", "hello\n"),
        ("cat%one%two%%four", "cat", "one\ntwo\n\nfour\n"),
        ("cat%%", "cat", "\n"),
        (r"date +\%F", "date +%F", None),
        (r"date +\%H:\%M % a \% b % c", "date +%H:%M ", " a % b \n c\n"),
        # Only before a percent sign does a backslash disappear.
        (r"echo a\b \\ \n", r"echo a\b \\ \n", None),
        (r"echo \\%in", r"echo \\", "in\n"),
        (r"echo \\\%in", r"echo \\%in", None),
        (r"cat%a\b \\ \\%c", "cat", "a\\b \\\\ \\%c\n"),
        ("cat%end\\", "cat", "end\\\n"),
    ],
)
def test_percent_signs_are_read_as_cron_reads_them(
    written: str, command: str, stdin: str | None
) -> None:
    entry = only(f"* * * * * {written}\n")
    assert (entry.command, entry.stdin) == (command, stdin)


# ---- settings


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("A=1", "A", "1"),
        ("A = 1", "A", "1"),
        ("\t A\t=\t1 2  3 \t", "A", "1 2  3"),
        ("A=", "A", ""),
        ('A=""', "A", ""),
        ('A=" 1 "', "A", " 1 "),
        ("A='1 \"2\" '  ", "A", '1 "2" '),
        ('"A"=1', "A", "1"),
        ("'A' = '1'", "A", "1"),
        ("A=$HOME/bin:b=c # kept", "A", "$HOME/bin:b=c # kept"),
        ('A=1"2"', "A", '1"2"'),
        ("PATH=/opt/bin", "PATH", "/opt/bin"),
        ("MAILTO=", "MAILTO", ""),
        ("CONTENT_TYPE=text/plain", "CONTENT_TYPE", "text/plain"),
    ],
)
def test_settings_reach_the_command_as_cron_reads_them(line: str, name: str, value: str) -> None:
    entry = only(f"{line}\n* * * * * true\n")
    default = {"PATH": "/usr/bin:/bin", "SHELL": "/bin/sh"}
    assert dict(entry.env) == {**default, name: value}


def test_settings_hold_for_the_lines_below_them() -> None:
    found = plan("0 0 * * * a\nX=1\n0 0 * * * b\nX=2\nY=3\n0 0 * * * c\n")
    assert found.problems == ()
    assert [{k: v for k, v in e.env.items() if k in "XY"} for e in found.entries] == [
        {},
        {"X": "1"},
        {"X": "2", "Y": "3"},
    ]


def test_shell_and_home_decide_what_runs_and_where() -> None:
    entry = only("SHELL=/bin/bash\nHOME = /srv/reports\n0 0 * * * pwd\n")
    assert (entry.shell, entry.cwd) == ("/bin/bash", "/srv/reports")
    assert dict(entry.env) == {
        "HOME": "/srv/reports",
        "PATH": "/usr/bin:/bin",
        "SHELL": "/bin/bash",
    }
    assert entry.notes[-1] == "runs in /srv/reports, from HOME"
    assert entry.payload().to_json_bytes() == (
        b'{"command":"pwd","cwd":"/srv/reports","env":{"HOME":"/srv/reports",'
        b'"PATH":"/usr/bin:/bin","SHELL":"/bin/bash"},"shell":"/bin/bash","stdin":null}'
    )


@pytest.mark.parametrize("name", ["LOGNAME", "USER"])
def test_the_user_cannot_be_set(name: str) -> None:
    found = plan(f"{name}=bob\n0 0 * * * id\n")
    assert [(p.line_number, p.severity, p.message) for p in found.problems] == [
        (
            1,
            "warning",
            f"{name} is always the user that runs the command; cron ignores this line too",
        )
    ]
    assert name not in found.entries[0].env


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "MAILTO=ann@example.com",
            "no mail is sent to ann@example.com; the output is kept with each run instead",
        ),
        ("TZ=Asia/Tokyo", "TZ reaches the commands but does not move their times, as in cron"),
        (
            "RANDOM_DELAY=45",
            "RANDOM_DELAY does not delay runs; they are due at the time written",
        ),
    ],
)
def test_settings_that_mean_less_here_are_remarked_on(line: str, message: str) -> None:
    found = plan(f"# first\n{line}\n0 0 * * * true\n")
    assert [(p.line_number, p.severity, p.message) for p in found.problems] == [
        (2, "warning", message)
    ]
    assert [(e.line_number, e.time_zone) for e in found.entries] == [(3, "Europe/Rome")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("SHELL=bash", "got SHELL='bash', expected an absolute path"),
        ("HOME=", "got HOME='', expected an absolute path"),
        ("HOME=$OTHER", "got HOME='$OTHER', expected an absolute path"),
        (
            "CRON_TZ=:Europe/Berlin",
            "got CRON_TZ=':Europe/Berlin', expected an IANA name such as Europe/Berlin or UTC",
        ),
        (
            "CRON_TZ=CET-1CEST,M3.5.0,M10.5.0/3",
            "got CRON_TZ='CET-1CEST,M3.5.0,M10.5.0/3', expected an IANA name such as Europe/Berlin "
            "or UTC",
        ),
        ('X="1', "got a value of X with a quote that does not close, or text after it"),
        ("X='1' # one", "got a value of X with a quote that does not close, or text after it"),
    ],
)
def test_lines_below_a_setting_that_cannot_be_read_are_refused(line: str, message: str) -> None:
    name = line.partition("=")[0]
    found = plan(
        f"{line}\n0 0 * * * a\n{name}=/UTC\n0 0 * * * b\n".replace("CRON_TZ=/", "CRON_TZ=")
    )
    assert [(p.line_number, p.severity, p.message) for p in found.problems] == [
        (1, "refused", message),
        (2, "refused", f"{name} on line 1 could not be read, and this line needs it"),
    ]
    assert [entry.line_number for entry in found.entries] == [4]


def test_a_name_that_no_shell_can_read_is_refused() -> None:
    assert refused("FOO-BAR=1\n")[0] == ("got the variable name 'FOO-BAR', which no shell can read")


# ---- time zones


def test_cron_tz_holds_for_the_lines_below_it_and_empty_ends_it() -> None:
    found = plan(
        "0 1 * * * a\nCRON_TZ=Europe/Berlin\n0 1 * * * b\nCRON_TZ='Asia/Kathmandu'\n"
        "0 1 * * * c\nCRON_TZ=\n0 1 * * * d\n"
    )
    assert found.problems == ()
    assert [(e.time_zone, e.notes) for e in found.entries] == [
        ("Europe/Rome", ("time zone Europe/Rome, without CRON_TZ",)),
        ("Europe/Berlin", ("time zone Europe/Berlin from CRON_TZ on line 2",)),
        ("Asia/Kathmandu", ("time zone Asia/Kathmandu from CRON_TZ on line 4",)),
        ("Europe/Rome", ("time zone Europe/Rome, without CRON_TZ",)),
    ]


def test_a_line_whose_zone_nobody_knows_is_refused() -> None:
    found = plan("0 1 * * * a\nCRON_TZ=UTC\n0 1 * * * b\n", zone=None)
    assert [(p.line_number, p.severity, p.message, p.fix) for p in found.problems] == [
        (
            1,
            "refused",
            "no CRON_TZ stands above this line, and this machine's time zone is not known",
            "pass --tz with an IANA name such as Europe/Berlin, or write CRON_TZ= above",
        )
    ]
    assert [(e.line_number, e.time_zone) for e in found.entries] == [(3, "UTC")]


@pytest.mark.parametrize(
    ("name", "valid"),
    [
        ("UTC", True),
        ("Europe/Berlin", True),
        ("America/Argentina/Buenos_Aires", True),
        ("America/Port-au-Prince", True),
        ("Etc/GMT+3", True),
        ("EST5EDT", True),
        ("", False),
        ("Europe/", False),
        ("/Europe/Berlin", False),
        ("../Berlin", False),
        ("Europe/Berlin ", False),
        ("CET-1CEST,M3.5.0", False),
        ("A" * 65, False),
    ],
)
def test_the_form_of_a_zone_name(name: str, valid: bool) -> None:
    assert is_zone_name(name) is valid


# ---- users


def test_a_system_crontab_names_its_users() -> None:
    found = plan(
        "0 1 * * *\tann\t/opt/a  -x\n@daily ann b%in\n0 1 * * * root c\n*/5 * * * * bob:staff d\n",
        system=True,
    )
    assert [(e.line_number, e.user, e.command, e.stdin) for e in found.entries] == [
        (1, "ann", "/opt/a  -x", None),
        (2, "ann", "b", "in\n"),
    ]
    assert [(p.line_number, p.severity, p.message, p.fix) for p in found.problems] == [
        (
            3,
            "refused",
            "runs as root, and the worker's user is ann",
            "pass --user root where the shell workers run as root; or write `ann sudo -u root ...`",
        ),
        (
            4,
            "refused",
            "runs as bob:staff, and the worker's user is ann",
            "pass --user bob:staff where the shell workers run as bob:staff; or write "
            "`ann sudo -u bob:staff ...`",
        ),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("0 1 * * * ann", "got no command"),
        ("0 1 * * *", "got no command"),
        ("@daily ann", "got no command"),
        (
            "0 1 * * * /usr/bin/true",
            "got '/usr/bin/true' where a system crontab names the user of the command",
        ),
        ("0 1 * * * A=1 b", "got 'A=1' where a system crontab names the user of the command"),
        (
            "0 0 1 * * * ann true",
            "got six time fields, or a command that begins with *; cron refuses both",
        ),
        (
            "0 0 1 * * */2 ann true",
            "got six time fields, or a command that begins with *; cron refuses both",
        ),
        (
            "@reboot ann true",
            "@reboot runs when a machine starts, and a cluster has no such moment",
        ),
    ],
)
def test_system_lines_that_are_refused(line: str, message: str) -> None:
    assert refused(line + "\n", system=True)[0] == message


def test_a_user_crontab_that_looks_like_a_system_one_is_remarked_on() -> None:
    found = plan("0 1 * * * root /opt/a\n")
    assert [(p.severity, p.message) for p in found.problems] == [
        ("warning", "the command begins with the word root, which looks like a user")
    ]
    assert [e.command for e in found.entries] == ["root /opt/a"]


# ---- the file


def test_blank_lines_and_comments_are_no_lines() -> None:
    assert plan("") == plan("\n\n# 0 0 * * * a\n  \t# b\n \t \n")


def test_every_other_line_is_an_entry_a_problem_or_a_setting() -> None:
    found = plan("X=1\n0 0 * * * a\nnonsense\n@reboot b\n0 0 30 2 * c\n@daily d\n")
    assert [e.line_number for e in found.entries] == [2, 6]
    assert [p.line_number for p in found.refused] == [3, 4, 5]
    assert found.warnings == ()


def test_windows_line_ends_are_left_out_and_said_so() -> None:
    found = plan("X=1\r\n0 0 * * * echo a\r\n")
    assert [(e.command, e.env["X"]) for e in found.entries] == [("echo a", "1")]
    assert [(p.line_number, p.severity, p.message) for p in found.problems] == [
        (
            1,
            "warning",
            "lines end in a carriage return, which cron gives to the command; it is left out",
        )
    ]


def test_a_last_line_without_its_newline_is_imported_and_said_so() -> None:
    found = plan("0 0 * * * a\n0 0 * * * b")
    assert [e.command for e in found.entries] == ["a", "b"]
    assert [(p.line_number, p.severity, p.message) for p in found.problems] == [
        (
            2,
            "warning",
            "the last line does not end in a newline, so cron ignores it; it is imported",
        )
    ]


# ---- names


@pytest.mark.parametrize(
    ("command", "slug"),
    [
        ("/usr/local/bin/backup.sh --full /srv", "backup.sh-full-srv"),
        ("FOO=bar BAZ=1 /opt/run me", "run-me"),
        ("echo hello", "echo-hello"),
        ("cd /srv && ./go", "cd-srv-.-go"),
        ("'/opt/my tool' x", "my-tool-x"),
        ("a" * 80, "a" * 26),
        ("a-very-long-command-name with words", "a-very-long-command-name"),
        ("/", "line"),
        ("été", "t"),
        ("日本", "line"),
        ("A=1", "a-1"),
    ],
)
def test_a_job_is_named_after_its_file_and_command(command: str, slug: str) -> None:
    entry = only(f"@daily {command}\n")
    assert re.fullmatch(rf"crontab-{re.escape(slug)}-[0-9a-f]{{8}}", entry.job_name)
    assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", entry.job_name)


def test_names_are_these_and_stay_these() -> None:
    """A change of these names would make every imported crontab import itself anew."""
    assert only("*/5 * * * *  /opt/report --daily\n").job_name == "crontab-report-daily-26744517"
    system = plan("@daily ann cat%in\n", system=True, source="/etc/cron.d/Sales Report")
    assert system.entries[0].job_name == "sales-report-cat-8abab5b9"


def test_moving_a_line_or_its_blanks_does_not_rename_its_job() -> None:
    lines = ["0 1 * * * a", "0 2 * * * a", "0 1 * * * b", "@daily a"]
    names = {e.schedule + e.command: e.job_name for e in plan("\n".join(lines) + "\n").entries}
    assert len(set(names.values())) == 4
    moved = "# more\nX=1\n" + "\n".join(line.replace("0 ", " 0\t", 1) for line in lines[::-1])
    again = {e.schedule + e.command: e.job_name for e in plan(moved + "\n", zone="UTC").entries}
    assert again == names


def test_equal_lines_are_numbered_in_their_order() -> None:
    found = plan("0 1 * * * a\n0 2 * * * a\n0  1 * * * a\nX=2\n0 1 * * * a\n")
    first = found.entries[0].job_name
    assert [e.job_name for e in found.entries if e.schedule == "0 1 * * *"] == [
        first,
        f"{first}-2",
        f"{first}-3",
    ]
    assert len({e.job_name for e in found.entries}) == 4


def test_the_zone_that_the_file_states_and_the_user_are_part_of_the_name() -> None:
    zones = plan("0 1 * * * a\nCRON_TZ=UTC\n0 1 * * * a\nCRON_TZ=Asia/Tokyo\n0 1 * * * a\n")
    names = [e.job_name for e in zones.entries]
    assert len(set(names)) == 3
    assert not any(name.endswith(("-2", "-3")) for name in names)
    ann = plan("0 1 * * * ann a\n", system=True, user="ann").entries[0].job_name
    bob = plan("0 1 * * * bob a\n", system=True, user="bob").entries[0].job_name
    assert ann != bob


@pytest.mark.parametrize(
    ("source", "prefix", "begins"),
    [
        ("/etc/cron.d/Sales Report", None, "sales-report-"),
        ("examples/crontab.user", None, "crontab.user-"),
        ("-", None, "line-"),
        ("/very/long/a-name-that-goes-on-and-on", None, "a-name-that-goes-on-"),
        ("crontab", "ops", "ops-"),
    ],
)
def test_the_source_or_the_prefix_begins_every_name(
    source: str, prefix: str | None, begins: str
) -> None:
    found = plan("@daily true\n", source=source, prefix=prefix)
    assert found.entries[0].job_name.startswith(begins + "true-")


def test_the_longest_name_still_fits() -> None:
    text = f"@daily {'a' * 80}\n" * 1000
    found = plan(text, prefix="p" * 22)
    assert len({e.job_name for e in found.entries}) == 1000
    assert max(len(e.job_name) for e in found.entries) == 63


@pytest.mark.parametrize("prefix", ["", "Ops", "-ops", "a/b", "p" * 23])
def test_prefixes_that_no_name_can_begin_with(prefix: str) -> None:
    with pytest.raises(CrontabError, match="expected 1 to 22 of a-z"):
        plan("@daily true\n", prefix=prefix)


def test_a_default_zone_of_another_form() -> None:
    with pytest.raises(CrontabError, match="got the time zone 'Rome!', expected an IANA name"):
        plan("@daily true\n", zone="Rome!")
