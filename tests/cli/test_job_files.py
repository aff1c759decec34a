"""`tocsin job apply` and `tocsin job diff`, against a cluster in process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tocsin import After, Calendar, Cron, Every, Job, OverlapPolicy
from tocsin.cli import cli
from tocsin.cli._job_documents import BadDocuments, read_documents
from tocsin.cli._options import Settings
from tocsin.client import Client
from tocsin.testing import Cluster
from tocsin.workers.shell_payload import ShellPayload

JOBS = """
job: billing/import
schedules:
  - {cron: "30 2 * * *", tz: Europe/Berlin}
  - {every: 6h, start: "2027-01-01T00:00:00Z"}
handler: import
args: {region: eu, pages: 3, fast: true, code: "007", ratio: 0.5, none: null, tags: [1, a]}
max_attempts: 5
lease: 45s
start_deadline: 1h
max_concurrent: 3
concurrency_key: db
max_per_key: 2
labels: {team: pay}
---
job: billing/report
after: ["billing/import:any"]
command: echo report
env: {LANG: C}
overlap: skip
---
job: ping
every: [5m]
http: {url: "https://example.com/ping", method: POST, body: "{{run}}", expected_status: [2xx, 404]}
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.embedded(now="2027-01-01T00:00:00Z") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.sync_client() as client:
        yield client
        for job in list(client.list_jobs()):
            client.delete_job(job.name)


