"""What a name on the command line stands for, and whether there is such a thing.

One rule wherever a job is meant: a bare name is a job of the namespace `default`, and a namespace
is written with a slash at its end. What does not exist is an error, since an empty answer would
look like good news.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tocsin.errors import NotFound

if TYPE_CHECKING:
    from tocsin.client import Client


def parent_of(name: str) -> str:
    """The API's parent: `namespace/` means the namespace, a bare name a job of `default`."""
    if name.endswith("/"):
        return name.removesuffix("/")
    return name if not name or "/" in name else f"default/{name}"


def check_exists(client: Client, parent: str, *, stale: bool = False) -> None:
    """Asks for the job or the namespace that `parent` names; a deleted job counts by its runs.

    Raises:
        NotFound: there is no such job, or the namespace has neither jobs nor runs.
    """
    if not parent or next(iter(client.list_runs(parent, stale_ok=stale)), None) is not None:
        return
    if "/" in parent:
        client.get_job(parent, stale_ok=stale)
    else:
        check_namespace(client, parent, stale=stale)


def check_namespace(client: Client, namespace: str, *, stale: bool = False) -> None:
    """Raises NotFound if the namespace has no job."""
    if next(iter(client.list_jobs(namespace, stale_ok=stale)), None) is None:
        raise NotFound(
            f"no job in namespace {namespace}",
            reason="JOB_NOT_FOUND",
            hint="tocsin job list shows all; one job is shown by tocsin job get",
        )
