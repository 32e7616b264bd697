"""Each claim of SECURITY.md is held by a test, which is named here; what is advice, or a limit, is named as such."""

from __future__ import annotations

import ast
import os
import re
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from planner.ir.codec import dump
from planner.ir.scratch import scratch_folder
from tests.halopipe.commands import HOME, PROFILE, call

HELD = {
    "They are JSON, parsed strictly": "planner/ir/test_codec.py::test_any_json_is_a_profile_or_refused",
    "But a plan names its model": "test_security.py::test_reading_a_file_imports_no_model_of_it",
    "What makes no sense in them is refused": "planner/ir/test_codec.py::test_a_spoilt_value_is_a_plan_or_refused",
    "silent pipes are no input": "halopipe/cli/test_app.py::test_a_pipe_that_is_silent_is_no_input",
    "control characters": "halopipe/terminal/test_output_files.py::test_a_terminal_gets_no_control_characters",
    "Outputs replace regular files alone": "planner/ir/test_files.py::test_a_folder_is_never_replaced",
    "Links are followed and stay": "planner/ir/test_files.py::test_a_link_stays_and_what_it_names_is_replaced",
    "devices and pipes are written to": "planner/ir/test_files.py::test_a_pipe_gets_the_text_and_stays",
    "names as its input is not replaced": (
        "halopipe/terminal/test_output_files.py::test_an_input_is_not_claimed_for_output_by_any_of_its_names"
    ),
    "or other file that the command names": (
        "halopipe/terminal/test_output_files.py::test_no_verb_puts_its_result_in_the_place_of_what_it_was_given"
    ),
    "A plan, profile, job file": "halopipe/run_spec/test_job_file.py::test_a_job_file_that_is_read_is_not_replaced",
    "No output is put in the place of a checkpoint": (
        "halopipe/terminal/test_output_files.py::test_no_output_is_put_where_a_checkpoint_is_or_may_be"
    ),
    "temporary folders have mode 0700": "test_security.py::test_the_folder_of_a_job_is_its_users_alone",
    "those of other users are not opened": (
        "planner/ir/test_scratch.py::test_what_others_put_among_the_temporary_files_is_neither_opened_nor_removed"
    ),
    "Locks and journals": (
        "runtime/checkpoint/test_lock.py::test_what_is_no_file_in_the_place_of_a_lock_is_refused_without_a_wait"
    ),
    "`model.pt` is a pickle": "profiler/source/test_saved.py::test_files_of_torch_are_models_too",
    "names such a file with its SHA-256": (
        "profiler/source/test_saved.py::test_a_file_that_is_gone_or_another_one_is_told"
    ),
    "which hold no code": "runtime/checkpoint/test_reader.py::test_a_head_with_bad_intent_is_refused",
    "without running what it names": "runtime/extras/distcp/test_folder.py::test_a_pickle_that_runs_code_runs_none",
    "in memory bounded by its size": (
        "runtime/extras/distcp/test_folder.py::test_a_few_bytes_take_no_more_memory_than_they_are"
    ),
    "by torch's weights-only loader": (
        "runtime/extras/distcp/test_folder.py::test_an_archive_with_bad_intent_is_refused"
    ),
    "links that lead outside": "runtime/checkpoint/test_reader.py::test_a_link_to_outside_is_refused",
    "Hashes find damage": "runtime/checkpoint/test_reader.py::test_every_flipped_bit_is_found",
    "So is `machine.json` beside it": (
        "profiler/links/test_kept.py::test_what_another_user_may_have_put_there_is_not_read"
    ),
    "C++ kernels are kept": "cuda_ops/sparse/test_native_library.py::test_the_cache_is_this_users_alone",
    "Nothing is loaded from it": (
        "cuda_ops/sparse/test_native_library.py::test_what_is_not_this_users_is_left_alone_with_a_word"
    ),
    "A library that is a link": (
        "cuda_ops/sparse/test_native_library.py::test_a_library_that_others_could_have_written_is_made_anew"
    ),
    "no code and no graph is read": (
        "profiler/capture/test_kept_checks.py::test_a_second_capture_of_the_same_is_traced_and_not_checked"
    ),
    "the check is made": "profiler/capture/test_kept_checks.py::test_a_folder_that_others_may_write_to_is_not_read",
    "Triton's cache": "cuda_ops/sparse/test_native_library.py::test_triton_loads_nothing_of_others",
    "rendezvous store binds to loopback": (
        "runtime/monitor/test_watch.py::test_the_store_listens_on_the_loopback_interface_only"
    ),
    "ranks that were given torchrun's variables": (
        "halopipe/launch/test_torchrun.py::test_rank_0_hosts_the_store_where_the_job_says_and_nowhere_else"
    ),
    "It listens on 127.0.0.1": (
        "halopipe/extras/serving/test_http.py::test_nobody_else_is_listened_to_unless_it_is_asked_for"
    ),
    "Bodies have a largest size": "halopipe/extras/serving/test_http.py::test_what_is_no_request_is_refused",
    "half a minute to come": "halopipe/extras/serving/test_http.py::test_a_body_that_does_not_come_is_not_waited_for",
    "too large together": "halopipe/extras/serving/test_http.py::test_bodies_that_come_slowly_keep_nobody_out",
    "Of too many connections": (
        "halopipe/extras/serving/test_http.py::test_connections_that_send_nothing_or_little_keep_nobody_out"
    ),
    "headers have 16 KiB": (
        "halopipe/extras/serving/test_http.py::test_headers_are_no_larger_than_is_said_however_they_come"
    ),
    "What a request says of its own size": (
        "halopipe/extras/serving/test_request_sources.py::"
        "test_a_file_that_is_small_and_says_that_it_is_large_takes_no_more"
    ),
    "whose pickle is read": (
        "halopipe/extras/serving/test_torch_files.py::test_a_pickle_calls_nothing_and_takes_no_more_than_its_bytes"
    ),
    "nor can one whose own name": (
        "halopipe/extras/serving/test_http.py::test_a_page_that_has_its_own_name_lead_here_is_not_answered"
    ),
    "requests that find no room": (
        "halopipe/extras/serving/test_http.py::test_what_finds_no_room_is_told_when_to_come_again"
    ),
    "nothing is unpickled": "halopipe/extras/serving/test_request_sources.py::test_pickles_are_refused",
    "The type of the content must be said": "halopipe/extras/serving/test_http.py::test_what_is_no_request_is_refused",
    "Ranks and the server talk over a socket": "test_security.py::test_the_folder_of_a_job_is_its_users_alone",
}
"""Of a claim how it begins, or what tells it from others of its sentence, and the test that holds it."""