class Tocsin:
    """The command line, in a folder with `jobs.yaml`."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.file = folder / "jobs.yaml"
        self._cluster = cluster

    def __call__(self, *arguments: object, text: str | None = None, stdin: str = "") -> Result:
        if text is not None:
            self.file.write_text(text)
        settings = Settings(open_client=lambda _: self._cluster.sync_client())
        words = [str(argument) for argument in arguments]
        return CliRunner().invoke(cli, words, obj=settings, input=stdin)


@pytest.fixture
def tocsin(cluster: Cluster, client: Client, tmp_path: Path) -> Tocsin:
    return Tocsin(cluster, tmp_path)


def test_a_document_says_what_the_options_of_create_say() -> None:
    first, second, third = (document.job for document in read_documents({"f": JOBS}))
    assert first.schedules == (
        Cron("30 2 * * *", time_zone="Europe/Berlin"),
        Every(timedelta(hours=6), start_time=datetime(2027, 1, 1, tzinfo=UTC)),
    )
    assert json.loads(first.payload) == {
        "region": "eu",
        "pages": 3,
        "fast": True,
        "code": "007",
        "ratio": 0.5,
        "none": None,
        "tags": [1, "a"],
    }
    assert first.retry_policy is not None
    assert (first.retry_policy.max_attempts, first.lease_duration) == (5, timedelta(seconds=45))
    assert first.start_deadline == timedelta(hours=1)
    assert (first.max_concurrent_runs, first.concurrency_key) == (3, "db")
    assert first.max_concurrent_per_key == 2
    assert dict(first.labels) == {"team": "pay"}
    assert second.after == (After("billing/import", "ANY"),)  # type: ignore[arg-type]
    assert second.overlap_policy is OverlapPolicy.SKIP
    assert ShellPayload.from_json_bytes(second.payload).env == {"LANG": "C"}
    assert (third.name, third.handler, third.schedules) == ("ping", "http", (Every("5m"),))
    assert json.loads(third.payload)["expected_status"] == ["2xx", 404]


def test_jobs_of_a_file_are_stored_and_the_same_file_changes_nothing(
    tocsin: Tocsin, client: Client
) -> None:
    done = tocsin("job", "apply", "-f", tocsin.file, text=JOBS)
    assert done.exit_code == 0, done.output
    assert [line.split()[-1] for line in done.stdout.splitlines()[1:]] == ["created"] * 3
    assert [job.name for job in client.list_jobs()] == [
        "billing/import",
        "billing/report",
        "default/ping",
    ]
    again = tocsin("job", "apply", "-f", tocsin.file)
    assert again.stdout.count("no change") == 3
    changed = tocsin("job", "apply", "-f", tocsin.file, text=JOBS.replace("skip", "allow"))
    assert [line.split(maxsplit=1)[1] for line in changed.stdout.splitlines()[1:]] == [
        "no change",
        "updated",
        "no change",
    ]
    client.delete_job("billing/report")  # before the one that it comes after


def test_a_dry_run_stores_nothing_and_knows_of_new_jobs_before(
    tocsin: Tocsin, client: Client
) -> None:
    done = tocsin("job", "apply", "-f", tocsin.file, "--dry-run", "-o", "json", text=JOBS)
    assert done.exit_code == 0, done.output
    assert [(each["name"], each["created"]) for each in json.loads(done.stdout)] == [
        ("billing/import", True),
        ("billing/report", True),
        ("default/ping", True),
    ]
    assert list(client.list_jobs()) == []


def test_of_documents_of_which_some_are_refused_none_is_stored(
    tocsin: Tocsin, client: Client
) -> None:
    text = (
        "job: bad\nhandler: h\ncron: 61 * * * *\n---\njob: a/good\nhandler: h\nafter: [bad]\n"
        "---\njob: a/late\nhandler: h\nafter: [a/nowhere]\n"
    )
    for command in (["apply"], ["apply", "--dry-run"], ["diff"]):
        done = tocsin("job", *command, "-f", tocsin.file, text=text)
        assert "document 1 (default/bad)" in done.stderr
        assert "document 3 (a/late)" in done.stderr
        assert "document 2" not in done.stderr
        assert list(client.list_jobs()) == []
        if command == ["diff"]:
            assert (done.exit_code, done.stdout) == (2, "")
            continue
        assert done.exit_code == 1
        rows = [line.split(maxsplit=1) for line in done.stdout.splitlines()[1:]]
        assert ["default/bad", "refused: BAD_CRON"] in rows
        assert ["a/late", "refused: JOB_NOT_FOUND"] in rows
        told = "nothing was stored: 2 of 3 jobs are refused" in done.stderr
        assert told == (command == ["apply"])


def test_the_example_of_the_documentation_works_as_printed(tocsin: Tocsin, client: Client) -> None:
    page = Path(__file__).parents[2].joinpath("docs", "operating.md").read_text(encoding="utf-8")
    section = page.partition("## Jobs in files")[2].partition("\n## ")[0]
    example = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    "))
    assert tocsin("job", "diff", "-f", tocsin.file, text=example).exit_code == 9
    assert tocsin("job", "apply", "-f", tocsin.file, "--dry-run").exit_code == 0
    done = tocsin("job", "apply", "-f", tocsin.file)
    assert done.exit_code == 0, done.output
    assert [line.split() for line in done.stdout.splitlines()[1:]] == [
        ["billing/report", "created"],
        ["billing/import", "created"],
    ]
    client.delete_job("billing/report")  # before the one that it comes after


def test_an_interval_that_is_refused_is_shown_as_it_was_written(tocsin: Tocsin) -> None:
    for written in ("0s", "1500ms"):
        done = tocsin("job", "create", "a/b", "--handler", "h", "--every", written)
        assert done.exit_code == 2
        assert f"every: got {written}, allowed: whole seconds, at least 1s" in done.stderr


def test_jobs_that_come_after_each_other_are_told_by_name(tocsin: Tocsin, client: Client) -> None:
    text = "---\n".join(
        f"job: {job}\nhandler: h\nafter: [{after}]\n"
        for job, after in (("a", "b"), ("b", "c"), ("c", "default/b:any"), ("d", "d"))
    )
    for command in (["apply"], ["apply", "--dry-run"], ["diff"]):
        done = tocsin("job", *command, "-f", tocsin.file, text=text)
        assert done.exit_code == 2
        assert "default/b after default/c after default/b" in done.stderr
        assert "default/d after default/d" in done.stderr
        assert done.stderr.count("would come after itself") == 2
        assert list(client.list_jobs()) == []


def test_two_stored_jobs_may_change_their_order(tocsin: Tocsin, client: Client) -> None:
    first = "job: a/x\nhandler: h\nafter: [a/y]\n---\njob: a/y\nhandler: h\n"
    assert tocsin("job", "apply", "-f", tocsin.file, text=first).exit_code == 0
    turned = "job: a/y\nhandler: h\nafter: [a/x]\n---\njob: a/x\nhandler: h\n"
    assert tocsin("job", "diff", "-f", tocsin.file, "-o", "name", text=turned).exit_code == 9
    done = tocsin("job", "apply", "-f", tocsin.file)
    assert done.stdout.count("updated") == 2, done.output
    client.delete_job("a/y")  # before the one that it comes after


def test_diff_shows_fields_and_times_and_says_so_by_its_exit_code(
    tocsin: Tocsin, client: Client, cluster: Cluster
) -> None:
    text = 'job: a/b\nhandler: h\ncron: "0 3 * * *"\n'
    done = tocsin("job", "diff", "-f", tocsin.file, text=text)
    assert done.exit_code == 9
    lines = done.stdout.splitlines()
    assert lines[0] == "+ a/b"
    assert "  + handler: h" in lines
    assert "  + fires 2027-01-01 03:00:00Z" in lines
    assert list(client.list_jobs()) == []
    tocsin("job", "apply", "-f", tocsin.file)
    same = tocsin("job", "diff", "-f", tocsin.file)
    assert (same.exit_code, same.stdout) == (0, "")
    moved = text.replace('"0 3 * * *"', '"0 3,4 * * *"') + "priority: 7\n"
    done = tocsin("job", "diff", "-f", tocsin.file, text=moved)
    assert done.exit_code == 9
    lines = done.stdout.splitlines()
    assert lines[0] == "~ a/b"
    assert lines[lines.index("  - priority: 5") + 1] == "  + priority: 7"
    assert [line for line in lines if "fires" in line] == [
        "  + fires 2027-01-01 04:00:00Z",
        "  + fires 2027-01-02 04:00:00Z",
    ]
    done = tocsin("job", "diff", "-f", tocsin.file, "-o", "json")
    (change,) = json.loads(done.stdout)
    assert change["fields"]["priority"] == {"before": 5, "after": 7}
    assert tocsin("job", "diff", "-f", tocsin.file, "-o", "name").stdout == "a/b\n"
    assert client.get_job("a/b").priority == 5


def test_diff_shows_values_as_documents_have_them(tocsin: Tocsin, client: Client) -> None:
    new = tocsin("job", "diff", "-f", tocsin.file, text=JOBS).stdout.splitlines()
    for line in (
        "  + max_attempts: 5",
        "  + lease: 45s",
        "  + labels: {team: pay}",
        "  + command: echo report",
        "  + env: {LANG: C}",
        "  + overlap: skip",
        "  + schedules: [{every: 5m}]",
    ):
        assert line in new
    after = [line for line in new if line.startswith("  + after: ")]
    assert [line.replace("'", "") for line in after] == ["  + after: [billing/import:any]"]
    assert not any("conditions" in line or "retry_policy" in line for line in new)
    first = "job: a/b\ncommand: echo 1\n"
    tocsin("job", "apply", "-f", tocsin.file, text=first)
    second = "job: a/b\ncommand: echo 2\nmax_attempts: 7\nretry_max: 2h\nlease: 1m\n"
    changed = tocsin("job", "diff", "-f", tocsin.file, text=second).stdout.splitlines()
    assert changed == [
        "~ a/b",
        "  - command: echo 1",
        "  + command: echo 2",
        "  - max_attempts: 3",
        "  + max_attempts: 7",
        "  - retry_max: 1h",
        "  + retry_max: 2h",
        "  - lease: 30s",
        "  + lease: 1m",
    ]
    lowest = tocsin("job", "diff", "-f", tocsin.file, text=f"{first}priority: 0\n").stdout
    assert lowest.splitlines() == ["~ a/b", "  - priority: 5", "  + priority: 0"]
    third = "job: a/b\nhandler: h\nargs: {region: eu}\n"
    changed = tocsin("job", "diff", "-f", tocsin.file, text=third).stdout.splitlines()
    assert changed[:3] == ["~ a/b", "  - command: echo 1", "  + handler: h"]
    assert [json.loads(line[9:]) for line in changed if line.startswith("  + args: ")] == [
        {"region": "eu"}
    ]


def test_times_after_a_new_end_are_shown_as_gone(tocsin: Tocsin) -> None:
    text = 'job: a/b\nhandler: h\nschedules: [{cron: "0 3 * * *"}]\n'
    tocsin("job", "apply", "-f", tocsin.file, text=text)
    ended = text.replace('"}', '", end: "2027-01-02T12:00:00Z"}')
    done = tocsin("job", "diff", "-f", tocsin.file, text=ended)
    assert [line for line in done.stdout.splitlines() if "fires" in line] == [
        f"  - fires 2027-01-0{day} 03:00:00Z" for day in (3, 4, 5)
    ]


def test_times_that_a_calendar_excludes_are_shown_as_gone(tocsin: Tocsin, client: Client) -> None:
    client.apply_calendar(Calendar(name="a/noon", crons=("* 12 * * *",)))
    text = 'job: a/b\nhandler: h\ncron: "0 3,12 * * *"\n'
    tocsin("job", "apply", "-f", tocsin.file, text=text)
    done = tocsin("job", "diff", "-f", tocsin.file, text=f"{text}exclude: [a/noon]\n")
    assert done.exit_code == 9
    fires = [line for line in done.stdout.splitlines() if "fires" in line]
    assert fires[0] == "  - fires 2027-01-01 12:00:00Z"
    assert not any(line.startswith("  +") for line in fires)


def test_what_get_prints_of_a_definition_can_be_compared(tocsin: Tocsin, client: Client) -> None:
    client.create_job(Job(name="a/b", handler="h", schedules=[Every("5m")]))
    done = tocsin("job", "diff", "-f", tocsin.file, text="job: a/b\nhandler: h\n")
    assert done.exit_code == 9
    assert "  + schedules: []" in done.stdout or "  + schedules: -" in done.stdout
    assert "  - fires 2027-01-01 00:05:00Z" in done.stdout


def test_files_may_be_a_folder_or_come_through_a_pipe(tocsin: Tocsin, tmp_path: Path) -> None:
    folder = tmp_path / "jobs"
    folder.mkdir()
    assert tocsin("job", "apply", "-f", folder).exit_code == 2
    (folder / "b.yaml").write_text("job: a/b\nhandler: h\n")
    (folder / "a.yml").write_text("job: a/a\nhandler: h\n")
    (folder / "notes.txt").write_text("not a job")
    done = tocsin("job", "apply", "-f", folder, "-o", "name")
    assert done.stdout.split() == ["a/a", "a/b"]
    done = tocsin("job", "apply", "-f", "-", "-o", "name", stdin="job: a/c\nhandler: h\n")
    assert done.stdout.split() == ["a/c"]


def test_faults_of_the_files_and_of_the_cluster_are_told_in_one_round(
    tocsin: Tocsin, client: Client
) -> None:
    text = (
        "job: a/good\nhandler: h\n"
        "---\njob: a/local\nhandler: h\nlease: 45\n"
        "---\njob: a/served\nhandler: h\ncron: '61 * * * *'\n"
        "---\njob: a/after\nhandler: h\nafter: [a/local]\n"
    )
    for command in ("apply", "diff"):
        done = tocsin("job", command, "-f", tocsin.file, text=text)
        assert done.exit_code == 2
        assert "2 faults" in done.stderr, done.stderr
        assert "document 2, lease: '45' is not a duration" in done.stderr
        assert "document 3 (a/served): " in done.stderr
        assert "61" in done.stderr
    assert list(client.list_jobs()) == []


def test_a_request_or_command_is_looked_at_before_it_is_stored(
    tocsin: Tocsin, client: Client
) -> None:
    text = (
        "job: a/b\nhandler: http\nargs: {ulr: 'http://x/'}\n"
        "---\njob: a/c\nhandler: http\n"
        "---\njob: a/d\nhandler: shell\nargs: {comand: echo}\n"
        "---\njob: a/e\nurl: ftp://x/\n"
        "---\njob: a/f\nhandler: mine\nargs: {anything: goes}\n"
    )
    done = tocsin("job", "apply", "-f", tocsin.file, text=text)
    assert done.exit_code == 2
    for told in (
        "document 1: payload, for handler http: ulr: there is no such part; there are body,",
        "document 2: payload, for handler http: url: it is missing",
        "document 3: payload, for handler shell: got the key 'comand', expected command,",
        "document 4: url: got 'ftp://x/', expected an http or https URL",
    ):
        assert told in done.stderr, done.stderr
    assert "document 5" not in done.stderr
    assert list(client.list_jobs()) == []


EXPORTED = """\
job: a/report
schedules:
  - {cron: "30 2 * * *", tz: Europe/Berlin, dst_gap: skip, end: "2027-01-01 00:00:00Z"}
  - {every: 90m, start: "2026-12-01 00:00:00Z"}
