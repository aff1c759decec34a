"""The fixture `tocsin_cluster`: an embedded cluster for one test, closed after it.

    @pytest.mark.tocsin_cluster(nodes=3, now="2026-11-29T06:59:58Z")
    async def test_fires(tocsin_cluster): ...

pytest finds it through an entry point in every environment that has Tocsin, so nothing but pytest
is imported before a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tocsin.testing import Cluster

_MARKER = (
    "tocsin_cluster(nodes=1, now=..., patience=...): what tocsin.testing.Cluster.embedded takes"
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", _MARKER)


@pytest.fixture
def tocsin_cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """An embedded cluster, as the marker of the same name says."""
    from tocsin.testing import Cluster  # noqa: PLC0415 - it costs what importing grpc costs

    marker = request.node.get_closest_marker("tocsin_cluster")
    arguments = marker.kwargs if marker is not None else {}
    with Cluster.embedded(**arguments) as cluster:
        yield cluster


@pytest.hookimpl(hookwrapper=True)  # the newer kind of wrapper is unknown to older pytests
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, None]:
    """Tells with the failure of a test what handlers of its cluster raised."""
    report = (yield).get_result()
    cluster = getattr(item, "funcargs", {}).get("tocsin_cluster")
    if cluster is None or report.when != "call" or not report.failed:
        return
    if cluster.handler_errors:
        told = "\n".join(str(error) for error in cluster.handler_errors)
        report.sections.append(("what handlers raised", told))
