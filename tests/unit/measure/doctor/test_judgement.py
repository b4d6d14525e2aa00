"""The judgement on made-up measurements: the right limit is named, and the right remedy first."""

from __future__ import annotations

import dataclasses

import pytest
from diagnoses import GB, WARM, change, measured, profile

from shardkit.measure.doctor.findings import Finding
from shardkit.measure.doctor.judgement import diagnose
from shardkit.measure.doctor.measured import effective


@pytest.mark.parametrize("stage", sorted(WARM))
def test_the_stage_that_takes_most_is_the_bottleneck(stage: str) -> None:
    found = diagnose(measured(warm={stage: 0.004}))

    assert found.bottleneck == stage
    assert max(found.shares, key=lambda each: found.shares[each]) == stage
    assert "(4 of 4.6 ms)" in found.verdict
    assert "87 %" in found.verdict
    assert sum(found.shares.values()) == pytest.approx(1)


def test_a_step_that_is_longer_than_loading_is_the_limit() -> None:
    given = measured(warm={"decode": 0.004}, rates=[1000.0])
    slow = diagnose(dataclasses.replace(given, step=0.147))  # of 64 images: 435 a second
    fast = diagnose(dataclasses.replace(given, step=0.032))  # 2,000 a second

    assert slow.bottleneck == "step"
    assert slow.verdict == (
        "The step, not loading, is the limit: the loader could feed 2.3 x what a step of 147 ms "
        "takes."
    )
    assert slow.remedies == []
    assert fast.bottleneck == "decode"
    assert fast.verdict.startswith("Loading, not the step, is the limit: it gives 0.5 x")
    assert fast.headroom == pytest.approx(0.5)
    assert diagnose(given).headroom is None


def test_cold_reading_limits_only_data_that_do_not_fit_in_memory() -> None:
    slow = profile(cold_read=0.05, warm={"decode": 0.004})
    fitting = diagnose(measured(profile=slow))
    large = measured(profile=slow, bytes=15 * GB)
    found = diagnose(large)

    assert fitting.bottleneck == "decode"
    assert [each.name for each in fitting.findings] == ["first epoch"]
    assert found.bottleneck == "read"
    assert "do not fit in memory" in found.verdict
    assert effective(large)["read"] == 0.05
    assert "first epoch" not in [each.name for each in found.findings]
    assert any("BlockShuffle" in each.what for each in found.remedies)


def test_reading_from_memory_is_not_blamed_on_the_disk() -> None:
    stored = {"stored_bytes": 3_000_000.0}
    waiting = diagnose(measured(profile=profile(warm={"read": 0.006}, **stored)))
    copying = diagnose(measured(profile=profile(warm={"read": 0.003}, **stored)))

    assert waiting.bottleneck == copying.bottleneck == "read"
    assert "no disk would be faster" not in waiting.verdict
    assert "no disk would be faster" in copying.verdict
    assert any("faster or a local disk" in each.what for each in waiting.remedies)
    assert not any("disk" in each.what for each in copying.remedies)


def test_cold_times_that_are_faster_than_warm_ones_do_not_count() -> None:
    odd = measured(profile=profile(cold_read=0.00001), bytes=15 * GB)

    assert effective(odd)["read"] == WARM["read"]


def test_a_transform_that_holds_the_lock_is_sent_to_processes() -> None:
    held = profile(warm={"transform": 0.01}, held=0.97)
    given = measured(
        profile=held, alternatives={"process": [380.0]}, rates=[100.0], transform="a:b"
    )
    found = diagnose(given)

    assert found.bottleneck == "interpreter lock"
    assert "97 %" in found.verdict
    assert "threads cannot share it" in found.verdict
    assert found.remedies[0].name == "process"
    assert found.remedies[0].gain == pytest.approx(3.8)
    assert 'engine="process", num_workers=2' in found.remedies[0].code


def test_where_processes_are_taken_already_it_says_so() -> None:
    held = profile(warm={"transform": 0.01}, held=0.97)
    found = diagnose(measured(profile=held, engine="process", alternatives={"thread": [30.0]}))

    assert "worker processes, which the loader takes" in found.verdict
    assert [each.name for each in found.remedies if each.gain] == []


def test_a_transform_that_frees_the_lock_may_be_slow_all_the_same() -> None:
    free = profile(warm={"transform": 0.01}, held=0.05)
    found = diagnose(measured(profile=free, engine="process", alternatives={"thread": [900.0]}))

    assert found.bottleneck == "transform"
    assert found.remedies[0].name == "thread"


def test_a_short_transform_that_holds_the_lock_is_no_bottleneck() -> None:
    found = diagnose(measured(profile=profile(warm={"decode": 0.01}, held=1.0)))

    assert found.bottleneck == "decode"


def test_a_problem_of_the_machine_comes_before_all_else() -> None:
    problem = Finding(
        name="shared memory",
        severity="problem",
        what="/dev/shm is too small",
        evidence="1 MB free",
        remedy="raise it",
    )
    note = Finding(name="other", severity="note", what="a note", evidence="seen")
    found = diagnose(measured(step=10.0), [note, problem])

    assert found.bottleneck == "shared memory"
    assert found.verdict == "/dev/shm is too small: 1 MB free."
    assert found.remedies[0].what == "raise it"
    assert [each.severity for each in found.findings] == ["problem", "note"]


def test_warnings_of_the_machine_do_not_hide_the_bottleneck() -> None:
    warning = Finding(name="x", severity="warning", what="something", evidence="seen")

    assert diagnose(measured(warm={"decode": 0.01}), [warning]).bottleneck == "decode"


