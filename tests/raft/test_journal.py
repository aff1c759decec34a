"""The journal on disk: what was synced comes back, a torn tail is repaired, damage is named."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tocsin_node.raft.disk import Disk
from tocsin_node.raft.errors import JournalDamaged, JournalFailed
from tocsin_node.raft.journal import SLICE_BYTES_MAX, SLICE_ENTRIES_MAX, Base, Journal

SEGMENT = 4096


def entries(journal: Journal) -> list[tuple[bytes, int, int]]:
    """What follows the base."""
    return [journal[position] for position in range(1, len(journal))]


def opened(folder: Path, segment_bytes: int = SEGMENT, **options: Any) -> Journal:
    return Journal.open(folder, segment_bytes=segment_bytes, **options)


def reopened(folder: Path, segment_bytes: int = SEGMENT, **options: Any) -> Journal:
    journal = opened(folder, segment_bytes, **options)
    journal.close()
    return journal


def used(data: bytes) -> int:
    """Bytes up to the zeros that a segment is filled with; payloads here end in none."""
    return len(data.rstrip(b"\0"))


def filled(folder: Path, groups: int, *, seed: int = 7) -> list[list[tuple[bytes, int, int]]]:
    """A journal of several synced groups; what it held after each."""
    chance = random.Random(seed)
    journal = opened(folder)
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
    journal = opened(tmp_path / "j")
    assert (len(journal), journal.getCurrentTerm(), journal.getVotedForNodeId()) == (1, 0, None)
    for index in range(2, 11):
        journal.add(b"entry %d" % index, index, 1)
    journal.setCurrentTerm(3, "n2")
    journal.deleteEntriesFrom(journal[6][1] - 1)
    journal.add(b"other", 7, 3)
    journal.sync()
    kept = entries(journal)
    journal.close()
    again = reopened(tmp_path / "j")
    assert entries(again) == kept
    assert kept[-1] == (b"other", 7, 3)
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (3, "n2")
    assert (again.first_index, again.last_index) == (1, 7)
    assert [again.term_at(index) for index in (0, 1, 7, 8)] == [None, 0, 3, None]
    assert again.getRaftCommitIndex() == 1


def test_what_was_not_synced_is_dirty_and_not_on_disk(tmp_path):
    journal = opened(tmp_path / "j")
    journal.add(b"a", 2, 0)
    journal.sync()
    assert not journal.dirty
    journal.add(b"b", 3, 0)
    assert journal.dirty
    assert journal.durable_index == 2
    journal.close()
    assert entries(reopened(tmp_path / "j")) == [(b"a", 2, 0)]


def test_term_and_vote_are_durable_when_set_and_carry_what_was_before(tmp_path):
    journal = opened(tmp_path / "j")
    journal.add(b"a", 2, 0)
    journal.setCurrentTerm(2, None)
    journal.close()
    again = reopened(tmp_path / "j")
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (2, None)
    assert entries(again) == [(b"a", 2, 0)]


class Recorder(Disk):
    """Notes what is written and synced, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self.calls.append("write")
        super().write(fd, data, offset)

    def datasync(self, fd: int) -> None:
        self.calls.append("sync")
        super().datasync(fd)

    def sync_folder(self, path: Path) -> None:
        self.calls.append("sync folder")
        super().sync_folder(path)


def test_each_change_is_synced_after_it_is_written(tmp_path):
    disk = Recorder()
    journal = opened(tmp_path / "j", 300, disk=disk)
    disk.calls.clear()
    for index in range(2, 5):
        journal.add(b"x", index, 0)
    journal.sync()
    journal.sync()
    journal.setCurrentTerm(1, "n1")
    assert disk.calls == ["write", "sync", "write", "sync"]
    disk.calls.clear()
    journal.add(b"x" * 200, 5, 1)
    journal.sync()
    # A head, the group, and then the name of the new segment too.
    assert disk.calls == ["write", "write", "sync", "sync folder"]
    journal.close()