ADVICE = (
    "Use only models",
    "set `TORCHINDUCTOR_CACHE_DIR`",
    "torchrun hosts the store",
    "neither authenticate nor encrypt",
    "Use a network where",
    "a port without passwords",
    "Put a proxy",
)
"""What users are asked to do, and what halopipe does not keep from them."""


def sentences() -> list[str]:
    """Of the list of what is trusted, without the words that begin a point."""
    text = (HOME / "SECURITY.md").read_text("utf-8").partition("does not:")[2].rpartition("\n\n")[0]
    points = [" ".join(point.split()) for point in text.split("\n- ")[1:]]
    return [each for point in points for each in re.split(r"(?<=[a-z0-9`)][.])\)?\*{0,2} (?=[A-Z`(])", point)]


def test_every_sentence_is_held_by_a_test_or_is_advice() -> None:
    page = sentences()
    assert len(page) > 25
    held = {**HELD, **dict.fromkeys(ADVICE, "")}
    bare = [each for each in page if not any(claim in each for claim in held)]
    heads = [each for each in bare if each.endswith("**") or "**" in each]
    assert [each for each in bare if each not in heads] == []
    assert [claim for claim in held if not any(claim in each for each in page)] == []


@pytest.mark.every_case
@pytest.mark.parametrize("test", sorted(set(HELD.values())))
def test_the_tests_are_there(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((HOME / "tests" / file).read_text("utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_reading_a_file_imports_no_model_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("open('imported', 'w')\n")
    dump(replace(PROFILE, model=replace(PROFILE.model, factory="model.py:factory")), "profile.json")
    for command in (["plan", "profile.json"], ["check", "plan.json"], ["compare", "plan.json"]):
        assert call(*command).exit_code == 0
    assert '"model.py:factory"' in Path("plan.json").read_text("utf-8")
    assert not Path("imported").exists()


def test_the_folder_of_a_job_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    umask = os.umask(0)
    try:
        with scratch_folder("job") as folder:
            assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finally:
        os.umask(umask)