def test_a_change_gains_what_it_saves_of_the_whole_sample() -> None:
    given = measured(warm={"decode": 0.004, "transform": 0.0}, changes=[change()])
    total = sum(given.profile.warm.values())
    (best, *_) = diagnose(given).remedies

    assert best.name == "resize"
    assert best.gain == pytest.approx(total / (total - 0.003))
    assert best.basis == "measured on 24 images, re-encoded in memory"
    assert "--resize 256" in best.what


def test_a_smaller_image_is_read_sooner_only_from_the_disk() -> None:
    from_disk = measured(
        profile=profile(cold_read=0.05), bytes=15 * GB, changes=[change(before=1, after=1)]
    )
    (best, *_) = diagnose(from_disk).remedies

    assert best.gain == pytest.approx(0.0506 / (0.0506 - 0.75 * 0.05))
    in_memory = dataclasses.replace(from_disk, bytes=GB)
    assert [each for each in diagnose(in_memory).remedies if each.gain] == []


def test_larger_images_cost_reading_from_memory_too() -> None:
    given = measured(
        warm={"read": 0.001, "decode": 0.004},
        changes=[change("raw", before=1, after=0, bytes_before=1.0, bytes_after=2.0)],
    )
    (best, *_) = diagnose(given).remedies

    assert best.gain == pytest.approx(0.0055 / (0.0055 - 0.0041 + 0.001))


def test_what_gains_nothing_is_not_proposed() -> None:
    given = measured(warm={"decode": 0.004}, changes=[change(after=0.0039), change("fast")])

    assert [each.name for each in diagnose(given).remedies] == ["fast"]
    assert diagnose(given).remedies[0].change is None


def test_raw_pixels_come_first_only_if_they_gain_far_more_and_fit() -> None:
    small, raw = change(after=0.001), change("raw", after=0.0009, bytes_after=196_608.0)
    far = dataclasses.replace(raw, after=0.0)
    given = measured(warm={"decode": 0.004}, changes=[raw, small])

    assert [each.name for each in diagnose(given).remedies] == ["resize", "raw"]
    only_far = dataclasses.replace(given, changes=[change(after=0.0035), far])
    assert diagnose(only_far).remedies[0].name == "raw"
    many = dataclasses.replace(given, images=10_000_000)
    assert [each.name for each in diagnose(many).remedies] == ["resize"]


def test_a_crop_that_would_show_something_else_says_so() -> None:
    given = measured(warm={"decode": 0.004}, changes=[change(other_pixels=True)])

    assert "sees something else" in diagnose(given).remedies[0].what


def test_a_transform_that_gets_smaller_images_may_show_something_else() -> None:
    given = measured(warm={"decode": 0.004}, changes=[change(maybe_other=True)])

    assert "may see something else" in diagnose(given).remedies[0].what


@pytest.mark.parametrize("repeats", [True, False])
def test_threads_are_named_with_what_they_do_to_random_numbers(repeats: bool) -> None:
    given = measured(
        rates=[100.0], engine="process", alternatives={"thread": [300.0]}, repeats=repeats
    )

    assert ("do not repeat in threads" in diagnose(given).remedies[0].what) is not repeats


def test_one_worker_that_cannot_be_measured_is_left_out() -> None:
    found = diagnose(measured(single=None))

    assert found.explained is None
    assert "stages" not in [each.name for each in found.findings]


def test_stages_that_do_not_add_up_are_noted() -> None:
    given = measured(warm={"decode": 0.004})
    assert given.single is not None
    doubled = dataclasses.replace(given, single=given.single / 2)

    assert diagnose(given).explained == pytest.approx(1)
    assert "stages" not in [each.name for each in diagnose(given).findings]
    found = diagnose(doubled)
    assert found.explained == pytest.approx(0.5)
    assert [each.evidence for each in found.findings if each.name == "stages"] == [
        "they are 50 % of a sample's time in a loader of one worker"
    ]


def test_cold_times_that_are_not_cold_are_noted() -> None:
    warm = diagnose(measured(profile=profile(resident=0.9)))

    assert [each.name for each in warm.findings] == ["cold"]
    unknown = diagnose(measured(profile=profile(resident=1.0, cold_read=None)))
    assert unknown.findings == []


def test_threads_of_torch_that_get_in_the_way_are_a_warning_with_a_remedy() -> None:
    given = measured(
        warm={"decode": 0.004},
        rates=[280.0, 300.0, 320.0],
        alternatives={"one torch thread": [900.0, 330.0, 1000.0]},
    )
    found = diagnose(given)

    assert [(each.name, each.severity) for each in found.findings] == [("torch threads", "warning")]
    assert found.remedies[0].code == "torch.set_num_threads(1)"
    assert found.remedies[0].gain == pytest.approx(3)
    calm = diagnose(
        dataclasses.replace(given, alternatives={"one torch thread": [310.0, 900.0, 1000.0]})
    )
    assert calm.findings == []
    assert [each for each in calm.remedies if each.gain] == []


def test_an_operation_that_is_used_already_is_not_advised() -> None:
    slow = {"transform": 0.01}
    by_hand = diagnose(measured(warm=slow, decode="pil")).remedies
    by_operation = diagnose(measured(warm=slow)).remedies

    assert any("RandomResizedCrop" in each.what for each in by_hand)
    assert not any("RandomResizedCrop" in each.what for each in by_operation)