def test_what_a_sync_under_way_covers_shrinks_with_the_log(tmp_path, hand_syncer):
    hand_syncer.held = True
    journal = opened(tmp_path / "j", syncer=hand_syncer)
    for index in range(2, 8):
        journal.add(b"x", index, 1)
    journal.flush()
    assert (hand_syncer.requested, journal.durable_index) == (1, 1)
    assert not journal.complete()
    journal.deleteEntriesFrom(4 - journal.first_index)
    journal.add(b"other", 4, 2)
    journal.flush()
    assert hand_syncer.requested == 1
    hand_syncer.finish()
    assert journal.complete()
    # Entry 3 is on disk as it is in memory; entry 4 is another one there.
    assert journal.durable_index == 3
    assert journal.dirty
    journal.flush()
    hand_syncer.finish()
    assert journal.complete()
    assert (journal.durable_index, journal.dirty) == (4, False)
    journal.deleteEntriesFrom(3 - journal.first_index)
    assert journal.durable_index == 2
    journal.close()


def test_no_group_is_written_while_another_is_being_synced(tmp_path, hand_syncer):
    hand_syncer.held = True
    disk = Recorder()
    journal = opened(tmp_path / "j", syncer=hand_syncer, disk=disk)
    disk.calls.clear()
    journal.add(b"a", 2, 1)
    journal.flush()
    journal.add(b"b", 3, 1)
    journal.flush()
    assert disk.calls == ["write"]
    hand_syncer.finish()
    # The term does not wait for the loop: it takes the answer and syncs the rest itself.
    journal.setCurrentTerm(4, None)
    assert disk.calls == ["write", "write", "sync"]
    assert (journal.durable_index, journal.dirty) == (3, False)
    journal.close()


def test_the_syncer_is_given_each_new_segment(tmp_path, hand_syncer):
    journal = opened(tmp_path / "j", 300, syncer=hand_syncer)
    for index in range(2, 20):
        journal.add(b"x" * 50, index, 1)
        journal.flush()
        assert journal.complete()
    journal.close()
    assert len(hand_syncer.files) == len(list((tmp_path / "j").iterdir()))


def test_segments_are_rotated_and_each_carries_term_and_vote(tmp_path):
    journal = opened(tmp_path / "j", 500)
    journal.setCurrentTerm(5, "n3")
    for index in range(2, 50):
        journal.add(b"x" * 50, index, 5)
        journal.sync()
    journal.close()
    files = sorted((tmp_path / "j").iterdir())
    assert len(files) > 5
    again = reopened(tmp_path / "j", 500)
    assert entries(again) == entries(journal)
    assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (5, "n3")
    assert all(b"n3" in file.read_bytes()[:160] for file in files[1:])
    # Only the last one still has room in it.
    assert [used(f.read_bytes()) == f.stat().st_size for f in files].count(False) == 1


@pytest.mark.parametrize("missing", [0, 1])
def test_a_missing_segment_is_named(tmp_path, missing):
    journal = opened(tmp_path / "j", 200)
    for index in range(2, 20):
        journal.add(b"x" * 50, index, 1)
        journal.sync()
    journal.close()
    files = sorted((tmp_path / "j").iterdir())
    files[missing].unlink()
    reason = ["segments before 2 are missing", "segment 2 is missing"][missing]
    with pytest.raises(JournalDamaged, match=reason) as caught:
        opened(tmp_path / "j")
    assert caught.value.path == files[missing + 1]


