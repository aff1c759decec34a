"""The time zone of the machine, from what a machine can say about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tocsin.crontab import machine_zone


@pytest.mark.parametrize(
    ("tz", "zone"),
    [
        ("Europe/Berlin", "Europe/Berlin"),
        (":Europe/Berlin", "Europe/Berlin"),
        ("", "UTC"),
        (":/usr/share/zoneinfo/Asia/Tokyo", "Asia/Tokyo"),
        ("/usr/share/zoneinfo/posix/Asia/Tokyo", "Asia/Tokyo"),
        # Set, but to nothing that has a name: the machine's other files would be another zone.
        ("CET-1CEST,M3.5.0,M10.5.0/3", None),
        ("/srv/my-zone", None),
    ],
)
def test_tz_decides_where_it_is_set(tz: str, zone: str | None, tmp_path: Path) -> None:
    (tmp_path / "timezone").write_text("America/Lima\n", encoding="utf-8")
    assert machine_zone({"TZ": tz}, tmp_path) == zone


def test_the_link_that_the_c_library_reads_comes_before_the_name(tmp_path: Path) -> None:
    (tmp_path / "timezone").write_text("America/Lima\n", encoding="utf-8")
    (tmp_path / "localtime").symlink_to("../usr/share/zoneinfo/Europe/Berlin")
    assert machine_zone({}, tmp_path) == "Europe/Berlin"


def test_a_copied_localtime_has_no_name_so_the_name_is_read(tmp_path: Path) -> None:
    (tmp_path / "localtime").write_bytes(b"TZif")
    (tmp_path / "timezone").write_text("America/Lima\n", encoding="utf-8")
    assert machine_zone({}, tmp_path) == "America/Lima"


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert machine_zone({}, tmp_path) is None
    (tmp_path / "timezone").write_text("not a zone\n", encoding="utf-8")
    (tmp_path / "localtime").symlink_to("/etc/adjtime")
    assert machine_zone({}, tmp_path) is None
