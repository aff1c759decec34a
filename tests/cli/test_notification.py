"""`tocsin notification`, and subscriptions in files, against a cluster in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tocsin import Client, EventKind, Job, Notify
from tocsin.cli import cli
from tocsin.cli._options import Settings
from tocsin.testing import Cluster
from tocsin.workers.notify_payload import NotifyPayload, Webhook

URL = "https://example.com/hook"
MOST = ["ALERT_CLEARED", "ALERT_RAISED", "DEAD_LETTER", "RECOVERED"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster.embedded(now="2027-01-01T00:00:00Z") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with cluster.sync_client() as client:
        yield client
        for job in list(client.list_jobs()):
            client.delete_job(job.name, cancel_active_runs=True)


class Tocsin:
    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self.file = folder / "jobs.yaml"
        self._cluster = cluster

    def __call__(self, *arguments: object) -> Result:
        settings = Settings(open_client=lambda _: self._cluster.sync_client())
        return CliRunner().invoke(cli, [str(each) for each in arguments], obj=settings)


@pytest.fixture
def tocsin(cluster: Cluster, client: Client, tmp_path: Path) -> Tocsin:
    return Tocsin(cluster, tmp_path)


def test_a_subscription_is_created_changed_listed_shown_and_deleted(
    tocsin: Tocsin, client: Client
) -> None:
    options = ("--webhook", URL, "--secret", "ops", "--header", "X-Team=pay")
    made = tocsin("notification", "create", "ops", *options)
    assert made.exit_code == 0, made.stderr
    assert "created default/ops: told of alert_cleared," in made.stdout
    stored = client.get_job("ops")
    assert stored.notify == Notify(MOST)
    assert (stored.handler, stored.queue, stored.overlap_policy) == (
        "notify",
        "notifications",
        "ALLOW",
    )
    hook = Webhook(url=URL, secret=options[3], headers={"X-Team": "pay"})
    assert NotifyPayload.from_json_bytes(stored.payload) == NotifyPayload(webhook=hook)
    assert tocsin("notification", "create", "ops", *options).exit_code == 4
    same = tocsin("notification", "create", "ops", "--update", *options)
    assert "no change to default/ops" in same.stdout
    fewer = ("--update", "--on", "recovered", "--job", "a", "--job", "default/b", *options)
    assert tocsin("notification", "create", "ops", *fewer).exit_code == 0
    client.create_job(Job(name="other", handler="h"))
    listed = tocsin("notification", "list").stdout
    assert listed.splitlines()[1].split() == [
        *("default/ops", "recovered", "default/a,default/b", URL, "0", "0", "0")
    ]
    assert "other" not in listed
    assert URL in tocsin("notification", "get", "ops").stdout
    shown = json.loads(tocsin("notification", "get", "ops", "-o", "json").stdout)
    assert shown["notify"] == {
        "events": ["EVENT_KIND_RECOVERED"],
        "jobs": ["default/a", "default/b"],
    }
    assert "told of" in tocsin("job", "get", "ops").stdout
    for action in ("get", "delete", "test"):
        refused = tocsin("notification", action, "other")
        assert refused.exit_code == 3
        assert "is no subscription" in refused.stderr
    assert tocsin("notification", "delete", "ops").exit_code == 0
    assert tocsin("notification", "list").stdout == ""


def test_a_command_is_kept_word_by_word(tocsin: Tocsin, client: Client) -> None:
    done = tocsin(
        "notification", "create", "pager", "--on", "dead_letter", "--", "page", "--x", "a b"
    )
    assert done.exit_code == 0, done.stderr
    stored = client.get_job("pager")
    assert stored.notify == Notify([EventKind.DEAD_LETTER])
    assert json.loads(stored.payload) == {"command": ["page", "--x", "a b"]}


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--webhook", URL, "--", "page"),
        ("--secret", "ops", "--", "page"),
        ("--webhook", "ftp://example.com"),
        ("--webhook", URL, "--secret", "a b"),
        ("--webhook", URL, "--header", "webhook-id=x"),
        ("--webhook", URL, "--on", "success"),
    ],
)
def test_what_cannot_be_sent_is_refused_before_it_is_stored(
    tocsin: Tocsin, client: Client, options: tuple[str, ...]
) -> None:
    assert tocsin("notification", "create", "ops", *options).exit_code == 2
    assert list(client.list_jobs()) == []


@pytest.mark.parametrize(
    ("job", "field"),
    [
        (Job(name="a/x", handler="h", notify=Notify(), after=["b"]), "job.after"),
        (Job(name="a/x", handler="h", notify=Notify(jobs=["b/y"])), "job.notify.jobs[0]"),
        (Job(name="a/x", handler="h", notify=Notify(jobs=["y", "a/y"])), "job.notify.jobs"),
        (Job(name="a/x", handler="h", notify=Notify(jobs=["Y"])), "job.notify.jobs[0]"),
        (
            Job(name="a/x", handler="h", notify=Notify(["RECOVERED", "RECOVERED"])),
            "job.notify.events",
        ),
        (
            Job(name="a/x", handler="h", notify=Notify(jobs=[f"j{n}" for n in range(101)])),
            "job.notify.jobs",
        ),
    ],
)
def test_a_definition_that_is_no_subscription_is_refused_by_its_field(
    client: Client, job: Job, field: str
) -> None:
    from tocsin import InvalidArgument

    with pytest.raises(InvalidArgument) as caught:
        client.create_job(job)
    assert caught.value.field == field


def test_a_subscription_in_a_file_is_applied_and_exported(tocsin: Tocsin, client: Client) -> None:
    tocsin.file.write_text(
        "job: billing/ops\n"
        "notify_on: [dead_letter, recovered]\n"
        "notify_job: [report]\n"
        "handler: notify\n"
        "queue: notifications\n"
        f'args: {{webhook: {{url: "{URL}", secret: ops}}}}\n'
    )
    assert tocsin("job", "apply", "-f", tocsin.file).exit_code == 0
    stored = client.get_job("billing/ops")
    assert stored.notify == Notify(["DEAD_LETTER", "RECOVERED"], ["billing/report"])
    assert tocsin("job", "diff", "-f", tocsin.file).exit_code == 0
    exported = tocsin("job", "export", "billing/")
    tocsin.file.write_text(exported.stdout)
    same = tocsin("job", "diff", "-f", tocsin.file)
    assert same.exit_code == 0, exported.stdout + same.stdout + same.stderr
    tocsin.file.write_text(exported.stdout.replace(URL, "ftp://example.com"))
    assert tocsin("job", "diff", "-f", tocsin.file).exit_code == 2


def test_a_test_says_how_it_ended(tocsin: Tocsin, client: Client, cluster: Cluster) -> None:
    assert tocsin("notification", "create", "ops", "--webhook", URL).exit_code == 0
    waiting = tocsin("notification", "test", "ops", "--wait-timeout", "1s")
    assert waiting.exit_code == 12
    assert "is not delivered yet" in waiting.stdout