def test_a_journal_cut_at_any_byte_keeps_every_group_before_the_cut(tmp_path, caplog):
    states = filled(tmp_path / "j", 3)
    [file] = (tmp_path / "j").iterdir()
    whole = file.read_bytes()[: used(file.read_bytes())]
    known = {len(state): state for state in states}
    shortest = 0
    for size in range(len(whole) + 1):
        # Cut off, or never written; in the second case up to the sector at most.
        zeros = bytes(SEGMENT - size) if size % 512 == 0 or size == len(whole) else b""
        file.write_bytes(whole[:size] + zeros)
        found = entries(reopened(tmp_path / "j"))
        assert found == states[-1][: len(found)]
        assert len(found) >= shortest
        shortest = len(found)
        # The repaired journal goes on as if the tail had never been.
        journal = opened(tmp_path / "j")
        journal.add(b"next", journal.last_index + 1, 2)
        journal.sync()
        journal.close()
        again = reopened(tmp_path / "j")
        assert entries(again)[:-1] == found
    assert shortest == max(known)


def test_a_tail_of_unwritten_sectors_is_repaired(tmp_path):
    folder = tmp_path / "j"
    journal = opened(folder)
    journal.add(b"kept", 2, 1)
    journal.sync()
    [file] = folder.iterdir()
    size = used(file.read_bytes())
    journal.add(b"y" * 3000, 3, 1)
    journal.sync()
    journal.close()
    data = bytearray(file.read_bytes())
    data[size + 1024 : size + 1024 + 1024] = bytes(1024)
    file.write_bytes(data)
    assert entries(reopened(folder)) == [(b"kept", 2, 1)]
    assert used(file.read_bytes()) == size
    assert file.stat().st_size == SEGMENT


def test_every_flipped_byte_is_named_with_file_and_offset(tmp_path):
    states = filled(tmp_path / "j", 4)
    [file] = (tmp_path / "j").iterdir()
    whole = file.read_bytes()
    for position in range(used(whole)):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        file.write_bytes(damaged)
        with pytest.raises(JournalDamaged) as caught:
            opened(tmp_path / "j")
        assert caught.value.path == file
        assert caught.value.offset <= position
        assert str(file) in str(caught.value)
    # In the room that was never used, a flip may also pass for the end of a torn write.
    for position in range(used(whole), used(whole) + 600):
        damaged = bytearray(whole)
        damaged[position] ^= 0x40
        file.write_bytes(damaged)
        with suppress(JournalDamaged):
            assert entries(reopened(tmp_path / "j")) == states[-1]
    file.write_bytes(whole)
    assert entries(reopened(tmp_path / "j")) == states[-1]


def test_a_hole_before_a_later_group_is_damage_and_not_a_tail(tmp_path):
    filled(tmp_path / "j", 25)
    [file] = (tmp_path / "j").iterdir()
    data = bytearray(file.read_bytes())
    assert used(data) > 2048
    data[512:1024] = bytes(512)
    file.write_bytes(data)
    with pytest.raises(JournalDamaged):
        opened(tmp_path / "j")


def test_a_cut_in_a_segment_that_is_not_the_last_is_damage(tmp_path):
    journal = opened(tmp_path / "j", 200)
    for index in range(2, 20):
        journal.add(b"x" * 50, index, 1)
        journal.sync()
    journal.close()
    first = min((tmp_path / "j").iterdir())
    first.write_bytes(first.read_bytes()[:-5])
    with pytest.raises(JournalDamaged) as caught:
        opened(tmp_path / "j")
    assert caught.value.path == first


def test_user_bytes_cannot_pass_for_a_record(tmp_path):
    folder = tmp_path / "j"
    filled(tmp_path / "other", 2)
    [other] = (tmp_path / "other").iterdir()
    journal = opened(folder)
    journal.add(other.read_bytes()[: used(other.read_bytes())], 2, 1)
    journal.sync()
    journal.close()
    [file] = folder.iterdir()
    file.write_bytes(file.read_bytes()[: used(file.read_bytes()) - 1])
    assert entries(reopened(folder)) == []