handler: report
args: {region: "no", n: 12, share: 0.5, none: null, deep: [{a: true}, "22:22", "1e3"], empty: {}}
max_attempts: 7
retry_factor: 1.5
non_retryable: [bad, worse]
priority: 0
overlap: allow
max_concurrent: 3
must_succeed_within: 3h
labels: {team: "on", "a": "1"}
---
job: a/next
command: |
  echo "$A"
  exit 3
env: {A: "x: y # z"}
shell: /bin/bash
after: [a/report, "a/other:any"]
---
job: a/other
url: https://example.com/{{run}}
body: '{"a": 1}'
headers: {Content-Type: application/json}
---
job: a/raw
handler: raw
payload: "  odd\ttext "
content_type: text/plain
---
job: a/bytes
handler: raw
payload_base64: AP/+
content_type: application/octet-stream
---
job: a/spaces
handler: h
payload: '{"b":1,   "a":2}'
"""


def test_what_is_exported_means_what_is_stored(tocsin: Tocsin, client: Client) -> None:
    applied = tocsin("job", "apply", "-f", tocsin.file, text=EXPORTED)
    assert applied.exit_code == 0, applied.stderr
    for options in ([], ["--full"], ["--local"]):
        exported = tocsin("job", "export", *options)
        assert exported.exit_code == 0, exported.stderr
        same = tocsin("job", "diff", "-f", tocsin.file, text=exported.stdout)
        assert same.exit_code == 0, same.stdout + same.stderr
    short = tocsin("job", "export", "a/bytes").stdout
    assert short == (
        "job: a/bytes\nhandler: raw\npayload_base64: AP/+\ncontent_type: application/octet-stream\n"
    )
    assert "command: |\n  echo" in exported.stdout
    assert "\nargs:\n  region: 'no'\n  n: 12\n" in exported.stdout
    stored = {job.name: job.payload for job in client.list_jobs()}
    for name in stored:
        client.delete_job(name)
    everything = tocsin("job", "apply", "-f", tocsin.file, text=exported.stdout)
    assert everything.exit_code == 0, everything.stderr
    assert {job.name: job.payload for job in client.list_jobs()} == stored
    assert stored["a/raw"] == b"  odd\ttext "
    assert stored["a/spaces"] == b'{"b":1,   "a":2}'


def test_which_jobs_are_exported(tocsin: Tocsin) -> None:
    tocsin("job", "apply", "-f", tocsin.file, text=EXPORTED)

    def names(*arguments: str) -> list[str]:
        lines = tocsin("job", "export", *arguments).stdout.splitlines()
        return [line.removeprefix("job: ") for line in lines if line.startswith("job: ")]

    assert names("a/raw", "a/bytes") == ["a/raw", "a/bytes"]
    assert names("--filter", "label.team=on") == ["a/report"]
    assert names("a/", "--filter", "queue=default handler=raw") == ["a/bytes", "a/raw"]
    assert tocsin("job", "export", "b/").exit_code == 3
    assert tocsin("job", "export", "a/none").exit_code == 3
    assert tocsin("job", "export", "a/raw", "--filter", "queue=x").exit_code == 2


def test_all_faults_of_all_documents_are_told_at_once(tocsin: Tocsin, client: Client) -> None:
    text = (
        "job: a/b\nhandler: h\noverlapp: skip\nlease: 45\n"
        "---\nhandler: h\n"
        "---\njob: a/c\nhandler: h\nschedules: [{cron: '* * * * *', every: 5s}, {evry: 5s}]\n"
        "---\njob: a/d\nhandler: h\ncommand: echo\n"
        "---\n- a\n"
    )
    done = tocsin("job", "apply", "-f", tocsin.file, text=text)
    assert done.exit_code == 2
    for told in (
        "document 1, overlapp: there is no such key",
        "document 1, lease: '45' is not a duration",
        "document 2, job: got nothing",
        "document 3, schedules[0]: expected exactly one of",
        "document 3, schedules[1]: expected exactly one of",
        "document 4: say what to run by one of command and handler: both of them are given",
        "document 5: got ['a'], expected the keys of a job",
    ):
        assert told in done.stderr, done.stderr
    assert list(client.list_jobs()) == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "there is no job in it"),
        ("---\n---\n", "there is no job in it"),
        ("job: [", "line 1: this is not YAML"),
        ("job: &a x\nhandler: *a", "anchors and aliases are not read"),
        ("job: !!python/object:os.system x", "expected no tag"),
        ("job: a/b\njob: a/c", "got the key again"),
        ("job: a/b\nhandler: h\n---\njob: a/b\nhandler: g", "is in f, document 1 already"),
        ("job: b\nhandler: h\n---\njob: default/b\nhandler: g", "is in f, document 1 already"),
        ("job: a/b\nhandler: h\nargs: [1]", "args: expected the arguments"),
        ("job: a/b\nhandler: h\nargs: {a: 1}\npayload: '{}'", "only one of them"),
        ("job: a/b\nhandler: h\nhttp: {url: 'http://x/'}", "no handler, command, url or payload"),
        ("job: a/b\nhttp: {url: ftp}", "http: url: got 'ftp'"),
        ("job: a/b\nhandler: {a: b}", "handler: got a mapping, expected text"),
        ("job: a/b\nhandler: h\nlabels: [a]", "labels: got ['a'], expected names"),
        ("job: a/b\nhandler: h\nschedules: 5m", "schedules: got '5m', expected a list"),
        ("job: a/b\nhandler: h\nmax_attempts: many", "max_attempts: 'many' is not a valid"),
        ("job: a/b\nhandler: h\nat: 2027-01-01T00:00:00", "has no zone"),
        ("job: a/b\nhandler: h\nargs: " + "[" * 5_000, "this is not YAML"),
    ],
)
def test_what_cannot_be_meant_is_told_with_its_place(text: str, told: str) -> None:
    with pytest.raises(BadDocuments) as caught:
        read_documents({"f": text})
    assert told in caught.value.format_message()
