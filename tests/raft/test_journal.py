"""The journal on disk: what was synced comes back, a torn tail is repaired, damage is named."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tocsin_node.raft.errors import JournalDamaged, JournalFailed
from tocsin_node.raft.journal import SLICE_BYTES_MAX, SLICE_ENTRIES_MAX, Journal


def entries(journal: Journal) -> list[tuple[bytes, int, int]]:
    return [journal[position] for position in range(len(journal))]


def reopened(folder: Path, **options: int) -> Journal:
    journal = Journal.open(folder, **options)
    journal.close()
    return journal


def filled(folder: Path, groups: int, *, seed: int = 7) -> list[list[tuple[bytes, int, int]]]:
    """A journal of several synced groups; what it held after each."""
    chance = random.Random(seed)
    journal = Journal.open(folder)
    states = [entries(journal)]
    for _ in range(groups):
        for _ in range(chance.randint(1, 3)):
            payload = bytes(chance.randint(1, 255) for _ in range(chance.randint(5, 60)))
            journal.add(payload, journal.last_index + 1, 1)
        journal.sync()
        states.append(entries(journal))
    journal.close()
    return states


def test_entries_term_and_vote_come_back(tmp_path):
    journal = Journal.open(tmp_path / "j")
    assert (len(journal), journal.getCurrentTerm(), journal.getVotedForNodeId()) == (0, 0, None)
    for index in range(1, 11):
        journal.add(b"entry %d" % index, index, 1)
    journal.setCurrentTerm(3, "n2")
    journal.deleteEntriesFrom(6)
    journal.add(b"other", 7, 3)
    journal.sync()
    kept = entries(journal)
    journal.close()
    again = reopened(tmp_path / "j")
    assert entries(again) == kept
    assert kept[-1] == (b"other", 7, 3)
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (3, "n2")
    assert (again.first_index, again.last_index) == (1, 7)
    assert [again.term_at(index) for index in (0, 1, 7, 8)] == [None, 1, 3, None]
    assert again.getRaftCommitIndex() == 1


def test_a_cleared_journal_stays_clear(tmp_path):
    journal = Journal.open(tmp_path / "j")
    journal.add(b"a", 1, 0)
    journal.clear()
    journal.add(b"b", 90, 4)
    journal.sync()
    journal.close()
    assert entries(reopened(tmp_path / "j")) == [(b"b", 90, 4)]


def test_what_was_not_synced_is_dirty_and_not_on_disk(tmp_path):
    journal = Journal.open(tmp_path / "j")
    journal.add(b"a", 1, 0)
    journal.sync()
    assert not journal.dirty
    journal.add(b"b", 2, 0)
    assert journal.dirty
    journal.close()
    assert entries(reopened(tmp_path / "j")) == [(b"a", 1, 0)]


def test_term_and_vote_are_durable_when_set_and_carry_what_was_before(tmp_path):
    journal = Journal.open(tmp_path / "j")
    journal.add(b"a", 1, 0)
    journal.setCurrentTerm(2, None)
    journal.close()
    again = reopened(tmp_path / "j")
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (2, None)
    assert entries(again) == [(b"a", 1, 0)]


def test_each_change_is_synced_after_it_is_written(tmp_path, monkeypatch):
    journal = Journal.open(tmp_path / "j")
    calls: list[str] = []
    write, sync = os.write, os.fdatasync
    monkeypatch.setattr(os, "write", lambda fd, d: (calls.append("write"), write(fd, d))[1])
    monkeypatch.setattr(os, "fdatasync", lambda fd: (calls.append("sync"), sync(fd))[1])
    for index in range(1, 4):
        journal.add(b"x", index, 0)
    journal.sync()
    journal.sync()
    journal.setCurrentTerm(1, "n1")
    monkeypatch.undo()
    assert calls == ["write", "sync", "write", "sync"]
    journal.close()


def test_segments_are_rotated_and_each_carries_term_and_vote(tmp_path):
    journal = Journal.open(tmp_path / "j", segment_bytes=500)
    journal.setCurrentTerm(5, "n3")
    for index in range(1, 50):
        journal.add(b"x" * 50, index, 5)
        journal.sync()
    journal.close()
    files = sorted((tmp_path / "j").iterdir())
    assert len(files) > 5
    again = reopened(tmp_path / "j", segment_bytes=500)
    assert entries(again) == entries(journal)
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (5, "n3")
    assert all(b"n3" in file.read_bytes()[:128] for file in files[1:])


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_segment_is_named(tmp_path, missing):
    journal = Journal.open(tmp_path / "j", segment_bytes=200)
    for index in range(1, 20):
        journal.add(b"x" * 50, index, 1)
        journal.sync()
    journal.close()
    files = sorted((tmp_path / "j").iterdir())
    files[missing].unlink()
    with pytest.raises(JournalDamaged, match=f"segment {missing + 1} is missing") as caught:
        Journal.open(tmp_path / "j")
    assert caught.value.path == files[missing + 1]


def test_a_journal_cut_at_any_byte_keeps_every_group_before_the_cut(tmp_path, caplog):
    states = filled(tmp_path / "j", 6)
    [file] = (tmp_path / "j").iterdir()
    whole = file.read_bytes()
    known = {len(state): state for state in states}
    shortest = 0
    for size in range(len(whole) + 1):
        file.write_bytes(whole[:size])
        found = entries(reopened(tmp_path / "j"))
        assert found == states[-1][: len(found)]
        assert len(found) >= shortest
        shortest = len(found)
        # The repaired journal goes on as if the tail had never been.
        journal = Journal.open(tmp_path / "j")
        journal.add(b"next", journal.last_index + 1, 2)
        journal.sync()
        journal.close()
        assert entries(reopened(tmp_path / "j"))[:-1] == found
    assert shortest == max(known)


def test_a_tail_of_unwritten_sectors_is_repaired(tmp_path):
    folder = tmp_path / "j"
    journal = Journal.open(folder)
    journal.add(b"kept", 1, 1)
    journal.sync()
    [file] = folder.iterdir()
    size = file.stat().st_size
    journal.add(b"y" * 3000, 2, 1)
    journal.sync()
    journal.close()
    data = bytearray(file.read_bytes())
    data[size + 1024 : size + 1024 + 1024] = bytes(1024)
    file.write_bytes(data)
    assert entries(reopened(folder)) == [(b"kept", 1, 1)]
    assert file.stat().st_size == size


def test_every_flipped_byte_is_named_with_file_and_offset(tmp_path):
    states = filled(tmp_path / "j", 5)
    [file] = (tmp_path / "j").iterdir()
    whole = file.read_bytes()
    for position in range(len(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        file.write_bytes(damaged)
        with pytest.raises(JournalDamaged) as caught:
            Journal.open(tmp_path / "j")
        assert caught.value.path == file
        assert caught.value.offset <= position
        assert str(file) in str(caught.value)
    file.write_bytes(whole)
    assert entries(reopened(tmp_path / "j")) == states[-1]


def test_a_hole_before_a_later_group_is_damage_and_not_a_tail(tmp_path):
    filled(tmp_path / "j", 40)
    [file] = (tmp_path / "j").iterdir()
    data = bytearray(file.read_bytes())
    assert len(data) > 2048
    data[512:1024] = bytes(512)
    file.write_bytes(data)
    with pytest.raises(JournalDamaged):
        Journal.open(tmp_path / "j")


def test_a_cut_in_a_segment_that_is_not_the_last_is_damage(tmp_path):
    journal = Journal.open(tmp_path / "j", segment_bytes=200)
    for index in range(1, 20):
        journal.add(b"x" * 50, index, 1)
        journal.sync()
    journal.close()
    first = min((tmp_path / "j").iterdir())
    first.write_bytes(first.read_bytes()[:-5])
    with pytest.raises(JournalDamaged) as caught:
        Journal.open(tmp_path / "j")
    assert caught.value.path == first


def test_user_bytes_cannot_pass_for_a_record(tmp_path):
    folder = tmp_path / "j"
    filled(tmp_path / "other", 2)
    [other] = (tmp_path / "other").iterdir()
    journal = Journal.open(folder)
    journal.add(other.read_bytes(), 1, 1)
    journal.sync()
    journal.close()
    [file] = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1])
    assert entries(reopened(folder)) == []


def test_a_failed_sync_is_final(tmp_path, monkeypatch):
    journal = Journal.open(tmp_path / "j")
    journal.add(b"a", 1, 0)

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(JournalFailed, match="Input/output error"):
        journal.sync()
    monkeypatch.undo()
    with pytest.raises(JournalFailed):
        journal.sync()
    journal.close()


def test_slices_are_short_but_show_whether_more_follows(tmp_path):
    journal = Journal.open(tmp_path / "j")
    for index in range(1, 3000):
        journal.add(b"x", index, 1)
    assert len(journal[5:]) == SLICE_ENTRIES_MAX
    assert journal[5:7] == [(b"x", 6, 1), (b"x", 7, 1)]
    assert journal[2998:] == [(b"x", 2999, 1)]
    assert journal[4000:] == []
    for index in range(3000, 3004):
        journal.add(b"x" * SLICE_BYTES_MAX, index, 1)
    assert len(journal[2999:]) == 2
    assert journal[-1][1] == 3003
    journal.close()