@pytest.mark.parametrize("call", ["write", "datasync"])
def test_a_failed_sync_is_final(tmp_path, call):
    class Failing(Disk):
        failing = False

        def write(self, fd: int, data: bytes, offset: int) -> None:
            self.fail("write")
            super().write(fd, data, offset)

        def datasync(self, fd: int) -> None:
            self.fail("datasync")
            super().datasync(fd)

        def fail(self, name: str) -> None:
            if self.failing and name == call:
                raise OSError(5, "Input/output error")

    disk = Failing()
    journal = opened(tmp_path / "j", disk=disk)
    journal.add(b"a", 2, 0)
    disk.failing = True
    with pytest.raises(JournalFailed, match="Input/output error"):
        journal.sync()
    disk.failing = False
    for change in (journal.sync, journal.flush, lambda: journal.setCurrentTerm(1, None)):
        with pytest.raises(JournalFailed):
            change()
    assert journal.durable_index == 1
    journal.close()


def test_slices_are_short_but_show_whether_more_follows(tmp_path):
    journal = opened(tmp_path / "j")
    for index in range(2, 3000):
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


def long_journal(folder: Path, last: int = 60) -> Journal:
    journal = opened(folder, 500)
    journal.setCurrentTerm(3, "n2")
    for index in range(2, last + 1):
        journal.add(b"x%d" % index * 10, index, 3)
        journal.sync()
    return journal


def remove_all(paths: list[Path]) -> None:
    for path in paths:
        path.unlink()


def test_compaction_drops_whole_segments_and_what_is_below_in_memory(tmp_path):
    journal = long_journal(tmp_path / "j")
    whole = entries(journal)
    before = len(list((tmp_path / "j").iterdir()))
    useless = journal.compact(40)
    assert useless == sorted((tmp_path / "j").iterdir())[: len(useless)]
    assert 3 < len(useless) < before
    assert (journal.first_index, journal.term_at(40), journal.term_at(39)) == (40, 3, None)
    assert entries(journal) == whole[39:]
    remove_all(useless)
    journal.close()
    for snapshot in (Base(40, 3), Base(55, 3), Base(60, 3)):
        again = reopened(tmp_path / "j", 500, snapshot=snapshot)
        assert again.first_index <= 40
        assert entries(again) == whole[again.first_index - 1 :]
        assert (again.getRaftCommitIndex(), again.durable_index) == (snapshot.at, 60)
        assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (3, "n2")


@pytest.mark.parametrize("snapshot", [None, Base(20, 3)])
def test_a_gap_between_snapshot_and_journal_is_damage(tmp_path, snapshot):
    journal = long_journal(tmp_path / "j")
    remove_all(journal.compact(40))
    journal.close()
    with pytest.raises(JournalDamaged, match="snapshot") as caught:
        opened(tmp_path / "j", 500, snapshot=snapshot)
    assert caught.value.path == min((tmp_path / "j").iterdir())


def test_a_crash_at_any_point_of_the_removal_leaves_a_journal_that_opens(tmp_path):
    journal = long_journal(tmp_path / "j")
    whole = entries(journal)
    useless = journal.compact(50)
    journal.close()
    for path in [None, *useless]:
        if path is not None:
            path.unlink()
        again = reopened(tmp_path / "j", 500, snapshot=Base(50, 3))
        assert entries(again) == whole[again.first_index - 1 :]


def test_entries_after_a_snapshot_are_kept_when_the_log_agrees_with_it(tmp_path):
    journal = long_journal(tmp_path / "j", 30)
    journal.close()
    assert entries(reopened(tmp_path / "j", 500, snapshot=Base(10, 3)))[-1][1] == 30


