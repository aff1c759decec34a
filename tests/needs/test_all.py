"""What users of other schedulers ran into: each has tests, wherever they bite.

Some are in this folder; the others are where their subject is tested. A test that is renamed or
removed is missed here.
"""

from __future__ import annotations

import importlib

import pytest

NEEDS = {
    "an interval restarts, or a run is dropped, when the leader dies": (
        "tests.needs.test_leaders:test_an_interval_does_not_restart_when_the_leader_dies_at_a_fire",
        "tests.clock.test_simulated:"
        "test_every_seven_days_with_daily_leader_changes_fires_on_day_seven_once",
        "tests.cluster.test_survival:test_no_second_is_lost_when_the_leader_is_killed",
    ),
    "after an election nothing runs any more": (
        "tests.needs.test_leaders:test_a_canary_fires_after_each_of_a_hundred_elections",
    ),
    "a fire in the gap of an orderly change of the leader does not exist": (
        "tests.needs.test_leaders:test_a_fire_in_the_gap_of_a_transfer_is_not_lost",
    ),
    "what falls into downtime is lost, or a single time that is just past": (
        "tests.clock.test_simulated:"
        "test_an_outage_of_the_whole_cluster_leaves_the_exact_runs_of_its_misfire_policy",
        "tests.planner.test_planner:test_times_that_are_past_at_creation_run_at_once_as_one",
        "tests.planner.test_planner:test_a_time_just_past_is_not_late",
    ),
    "a second late, and the run is discarded": (
        "tests.clock.test_simulated:"
        "test_with_the_defaults_a_five_second_freeze_over_500_fires_loses_none",
    ),
    "a slow store makes a whole batch missed": (
        "tests.needs.test_leaders:test_a_slow_disk_makes_fires_late_and_loses_none",
    ),
    "a new leader starts what may not overlap while it still runs": (
        "tests.needs.test_leaders:"
        "test_a_job_that_forbids_overlap_is_not_started_again_by_a_new_leader",
    ),
    "a worker host that comes back overlaps what it ran before": (
        "tests.needs.test_workers:"
        "test_a_worker_host_that_comes_back_does_not_overlap_what_it_ran_before",
    ),
    "worker and leader die together, and the job overlaps or is blocked for ever": (
        "tests.needs.test_workers:"
        "test_worker_and_leader_that_die_together_block_the_job_for_one_lease_and_no_longer",
        "tests.leader.test_leases:"
        "test_leaders_that_change_every_12_s_do_not_keep_a_dead_worker_s_lease_alive",
    ),
    "two acquire the same run": (
        "tests.needs.test_workers:test_retries_and_rivals_of_a_grant_make_one_lease",
        "tests.core.test_machine:test_two_grants_that_exclude_each_other_never_share_an_entry",
        "tests.leader.test_dispatcher:test_a_grant_with_an_open_outcome_is_neither_lost_nor_doubled",
    ),
    "a node believes for days that it leads": (
        "tests.needs.test_leaders:"
        "test_what_an_old_leader_still_wants_to_write_or_give_out_is_refused",
        "tests.needs.test_processes:"
        "test_a_leader_that_wakes_up_gives_out_nothing_and_follows_by_itself",
        "tests.raft.test_leadership:test_a_cut_off_leader_refuses_and_another_takes_over",
    ),
    "a blip of the network makes two schedulers, or none after a sleep": (
        "tests.needs.test_processes:"
        "test_a_leader_that_wakes_up_gives_out_nothing_and_follows_by_itself",
        "tests.raft.test_leadership:test_a_follower_that_comes_back_deposes_nobody",
        "tests.leader.test_leases:test_a_frozen_leader_does_not_expire_the_world_when_it_wakes",
    ),
    "long work is delivered again and again": (
        "tests.needs.test_workers:test_work_ten_times_as_long_as_its_lease_is_given_out_once",
        "tests.needs.test_workers:"
        "test_work_that_nobody_speaks_for_is_given_out_again_and_its_old_report_refused",
    ),
    "a fire time in the spring gap launches thousands, or nothing any more": (
        "tests.schedule.test_needs:"
        "test_next_strictly_increases_and_is_bounded_at_every_change_of_every_zone",
    ),
    "the autumn fold repeats an instant for ever, or a day is skipped": (
        "tests.schedule.test_needs:test_a_midnight_job_fires_once_on_each_local_date_that_exists",
    ),
    "an hour late in spring, an hour lost in autumn": (
        "tests.schedule.test_needs:"
        "test_fixed_times_fire_once_a_day_and_hourly_ones_follow_the_hours_there_are",
    ),
    "a daily job runs twice in autumn": (
        "tests.schedule.test_needs:"
        "test_a_daily_job_at_two_runs_as_its_options_say_and_once_by_default",
    ),
    "runs stay running for weeks, or are leased for hours to nobody": (
        "tests.needs.test_workers:"
        "test_a_grant_whose_reply_was_lost_is_given_back_long_before_its_lease_ends",
        "tests.leader.test_leases:test_an_unacknowledged_assignment_is_released_after_two_seconds",
        "tests.leader.test_session:test_a_lease_given_back_as_its_worker_dies_does_not_stay_for_ever",
    ),
    "memory and snapshots grow, and unfinished files stay": (
        "tests.properties.test_memory:test_memory_is_bounded_at_constant_load",
        "tests.raft.test_snapshot:test_what_a_crash_left_unfinished_is_removed",
        "tests.raft.test_snapshot:test_a_write_that_fails_leaves_nothing",
        "tests.raft.test_backup:test_a_restore_that_fails_leaves_no_folder_behind",
    ),
    "everything starts at the top of the hour": (
        "tests.schedule.test_needs:"
        "test_ten_thousand_hourly_jobs_spread_evenly_over_their_window_with_unchanged_names",
        "tests.clock.test_simulated:test_jitter_is_the_same_after_a_restart_and_under_every_leader",
    ),
}


@pytest.mark.parametrize("need", NEEDS)
def test_it_is_shown(need: str) -> None:
    for shown in NEEDS[need]:
        module, name = shown.split(":")
        assert callable(getattr(importlib.import_module(module), name, None)), shown