@pytest.mark.parametrize("snapshot", [Base(90, 4), Base(20, 2)])
def test_a_journal_gives_way_to_a_snapshot_that_it_does_not_lead_to(tmp_path, snapshot):
    journal = long_journal(tmp_path / "j", 30)
    journal.close()
    again = opened(tmp_path / "j", 500, snapshot=snapshot)
    assert (again.first_index, again.last_index, entries(again)) == (snapshot.at, snapshot.at, [])
    assert again.term_at(snapshot.at) == snapshot.term
    again.add(b"next", snapshot.at + 1, 5)
    again.sync()
    again.close()
    last = reopened(tmp_path / "j", 500, snapshot=snapshot)
    assert entries(last) == [(b"next", snapshot.at + 1, 5)]
    assert (last.getCurrentTerm(), last.getVotedForNodeId()) == (3, "n2")


def test_replacing_the_log_survives_a_crash_at_any_byte(tmp_path):
    journal = long_journal(tmp_path / "j", 30)
    useless = journal.replace(Base(90, 4))
    journal.add(b"next", 91, 4)
    journal.sync()
    journal.close()
    newest = max((tmp_path / "j").iterdir())
    files = {path: path.read_bytes() for path in (tmp_path / "j").iterdir()}
    for size in range(0, used(files[newest]), 3):
        remove_all(list((tmp_path / "j").iterdir()))
        for path, data in files.items():
            path.write_bytes(data[:size] if path == newest else data)
        again = reopened(tmp_path / "j", 500, snapshot=Base(90, 4))
        assert (again.first_index, again.last_index) == (90, 90)
        assert (again.getCurrentTerm(), again.getVotedForNodeId()) == (3, "n2")
    remove_all(list((tmp_path / "j").iterdir()))
    newest.write_bytes(files[newest])
    assert useless == sorted(set(files) - {newest})
    assert entries(reopened(tmp_path / "j", 500, snapshot=Base(90, 4))) == [(b"next", 91, 4)]


def test_a_truncation_that_reaches_below_the_oldest_segment_left(tmp_path):
    journal = long_journal(tmp_path / "j", 30)
    before = journal._segments[-1].last_index_before
    journal.deleteEntriesFrom(before - 1 - journal.first_index)
    for index in range(before - 1, 60):
        journal.add(b"y%d" % index * 10, index, 4)
        journal.sync()
    whole = entries(journal)
    remove_all(journal.compact(before + 3))
    journal.close()
    again = reopened(tmp_path / "j", 500, snapshot=Base(before + 3, 4))
    assert (again.first_index, again.term_at(before + 3)) == (before + 3, 4)
    assert entries(again) == whole[before + 2 :]


def test_a_crash_while_segments_go_below_such_a_truncation_leaves_no_gap(tmp_path):
    journal = long_journal(tmp_path / "j", 30)
    before = journal._segments[-1].last_index_before
    journal.deleteEntriesFrom(before - 1 - journal.first_index)
    for index in range(before - 1, 90):
        journal.add(b"y%d" % index * 10, index, 4)
        journal.sync()
    whole = entries(journal)
    useless = journal.compact(85)
    journal.close()
    for number, path in enumerate(useless):
        path.unlink()
        folder = tmp_path / f"crashed{number}"
        shutil.copytree(tmp_path / "j", folder)
        # Twice: what the first start leaves is found, and is to be compacted, by the second.
        for _ in range(2):
            again = opened(folder, 500, snapshot=Base(85, 4))
            assert entries(again) == whole[again.first_index - 1 :]
            kept = [segment.number for segment in again._segments]
            assert [int(path.stem) for path in sorted(folder.iterdir())] == kept
            remove_all(again.compact(89)[:-1])
            again.close()


def test_a_log_may_start_far_above_one(tmp_path):
    start = 2**50
    journal = opened(tmp_path / "j", first_index=start)
    assert (journal.first_index, journal.last_index, journal.term_at(start)) == (start, start, 0)
    assert journal.getRaftCommitIndex() == start
    journal.add(b"x", start + 1, 1)
    journal.sync()
    journal.close()
    # What is on disk counts, not what a later configuration says.
    again = reopened(tmp_path / "j", first_index=1)
    assert entries(again) == [(b"x", start + 1, 1)]
    assert again.getRaftCommitIndex() == start
